"""Makes ``models`` importable from every test, and gives PyTorch one thread in each test process.

Tests run in two processes on two cores; threads beyond that wait for one another at every op.
"""

import os
import signal
from pathlib import Path

import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # for the processes that tests start


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory):
    """Measurements and plans of tests are kept away from the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TIGHTSHIP_CACHE", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(1)


@pytest.fixture
def fresh_dynamo():
    """Nothing compiled by tests before, or left for those after: `pytest.mark.usefixtures`."""
    import torch

    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.fixture(autouse=True, scope="session")
def _interruptible():
    """A job in the background inherits that interrupts are ignored; tests that interrupt would then never end."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


SLOW = Path(__file__).with_name("slow.txt")
"""Tests that take long, one a line, as measured: `python tests/support/slow.py` writes it."""


@pytest.hookimpl(tryfirst=True)  # before pytest leaves out what `-m "not slow"` does not want
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow = set(SLOW.read_text(encoding="utf-8").splitlines())
    for item in items:
        if item.nodeid in slow:
            item.add_marker("slow")
