"""Several ranks of torch.distributed on this machine, each a process that runs scenarios."""

from __future__ import annotations

import inspect
import json
import math
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

Rows = dict[str, list[Any]]
WORKERS = Path(__file__).resolve().parent.parent / "distributed"


class Server:
    """Starts ranks of one worker as forks of a process (`rank_server`)."""

    known: tuple[str, Server] | None = None

    def __init__(self, worker: str) -> None:
        command = [sys.executable, "-W", "ignore", str(Path(__file__).with_name("rank_server.py"))]
        self._process = subprocess.Popen(
            [*command, str(WORKERS), worker.removesuffix(".py")],
            env=os.environ | {"WORLD_SIZE": "2"},
            text=True,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )

    @classmethod
    def of(cls, worker: str) -> Server:
        """The one that there is, or another in its place: each has all of its imports in memory."""
        if cls.known is None or cls.known[0] != worker:
            if cls.known is not None:
                cls.known[1]._process.communicate()
            cls.known = worker, cls(worker)
        return cls.known[1]

    def answer(self, **request: Any) -> Any:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(request), file=self._process.stdin, flush=True)
        return json.loads(self._process.stdout.readline())


class Forked:
    """A rank that such a server has started; as far as it goes, a ``subprocess.Popen``."""

    def __init__(
        self, server: Server, given: Sequence[str], env: Mapping[str, str], out: str, err: str
    ) -> None:
        self._server, self.returncode = server, None
        self.pid: int = server.answer(given=given, environment=dict(env), out=out, err=err)

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + (math.inf if timeout is None else timeout)
        while self.returncode is None:
            self.returncode = self._server.answer(ended=self.pid)
            if self.returncode is None:
                if time.monotonic() > end:
                    raise subprocess.TimeoutExpired(str(self.pid), timeout or 0.0)
                time.sleep(0.02)
        return self.returncode

    def kill(self) -> None:
        if self.returncode is None:
            os.kill(self.pid, signal.SIGKILL)


Said = tuple[list[dict[str, list[Any]]], list[str]]


def started(
    *given: str, ranks: int = 2, worker: str = "worker.py", forked: bool = False
) -> tuple[list[Any], Callable[[], Said]]:
    """A process for each rank, and what reads, when they have ended, what each has answered and complained;
    ``forked``: of one that has imported the worker already, for those of which nobody asks how they begin and end."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-W", "ignore", str(WORKERS / worker), *given]
    files = [tuple(tempfile.NamedTemporaryFile("w+") for _ in range(2)) for _ in range(ranks)]  # noqa: SIM115 – read below
    processes: list[Any] = []
    for r, (out, err) in enumerate(files):
        own = env | {"RANK": str(r)}
        if forked:
            processes.append(Forked(Server.of(worker), given, own, out.name, err.name))
        else:
            processes.append(subprocess.Popen(command, env=own, text=True, stdout=out, stderr=err))

    def read() -> Said:
        said: list[dict[str, list[Any]]] = []
        for out, _ in files:
            out.seek(0)
            said.append({})
            for line in out:
                name, row = json.loads(line)
                said[-1].setdefault(name, []).append(row)
        words = []
        for _, err in files:
            err.seek(0)
            words.append(err.read())
        for file in (f for pair in files for f in pair):
            file.close()
        return said, words

    return processes, read


def run(
    *scenarios: str,
    ranks: int = 2,
    ends: tuple[int, ...] = (0, 0),
    worker: str = "worker.py",
    most: float = 300,
    forked: bool = True,
) -> Rows:
    """What each rank has answered, by scenario, within ``most`` seconds."""
    processes, read = started(*scenarios, ranks=ranks, worker=worker, forked=forked and ranks > 1)
    end = time.monotonic() + most
    try:
        for p in processes:
            p.wait(max(0.0, end - time.monotonic()))
    finally:
        for p in processes:
            p.kill()
        for p in processes:
            p.wait()
    said, words = read()
    assert tuple(p.returncode for p in processes) == ends, "\n".join(err[-3000:] for err in words)
    return {name: [row for rank in said for row in rank.get(name, [])] for name in scenarios}


def asked(request: Any, *scenarios: str) -> list[str]:
    """Those that the tests of the fixture's module name which are to run: others would run for nobody."""
    tests = [item for item in request.session.items if item.module is request.module]
    texts = list(map(_text_of, tests))
    return [name for name in scenarios if any(f'"{name}"' in text for text in texts)]


def _text_of(test: Any) -> str:
    """The code of a test, with its parameters' values in the place of their names in formatted strings."""
    params = test.callspec.params if hasattr(test, "callspec") else {}
    text = inspect.getsource(test.function) + json.dumps([str(value) for value in params.values()])
    for name, value in params.items():
        text = text.replace(f"{{{name}}}", str(value))
    return text


def as_planned(row: dict[str, Any]) -> None:
    assert row["measured_peak"] == row["planned_peak"] == row["process_peak"], row
    assert row["measured_peak"] <= row["budget"]
    assert row["misses"] == 0


def seconds_to_error(*errors: dict[str, Any]) -> float:
    """After how many seconds the last of the ranks had an error (of `caught`), without those in which one of them
    could have run and had no processor, as on a machine that other tests share."""
    starved = sum(error["without_processor"] for error in errors)
    return float(max(error["seconds"] for error in errors) - starved)
