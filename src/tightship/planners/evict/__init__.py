"""Planners that decide what leaves memory between two uses: graph, order and budget -> steps."""
