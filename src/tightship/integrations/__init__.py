"""Ways into other people's tools; thin."""
