"""Training of small hybrids: words, tasks over them, the model in plain torch, its gates, the loop, the checkpoint."""
