"""The folder in which all patterns keep what was measured."""

from parity.harness import measurements

__all__ = ["measurements"]
