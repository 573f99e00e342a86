"""Training on several ranks: together as eager does it, each for itself where that is said, refused otherwise."""

import copy
import os
import socket
import traceback

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import tightship
from support.compiled import compiled
from tightship import errors
from tightship.integrations.torch_compile import compiled_plans

pytestmark = pytest.mark.skipif(not (dist.is_available() and dist.is_gloo_available()), reason="no gloo")

RANKS = 2


def net():
    torch.manual_seed(0)
    return nn.Sequential(*[m for _ in range(3) for m in (nn.Linear(512, 512), nn.Tanh())], nn.Linear(512, 1))


def mean(model, x):
    return model(x).pow(2).mean()


def fitted(model, loss_fn=mean, **more):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return tightship.fit(model, loss_fn, optimizer, torch.ones(8, 512), work=100_000, **more)


def sums(model):
    """The sum of each rank's parameters."""
    found = [torch.zeros(()) for _ in range(RANKS)]
    dist.all_gather(found, torch.stack([p.detach().sum() for p in model.parameters()]).sum())
    return [t.item() for t in found]


def batch(step):
    torch.manual_seed(step + 10 * dist.get_rank())
    return torch.randn(8, 512)


def trained(call, model, steps=3):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for k in range(steps):
        optimizer.zero_grad()
        mean(call, batch(k)).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


# --- what each rank does ---


def a_step_of_its_own_is_refused():
    with pytest.raises(
        errors.Unsupported, match=r"(?s)without a collective on 2 ranks.*torch\.compile.*independent"
    ):
        fitted(net())


def independent_ranks_train_models_of_their_own():
    model = net()
    step = fitted(model, independent=True)
    for k in range(3):
        step(batch(k))
    first, second = sums(model)
    assert first != second


class Summed(torch.autograd.Function):
    """The identity, whose gradient is summed over ranks."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        from torch.distributed import _functional_collectives as collectives

        return collectives.wait_tensor(collectives.all_reduce(grad, "sum", list(range(RANKS))))


def functional(model, x):
    parameters = {n: Summed.apply(p) for n, p in model.named_parameters()}
    return torch.func.functional_call(model, parameters, (x,)).pow(2).mean()


def a_step_with_collectives_is_one_model():
    model = net()
    step = fitted(model, functional)
    for k in range(3):
        step(batch(k))
    first, second = sums(model)
    assert first == second


def data_parallel_around_a_compiled_model_is_that_of_eager():
    torch._dynamo.config.optimize_ddp = False
    model, other = net(), net()
    call = compiled(model, budget="100%")
    got = trained(DistributedDataParallel(call, bucket_cap_mb=1), model)
    expected = trained(DistributedDataParallel(other, bucket_cap_mb=1), other)
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))
    assert compiled_plans(call)[0].last.as_planned


def dynamos_buckets_are_refused_with_what_to_set():
    torch._dynamo.config.optimize_ddp = True
    call = compiled(copy.deepcopy(net()), budget="100%")
    with pytest.raises(errors.BadInput, match=r"optimize_ddp = False"):
        DistributedDataParallel(call, bucket_cap_mb=1)(batch(0))


def a_compiled_data_parallel_model_says_that_nothing_is_planned():
    call = compiled(DistributedDataParallel(net()), budget="1KiB")
    with pytest.raises(errors.Unsupported, match="outside of planned graphs"):
        call(batch(0))


CASES = (
    a_step_of_its_own_is_refused,
    independent_ranks_train_models_of_their_own,
    a_step_with_collectives_is_one_model,
    data_parallel_around_a_compiled_model_is_that_of_eager,
    dynamos_buckets_are_refused_with_what_to_set,
    a_compiled_data_parallel_model_says_that_nothing_is_planned,
)


def work(rank, port, folder):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    for case in CASES:
        torch._dynamo.reset()
        try:
            case()
            said = "done"
        except BaseException:
            said = traceback.format_exc()
        (folder / f"{case.__name__}.{rank}").write_text(said)
        dist.barrier()
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def said(tmp_path_factory):
    """What the ranks said of each case."""
    folder = tmp_path_factory.mktemp("ranks")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    mp.spawn(work, args=(port, folder), nprocs=RANKS)
    return folder


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_on_two_ranks(case, said):
    for rank in range(RANKS):
        assert (said / f"{case.__name__}.{rank}").read_text() == "done"
