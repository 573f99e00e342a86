"""What belongs to one process and to the objects it was made for: refused to be copied, pickled or run elsewhere."""

from __future__ import annotations

import os
from typing import Any, NoReturn

from tightship.errors import Unsupported

__all__ = ["NotCopied", "check_process"]

_WHY = "its arena and plan belong to this process, and to the model and optimizer it was made for"
_INSTEAD = (
    "copy the model before it is given to fit or infer, or keep the step on an object outside of the model; "
    "to save a model, save its state_dict()"
)


class NotCopied:
    """Refuses ``copy.copy``, ``copy.deepcopy`` and pickling (``torch.save``, ``spawn``) with ``Unsupported``.

    For whatever holds native memory, threads, files, or tensors without bytes of their own: two objects would own
    what is there once. A copy that begins further out, at a model say, is refused when it gets here.
    """

    __slots__ = ()

    def __copy__(self) -> NoReturn:
        _refuse("copying", self)

    def __deepcopy__(self, memo: dict[int, Any]) -> NoReturn:
        _refuse("copying", self)

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        _refuse("pickling", self)


def _refuse(verb: str, owner: object) -> NoReturn:
    name = type(owner).__name__
    raise Unsupported(f"{verb} {'an' if name[0] in 'AEIOU' else 'a'} {name}", _WHY, _INSTEAD)


def check_process(made_in: int, owner: object) -> None:
    """Raise ``Unsupported`` in another process than ``made_in``, the one that made ``owner``: in a forked child the
    threads are gone, and files are the parent's."""
    here = os.getpid()
    if here != made_in:
        raise Unsupported(
            f"{type(owner).__name__} of process {made_in} in its child {here}",
            "its arena, threads and files belong to the process that made it",
            "make one in this process, after the fork",
        )
