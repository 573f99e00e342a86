"""The file for what is offloaded: bytes come back, nothing stays behind, and what goes wrong is heard."""

import errno
import os

import pytest
import torch

from support.runs import beyond
from tightship.errors import BadInput
from tightship.execute.host_pool import FilePool


def test_bytes_come_back_in_the_order_of_their_stream(tmp_path):
    spill = FilePool(4096, tmp_path)
    source, target = torch.randint(0, 256, (4096,), dtype=torch.uint8), torch.zeros(2048, dtype=torch.uint8)
    spill.write(1, source.data_ptr(), 4096, 0)
    spill.write(1, source.data_ptr() + 2048, 1024, 512)
    spill.read(1, target.data_ptr(), 2048, 256).result()
    expected = source.clone()
    expected[512:1536] = source[2048:3072]
    assert torch.equal(target, expected[256:2304])


def test_streams_wait_for_one_another_only_when_told(tmp_path):
    """A copy of 64 MiB is under way while a short one of another stream is done; one that comes after it waits."""
    size = 64 << 20
    spill = FilePool(size + 64, tmp_path)
    source, target = torch.full((size,), 7, dtype=torch.uint8), torch.zeros(64, dtype=torch.uint8)
    slow = spill.write(1, source.data_ptr(), size, 0)
    early = slow.done
    spill.read(2, target.data_ptr(), 64, size).result()
    assert target.sum() == 0 and not early
    after = spill.read(2, target.data_ptr(), 64, size - 64, [slow])
    after.result()
    assert slow.done and target.sum() == 7 * 64


def test_many_copies_of_many_streams_come_back(tmp_path):
    """Each is written by one stream and read by another, after it; nothing is waited for but the last of all."""
    spill = FilePool(1 << 20, tmp_path)
    source = torch.randint(0, 256, (1 << 20,), dtype=torch.uint8)
    target = torch.zeros(1 << 20, dtype=torch.uint8)
    for k in range(1024):
        at = k * 1024
        out = spill.write(1 + k % 3, source.data_ptr() + at, 1024, at)
        spill.read(4 + k % 2, target.data_ptr() + at, 1024, at, [out])
    spill.drain()
    assert torch.equal(source, target)


def test_no_name_leads_to_the_file_and_its_bytes_are_reserved(tmp_path):
    spill = FilePool(1 << 20, tmp_path)
    assert os.listdir(tmp_path) == []
    assert os.fstat(spill._file.fileno()).st_blocks * 512 >= 1 << 20
    spill.close()


def test_a_folder_that_is_none_or_has_no_room_is_refused(tmp_path):
    with pytest.raises(BadInput, match="no room for 64"):
        FilePool(64, tmp_path / "missing")
    with beyond(1 << 16), pytest.raises(BadInput, match="no room for 1048576"):
        FilePool(1 << 20, tmp_path)


def test_a_copy_that_fails_says_so_to_who_waits_and_to_what_comes_after(tmp_path):
    spill = FilePool(1 << 20, tmp_path)
    source = torch.zeros(1 << 20, dtype=torch.uint8)
    with beyond(1 << 16):
        out = spill.write(1, source.data_ptr(), 1 << 20, 0)
        back = spill.read(2, source.data_ptr(), 64, 0, [out])
        for job in (out, back):
            with pytest.raises(OSError, match="too large") as raised:
                job.result()
            assert raised.value.errno == errno.EFBIG
        spill.drain()
    spill.write(1, source.data_ptr(), 1 << 20, 0).result()


def test_a_file_that_was_cut_short_is_an_error(tmp_path):
    spill = FilePool(64, tmp_path)
    os.ftruncate(spill._file.fileno(), 32)
    target = torch.zeros(64, dtype=torch.uint8)
    with pytest.raises(OSError, match="shorter"):
        spill.read(1, target.data_ptr(), 64, 0).result()
