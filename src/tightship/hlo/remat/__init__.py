"""Rematerialization of scheduled HLO modules: a module and a limit in bytes to a module that needs less."""
