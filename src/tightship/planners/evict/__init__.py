"""Planners that decide what leaves memory between two uses: graph, order and limit -> steps."""
