"""Calls in processes of their own: answers, errors, and ends without either."""

import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tightship.errors import BadInput
from tightship.integrations import own_process as own_process_module
from tightship.integrations.own_process import Crashed, TooLong, own_process


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that the process imports by name."""
    folder = tmp_path / "modules"
    folder.mkdir()
    (folder / "called_outside.py").write_text(
        "import os, signal, sys\n"
        "from tightship.errors import BadInput\n"
        "def twice(x, *, add=0):\n    print('noise'); os.write(2, b'noise'); return 2 * x + add, os.getpid()\n"
        "def refuses():\n    raise BadInput('it is wrong', place='there')\n"
        "def crashes():\n    os.kill(os.getpid(), signal.SIGSEGV)\n"
        "def stays(path):\n    import fcntl\n    file = open(path, 'w')\n    fcntl.flock(file, fcntl.LOCK_EX)\n"
        "    os.write(file.fileno(), b'!')\n    while True: pass\n"
        "def turns():\n    while True: pass\n"
        "def leaves():\n    os._exit(7)\n"
        "def fails():\n    raise KeyError('unforeseen')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(folder))
    monkeypatch.syspath_prepend(folder)
    yield __import__("called_outside")
    sys.modules.pop("called_outside", None)


def test_what_it_returns_and_raises_comes_back(module, capfd):
    value, process = own_process(module.twice, np.arange(3), add=1)
    assert list(value) == [1, 3, 5] and process != os.getpid()
    with pytest.raises(BadInput, match=r"^there: it is wrong$"):
        own_process(module.refuses)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("name", "how"), [("crashes", "SIGSEGV"), ("leaves", "status 7")])
def test_an_end_without_an_answer_is_said(module, name, how, capfd):
    with pytest.raises(Crashed, match=how):
        own_process(getattr(module, name))
    assert capfd.readouterr() == ("", "")


def test_a_call_without_an_end_is_ended(module, monkeypatch, capfd):
    monkeypatch.setattr(own_process_module, "LONGEST", 1)
    with pytest.raises(TooLong, match="no answer in 1 s"):
        own_process(module.turns)
    assert capfd.readouterr() == ("", "")


def test_what_nobody_had_foreseen_is_no_crash(module, capfd):
    with pytest.raises(RuntimeError, match="KeyError: 'unforeseen'") as found:
        own_process(module.fails)
    assert "called_outside.py" in found.value.__notes__[0]
    assert capfd.readouterr() == ("", "")


def test_a_file_of_the_current_folder_stands_for_no_library(module, tmp_path, monkeypatch):
    (tmp_path / "pickle.py").write_text("raise SystemExit(9)\n")
    monkeypatch.chdir(Path(tmp_path))
    assert list(own_process(module.twice, np.ones(1))[0]) == [2]


def test_it_ends_with_the_process_that_called(module, tmp_path, monkeypatch):
    """Nobody else would end it, and it may have a loop without an end."""
    fcntl = pytest.importorskip("fcntl")
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    locked = tmp_path / "locked"
    call = "import called_outside\nfrom tightship.integrations.own_process import own_process\n"
    with subprocess.Popen(
        [sys.executable, "-c", f"{call}own_process(called_outside.stays, {str(locked)!r})"]
    ) as caller:
        wait_for(lambda: locked.exists() and locked.stat().st_size)
        caller.kill()
    with locked.open("r+") as file:
        wait_for(lambda: not _fails(BlockingIOError, fcntl.flock, file, fcntl.LOCK_EX | fcntl.LOCK_NB))
    assert not list(tmp_path.glob("tightship-scratch-*"))


def wait_for(it):
    until = time.monotonic() + 30
    while not it():
        assert time.monotonic() < until
        time.sleep(0.01)


def _fails(kind, function, *args):
    try:
        function(*args)
    except kind:
        return True
    return False
