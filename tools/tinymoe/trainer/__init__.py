"""The model in PyTorch, its optimiser, its evaluation and the training loop (used by ../train.py)."""
