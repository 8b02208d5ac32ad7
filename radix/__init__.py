"""What is cached and where: rows of hidden states, the tree component that owns them, tail planning."""
