"""tightship fits a neural network's work into the memory there is."""

__version__ = "0.1.0"
