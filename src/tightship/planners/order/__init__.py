"""Planners that decide the order of ops: graph -> order."""
