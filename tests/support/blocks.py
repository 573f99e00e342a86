"""Blocks of PyTorch's allocator for tests, which are skipped where that cannot be built."""

import pytest

torch = pytest.importorskip("torch")

from tightship.execute import allocator  # noqa: E402

try:
    allocator.load()
except allocator.NoCompiler as error:
    pytest.skip(str(error), allow_module_level=True)

KB = 1024


def block(kilobytes: float) -> torch.Tensor:
    return torch.empty(int(kilobytes * KB), dtype=torch.uint8)
