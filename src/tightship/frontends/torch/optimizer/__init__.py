"""An optimizer's step as ops, one per parameter where that is bit-identical."""
