"""Makes ``models`` importable from every test, and keeps PyTorch to two threads."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def _two_threads():
    try:
        import torch
    except ImportError:
        return
    torch.set_num_threads(2)
