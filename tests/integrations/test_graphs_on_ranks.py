"""Graphs that send to other ranks: tags where these have parts of parameters, as trainers trace them (SimpleFSDP);
what the backend's compiled mode makes of collectives."""

import contextlib

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed import _functional_collectives as functional

import tightship
from tightship.frontends.torch.compiled_collectives import decompositions

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="no torch.distributed")

WIDTH, LAYERS = 64, 4
WHOLE = WIDTH * WIDTH * 4
"""Bytes of a parameter that is gathered."""


@pytest.fixture(autouse=True)
def imagined_ranks():
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


class Gathered(torch.autograd.Function):
    """A parameter of which each rank has a part, gathered where it is read."""

    @staticmethod
    def forward(_ctx, part):
        return functional.all_gather_single(part, 0, dist.group.WORLD)

    @staticmethod
    def backward(_ctx, grad):
        return functional.reduce_scatter_single(grad, "sum", 0, dist.group.WORLD)


class InParts(nn.Module):
    def __init__(self, summed):
        super().__init__()
        self.parts = nn.ParameterList(torch.randn(WIDTH // 2, WIDTH) * 0.1 for _ in range(LAYERS))
        self.summed = summed

    def forward(self, x):
        for part in self.parts:
            x = (x @ Gathered.apply(part)).tanh()
            if self.summed:
                x = functional.all_reduce(x, "sum", dist.group.WORLD).sin()
        return x


def joint_of(model, *given):
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    with contextlib.ExitStack() as stack:
        return aot_export_joint_with_descriptors(stack, model, given).graph_module


def sent(gm, name):
    return [n for n in gm.graph.nodes if f".{name}" in str(n.target)]


@pytest.mark.parametrize("summed", [False, True])
def test_what_is_gathered_counts_and_is_gathered_again_and_sums_are_made_once(summed):
    joint = joint_of(InParts(summed), torch.randn(16, WIDTH))
    assert len(sent(joint, "all_gather")) == LAYERS
    plan = tightship.tag(joint, "100%")
    assert plan.peak_before >= LAYERS * WHOLE + LAYERS * WHOLE // 2  # all of them, beside their parts
    plan = tightship.tag(joint, "80%")
    assert plan.met
    forward, backward = torch._functorch.partitioners.default_partition(joint, [], num_fwd_outputs=1)
    (output,) = forward.graph.find_nodes(op="output")
    kept = [x for x in output.args[0][1:] if x.meta["val"].shape == (WIDTH, WIDTH)]
    again = sent(backward, "all_gather")
    assert again
    assert len(kept) + len(again) <= LAYERS
    once, late = ({n.name for n in sent(gm, "all_reduce")} for gm in (forward, backward))
    assert len(once) == len(late) == LAYERS * summed  # those of the backward pass are of gradients
    assert not once & late


def traced(fn, *given):
    from torch.fx.experimental.proxy_tensor import make_fx

    gm = make_fx(fn, decomposition_table=decompositions(), tracing_mode="fake")(*given)
    return [str(n.target).rpartition(".")[0] for n in gm.graph.nodes if n.op == "call_function"]


def test_what_a_graph_sends_is_complete_and_what_was_sent_before_is_waited_for():
    functional_ops, group = torch.ops._c10d_functional, dist.group.WORLD.group_name

    def sums(x, y):
        x = functional_ops.wait_tensor(x)  # sent before this graph
        made = functional_ops.all_reduce_coalesced([x, y], "sum", group)
        first, second = (functional_ops.wait_tensor(t) for t in made)
        return functional_ops.wait_tensor(functional_ops.all_gather_into_tensor(first + second, 2, group))

    found = traced(sums, torch.ones(4), torch.ones(4))
    assert found[0] == "_c10d_functional.wait_tensor"
    assert [n for n in found if "tightship" in n] == ["tightship.all_reduce", "tightship.all_gather"]
    assert not any("wait" in n for n in found[1:])
