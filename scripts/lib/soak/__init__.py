"""Soak of a running server: plan.py says what is sent, client.py sends it, judge.py says what was wrong with it."""
