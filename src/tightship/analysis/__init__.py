"""Facts about a graph, no choices: order, structure, bounds."""
