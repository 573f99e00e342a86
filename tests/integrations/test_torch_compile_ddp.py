"""The torch.compile backend inside DistributedDataParallel: losses and weights bit-identical to eager's."""

import copy
import os
import socket

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

from support.compiled import compiled, deep

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="no gloo"),
]


def work(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=2)
    model = deep()
    other = DistributedDataParallel(copy.deepcopy(model))
    call = DistributedDataParallel(compiled(model, budget="90%"))
    rows = [run(net, rank) for net in (call, other)]
    same = all(torch.equal(a, b) for a, b in zip(call.parameters(), other.parameters(), strict=True))
    (folder / f"{rank}").write_text(f"{rows[0] == rows[1] and same}")
    dist.destroy_process_group()


def run(net, rank):
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        torch.manual_seed(step + 10 * rank)
        optimizer.zero_grad()
        loss = net(torch.randn(32, 16)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_two_ranks(tmp_path):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(work, args=(port, tmp_path), nprocs=2)
    assert [(tmp_path / str(rank)).read_text() for rank in range(2)] == ["True", "True"]
