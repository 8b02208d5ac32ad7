"""Rebuilding recurrent states from cached rows. Never imports sglang."""
