"""``cached_property`` that takes no lock.

Up to Python 3.11 that of :mod:`functools` holds a lock of its own, one for all instances, while a value is computed.
A process that another thread forks meanwhile inherits it locked, and waits for ever at its first use. Python 3.12
took the lock away; two threads that ask at the same time both compute, and as the values are pure, either is kept.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING or sys.version_info >= (3, 12):
    from functools import cached_property
else:

    class cached_property:  # noqa: N801 (the standard library's name)
        """Computed at the first use, and kept in the instance's ``__dict__`` from then on."""

        def __init__(self, function: Any) -> None:
            self._function = function
            self.__doc__ = function.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self._name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            if instance is None:
                return self
            value = self._function(instance)
            instance.__dict__[self._name] = value
            return value


__all__ = ["cached_property"]
