"""Several ranks of torch.distributed on this machine, each a process that runs scenarios."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

Rows = dict[str, list[Any]]
WORKERS = Path(__file__).resolve().parent.parent / "distributed"


def started(
    *given: str, ranks: int = 2, worker: str = "worker.py"
) -> tuple[list[subprocess.Popen[str]], Callable[[], tuple[list[dict[str, list[Any]]], list[str]]]]:
    """A process for each rank, and what reads, when they have ended, what each has answered and complained."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-W", "ignore", str(WORKERS / worker), *given]
    files = [tuple(tempfile.TemporaryFile("w+") for _ in range(2)) for _ in range(ranks)]  # noqa: SIM115 – read below
    processes = [
        subprocess.Popen(command, env=env | {"RANK": str(r)}, text=True, stdout=out, stderr=err)
        for r, (out, err) in enumerate(files)
    ]

    def read() -> tuple[list[dict[str, list[Any]]], list[str]]:
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
) -> Rows:
    """What each rank has answered, by scenario, within ``most`` seconds."""
    processes, read = started(*scenarios, ranks=ranks, worker=worker)
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


def as_planned(row: dict[str, Any]) -> None:
    assert row["measured_peak"] == row["planned_peak"] == row["process_peak"]
    assert row["measured_peak"] <= row["budget"]
    assert row["misses"] == 0


def seconds_to_error(*errors: dict[str, Any]) -> float:
    """After how many seconds the last of the ranks had an error (of `caught`), without those in which one of them
    could have run and had no processor, as on a machine that other tests share."""
    starved = sum(error["without_processor"] for error in errors)
    return float(max(error["seconds"] for error in errors) - starved)
