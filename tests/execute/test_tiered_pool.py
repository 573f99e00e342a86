"""What CUDA is told to call between pinned memory and a file, called here; the rest is in `test_dry_offload`."""

import ctypes
import os

import pytest
import torch

from tightship import _core

CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)


def call(staged, *what):
    function, job = staged.job(*what)
    CALL(function)(job)


def test_bytes_go_to_the_file_and_come_back(tmp_path):
    with open(tmp_path / "file", "w+b") as file:
        os.truncate(file.fileno(), 4096)
        staged = _core.Staged(file.fileno())
        memory, back = torch.randint(0, 256, (2048,), dtype=torch.uint8), torch.zeros(1024, dtype=torch.uint8)
        call(staged, True, memory.data_ptr(), 2048, 512)
        call(staged, False, back.data_ptr(), 1024, 1024)
        staged.settle()
        assert torch.equal(back, memory[512:1536])


def test_the_first_error_stops_what_follows_and_is_told_once(tmp_path):
    with open(tmp_path / "file", "w+b") as file:
        staged, memory = _core.Staged(file.fileno()), torch.ones(64, dtype=torch.uint8)
        call(staged, False, memory.data_ptr(), 64, 0)  # there is nothing
        call(staged, True, memory.data_ptr(), 64, 0)
        assert os.fstat(file.fileno()).st_size == 0
        with pytest.raises(OSError, match="shorter than it was"):
            staged.settle()
        staged.settle()
        call(staged, True, memory.data_ptr(), 64, 0)
        assert os.fstat(file.fileno()).st_size == 64
    call(staged, True, memory.data_ptr(), 64, 0)
    with pytest.raises(OSError, match="Bad file descriptor"):
        staged.settle()
