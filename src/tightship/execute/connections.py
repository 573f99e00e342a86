"""Connections between ranks, as this process has them: where gloo waits, nothing but their end ends that."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

__all__ = ["Connection", "connections", "shut"]


class Connection(NamedTuple):
    """The addresses of its two ends."""

    own: str
    other: str


def connections() -> list[Connection]:
    """All of this process."""
    return [connection for _, connection in _open()]


def shut(peers: Sequence[Connection], ports: Collection[int]) -> int:
    """Ends the connections whose other ends are among those of the ``peers``, but those to or from ``ports``; how
    many there were."""
    count, theirs = 0, {Connection(c.other, c.own) for c in peers}
    for fd, connection in _open():
        if connection in theirs and not any(_port(end) in ports for end in connection):
            with suppress(OSError), socket.socket(fileno=os.dup(fd)) as there:
                there.shutdown(socket.SHUT_RDWR)
                count += 1
    return count


def _open() -> Iterator[tuple[int, Connection]]:
    for name in os.listdir("/dev/fd"):
        fd = int(name)
        with suppress(OSError):
            if not stat.S_ISSOCK(os.fstat(fd).st_mode):
                continue
            with socket.socket(fileno=os.dup(fd)) as there:
                if there.family in (socket.AF_INET, socket.AF_INET6):
                    yield fd, Connection(_address(there.getsockname()), _address(there.getpeername()))


def _address(end: Sequence[object]) -> str:
    """Alike for both ends, of which one may speak IPv4 and the other IPv6."""
    return f"{str(end[0]).removeprefix('::ffff:')} {end[1]}"


def _port(end: str) -> int:
    return int(end.rpartition(" ")[2])
