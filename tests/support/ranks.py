"""Several ranks of torch.distributed on this machine, each a process that runs scenarios."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

Rows = dict[str, list[Any]]
WORKERS = Path(__file__).resolve().parent.parent / "distributed"


def run(*scenarios: str, ranks: int = 2, ends: tuple[int, ...] = (0, 0), worker: str = "worker.py") -> Rows:
    """What each rank has answered, by scenario."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    env = os.environ | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(ranks)}
    command = [sys.executable, "-W", "ignore", str(WORKERS / worker), *scenarios]
    processes = [
        subprocess.Popen(
            command, env=env | {"RANK": str(r)}, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for r in range(ranks)
    ]
    try:
        said = [p.communicate(timeout=300) for p in processes]
    finally:
        for p in processes:
            p.kill()
    assert tuple(p.returncode for p in processes) == ends, "\n".join(err[-3000:] for _, err in said)
    rows: Rows = {name: [] for name in scenarios}
    for out, _ in said:
        for line in out.splitlines():
            name, row = json.loads(line)
            rows[name].append(row)
    return rows


def as_planned(row: dict[str, Any]) -> None:
    assert row["measured_peak"] == row["planned_peak"] == row["process_peak"]
    assert row["measured_peak"] <= row["budget"]
    assert row["misses"] == 0
