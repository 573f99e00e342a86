"""A training step or forward pass in PyTorch, as a graph and a program."""
