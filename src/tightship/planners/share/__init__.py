"""Planners that let storages share whole buffers by name: Graph -> Plan."""
