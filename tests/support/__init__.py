"""What several test files share: models, graphs, data, checks and reference implementations."""
