"""The file for what is offloaded: bytes come back, nothing stays behind, and what goes wrong is heard."""

import errno
import os
import resource
import threading

import pytest
import torch

from tightship.errors import BadInput
from tightship.execute import spill as module
from tightship.execute.spill import Spill


def test_bytes_come_back_in_the_order_of_their_stream(tmp_path):
    spill = Spill(4096, tmp_path)
    source, target = torch.randint(0, 256, (4096,), dtype=torch.uint8), torch.zeros(2048, dtype=torch.uint8)
    spill.write(1, source.data_ptr(), 4096, 0)
    spill.write(1, source.data_ptr() + 2048, 1024, 512)
    spill.read(1, target.data_ptr(), 2048, 256).result()
    expected = source.clone()
    expected[512:1536] = source[2048:3072]
    assert torch.equal(target, expected[256:2304])


def test_streams_wait_for_one_another_only_when_told(tmp_path, monkeypatch):
    gate, put = threading.Event(), module._put
    monkeypatch.setattr(module, "_put", lambda *a: (gate.wait(10), put(*a))[1])
    spill = Spill(128, tmp_path)
    source, target = torch.full((64,), 7, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    slow = spill.write(1, source.data_ptr(), 64, 0)
    spill.read(2, target.data_ptr(), 64, 64).result()
    after = spill.read(2, target.data_ptr(), 64, 0, [slow])
    assert not slow.done() and not after.done()
    gate.set()
    after.result()
    assert target.sum() == 7 * 64


def test_no_name_leads_to_the_file_and_its_bytes_are_reserved(tmp_path):
    spill = Spill(1 << 20, tmp_path)
    assert os.listdir(tmp_path) == []
    assert os.fstat(spill._file.fileno()).st_blocks * 512 >= 1 << 20
    spill.close()


def test_a_folder_that_is_none_or_has_no_room_is_refused(tmp_path):
    with pytest.raises(BadInput, match="takes 64 bytes"):
        Spill(64, tmp_path / "missing")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        with pytest.raises(BadInput, match="takes 1048576 bytes"):
            Spill(1 << 20, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_copy_that_fails_says_so_to_who_waits_and_to_what_comes_after(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "no space left")

    spill = Spill(64, tmp_path)
    monkeypatch.setattr(module, "_put", full)
    source = torch.zeros(64, dtype=torch.uint8)
    out = spill.write(1, source.data_ptr(), 64, 0)
    back = spill.read(2, source.data_ptr(), 64, 0, [out])
    for job in (out, back):
        with pytest.raises(OSError, match="no space"):
            job.result()
    spill.drain()


def test_a_file_that_was_cut_short_is_an_error(tmp_path):
    spill = Spill(64, tmp_path)
    os.ftruncate(spill._file.fileno(), 32)
    target = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(OSError, match="shorter"):
        spill.read(1, target.data_ptr(), 64, 0).result()
