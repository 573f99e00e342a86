"""Running plans in PyTorch: the arena allocator, the meter, the interpreter. Planners never import this."""
