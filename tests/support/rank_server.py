"""Ranks as forks of one process that has imported their worker, which takes longer than most of what they do.

    python rank_server.py FOLDER WORKER

Reads requests, each a line of JSON: one with ``given`` starts a rank and answers its process; one with ``ended``
answers the exit status of such a process, null while it runs. The server ends with its input.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
from typing import Any


def served() -> dict[str, Any]:
    """What a fork is to do; the server itself does not come back."""
    for line in sys.stdin:
        request: dict[str, Any] = json.loads(line)
        if "ended" in request:
            process, status = os.waitpid(request["ended"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if process else None
        else:
            answer = os.fork()
            if not answer:
                return request
        print(json.dumps(answer), flush=True)
    os._exit(0)


def main() -> None:
    folder, name = sys.argv[1:]
    sys.path[0] = folder
    worker = importlib.import_module(name)
    request = served()
    os.environ.clear()
    os.environ.update(request["environment"])
    for number, file in enumerate((os.devnull, request["out"], request["err"])):
        os.dup2(os.open(file, os.O_RDWR), number)
    sys.argv = [f"{folder}/{name}.py", *request["given"]]
    worker.main(vars(worker))


if __name__ == "__main__":
    main()
