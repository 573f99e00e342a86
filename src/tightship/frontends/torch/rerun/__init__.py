"""A step's Python code, run in every step on stand-ins and held against its record."""
