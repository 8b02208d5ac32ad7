"""What scripts/eval_quality asks and how it scores: prompts, metrics, intervals and tables are pure; ask.py talks to
the server and runs.py starts it."""
