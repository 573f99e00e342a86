"""The ExecuTorch algorithm: right in ExecuTorch's own terms, never larger than its greedy one, runs the same."""

import random
from types import SimpleNamespace

import pytest
import torch
from torch import nn

pytest.importorskip("executorch.exir", reason="executorch is not installed", exc_type=ImportError)

from executorch.exir import EdgeCompileConfig, ExecutorchBackendConfig, to_edge
from executorch.exir.memory_planning import MemoryPlanningAlgorithmSuite, Verifier, greedy
from executorch.exir.passes import MemoryPlanningPass
from executorch.exir.tensor import TensorSpec
from executorch.runtime import Runtime

from tightship.errors import BadInput, VerificationFailed
from tightship.integrations import executorch as ours
from tightship.integrations.executorch import PlaceTensors, memory_planning_pass

ALIGNMENT = 16


def tensor(nbytes, first, last, pool=None):
    spec = TensorSpec(torch.uint8, torch.Size([nbytes]))
    spec.lifetime, spec.mem_id = [first, last], pool
    return spec


def placed(specs, reserved=(), padding=0, algorithm=None):
    module = SimpleNamespace(input_mem_buffer_sizes=list(reserved))
    return (algorithm or PlaceTensors())(ALIGNMENT, specs, module, None, padding)


def apart(result, a, b):
    x, y = result.spec_dict[a], result.spec_dict[b]
    if x.mem_id != y.mem_id:
        return True
    return (
        x.mem_offset + a.allocated_memory <= y.mem_offset or y.mem_offset + b.allocated_memory <= x.mem_offset
    )


# ---- single tensors


def test_live_ranges_include_both_ends():
    a, b, c = tensor(64, 0, 3), tensor(64, 3, 5), tensor(64, 4, 6)
    result = placed([a, b, c])
    assert apart(result, a, b) and apart(result, b, c)
    assert result.bufsizes == [0, 128]
    assert result.spec_dict[a].mem_offset == result.spec_dict[c].mem_offset


def test_sizes_are_aligned_and_padded_and_the_first_is_reserved():
    a, b = tensor(3, 0, 1), tensor(17, 1, 2)
    result = placed([a, b], padding=64)
    assert result.bufsizes == [0, 16 + 32 + 64]
    assert all(r.mem_offset % ALIGNMENT == 0 and r.mem_id == 1 for r in result.spec_dict.values())


def test_memory_ids_are_placed_apart():
    rows = [tensor(64, 0, 5), tensor(32, 0, 5, 1), tensor(128, 0, 5, 3), tensor(16, 2, 3, 3)]
    result = placed(rows)
    assert result.bufsizes == [0, 96, 0, 144]
    assert [result.spec_dict[s].mem_id for s in rows] == [1, 1, 3, 3]


def test_what_control_flow_needs_lies_below():
    rows = [tensor(64, 0, 1), tensor(64, 2, 3)]
    result = placed(rows, reserved=(0, 100, 48))
    assert result.bufsizes == [0, 112 + 64, 48]
    assert {result.spec_dict[s].mem_offset for s in rows} == {112}


def test_nothing_to_place():
    assert placed([]).bufsizes == [0, 0]
    empty = tensor(0, 0, 1)
    assert placed([empty]).bufsizes == [0, 0] and placed([empty]).spec_dict[empty].mem_offset == 0


def test_a_tensor_lies_inside_its_storage_base():
    base, inner, other = tensor(64, 0, 4), tensor(32, 2, 4), tensor(64, 1, 3)
    inner.storage_base, inner.storage_base_offset = base, 32
    result = placed([base, inner, other])
    at = {s: result.spec_dict[s].mem_offset for s in (base, inner, other)}
    assert at[inner] == at[base] + 32 and apart(result, base, other)
    assert result.spec_dict[inner].mem_obj_id == result.spec_dict[base].mem_obj_id
    assert result.bufsizes == [0, 128]


def test_inputs_that_break_a_rule_are_named():
    late = TensorSpec(torch.uint8, torch.Size([4]))
    with pytest.raises(BadInput, match="live range"):
        placed([late])
    with pytest.raises(BadInput, match="at least 1"):
        placed([tensor(4, 0, 1, 0)])
    lost = tensor(4, 0, 1)
    lost.storage_base = tensor(8, 0, 1)
    with pytest.raises(BadInput, match="storage base is placed with it"):
        placed([lost])
    outside, base = tensor(32, 0, 1), tensor(16, 0, 1)
    outside.storage_base = base
    with pytest.raises(VerificationFailed, match="beyond its storage base"):
        placed([outside, base])


def test_a_planner_is_not_believed(monkeypatch):
    rows = [tensor(64, 0, 3), tensor(64, 2, 5)]
    real = ours.pack
    wrong = lambda *args: SimpleNamespace(offsets=[0] * len(real(*args).offsets))  # noqa: E731
    monkeypatch.setattr(ours, "pack", wrong)
    with pytest.raises(VerificationFailed, match="share bytes"):
        placed(rows)


def drawn(seed, count=60):
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        first = rng.randrange(count)
        last = first + rng.choice([0, 1, 2, 3, rng.randrange(count)])
        rows.append(tensor(rng.randrange(1, 5000), first, last, rng.choice([None, None, 2])))
    return rows


@pytest.mark.parametrize("seed", range(10))
def test_random_tensors_pass_executorchs_own_checks_and_are_never_larger_than_greedy(seed):
    rows = drawn(seed)
    result = placed(rows)
    for k, a in enumerate(rows):
        x = result.spec_dict[a]
        a.mem_id, a.mem_offset, a.mem_obj_id = x.mem_id, x.mem_offset, x.mem_obj_id
        for b in rows[:k]:
            if Verifier.lifetime_overlap(a, b):
                assert not Verifier.storage_overlap(a, b)
            if Verifier.storage_overlap(a, b):
                assert Verifier.mem_obj_id_match(a, b)
    pools = {s.mem_id for s in rows}
    for p in pools:
        mine = [s for s in rows if s.mem_id == p]
        load = max(
            sum(s.allocated_memory for s in mine if s.lifetime[0] <= t <= s.lifetime[1]) for t in range(130)
        )
        assert load <= result.bufsizes[p]
    theirs = greedy(ALIGNMENT, drawn(seed), SimpleNamespace(input_mem_buffer_sizes=[]), None, 0)
    assert sum(result.bufsizes) <= sum(theirs.bufsizes)
    again = placed(random.Random(1).sample(fresh := drawn(seed), len(fresh)))
    assert again.bufsizes == result.bufsizes


# ---- banks


def banks(*rows):
    map_ = pytest.importorskip("executorch.exir.banked_memory_planning", reason="without banks")
    return map_.TargetMemoryMap([map_.Bank(name, size, number, at) for name, size, number, at in rows])


TWO = (("fast", 100, 2, None), ("slow", 4096, 1, None))


def test_what_fits_the_fast_bank_lies_there():
    rows = [tensor(64, 0, 3), tensor(64, 2, 5), tensor(64, 4, 6)]
    result = placed(rows, algorithm=PlaceTensors(target=banks(*TWO)))
    assert [result.spec_dict[s].mem_id for s in rows] == [2, 1, 2]
    assert result.bufsizes == [0, 64, 64]


def test_memory_ids_that_are_given_stay_and_those_of_no_bank_are_placed_apart():
    rows = [tensor(64, 0, 3, 1), tensor(64, 0, 3), tensor(64, 0, 3, 4)]
    result = placed(rows, algorithm=PlaceTensors(target=banks(*TWO)))
    assert [result.spec_dict[s].mem_id for s in rows] == [1, 2, 4]
    assert result.bufsizes == [0, 64, 64, 0, 64]


def test_control_flow_padding_and_alignment_count_in_a_bank():
    rows = [tensor(33, 0, 3), tensor(33, 0, 3)]
    target = banks(("fast", 64 + 64 + 48, 1, 32), ("slow", 4096, 2, None))
    result = placed(rows, reserved=(0, 64), padding=48, algorithm=PlaceTensors(target=target))
    assert sorted(r.mem_id for r in result.spec_dict.values()) == [1, 2]
    assert result.bufsizes == [0, 64 + 64 + 48, 64 + 48]
    assert all(r.mem_offset % 32 == 0 for r in result.spec_dict.values())


def test_banks_that_cannot_hold_it_are_named():
    with pytest.raises(BadInput, match="bank 'slow'"):
        placed(
            [tensor(64, 0, 3)],
            algorithm=PlaceTensors(target=banks(("fast", 16, 1, None), ("slow", 16, 2, None))),
        )
    with pytest.raises(BadInput, match="no multiple"):
        placed([], algorithm=PlaceTensors(target=banks(("fast", 16, 1, 24))))
    with pytest.raises(BadInput, match="1 speeds of 2 banks"):
        placed([], algorithm=PlaceTensors(target=banks(*TWO), speeds=(1.0,)))


def cost(rows, result):
    return sum(s.allocated_memory * (1 if result.spec_dict[s].mem_id == 2 else 2) for s in rows)


@pytest.mark.parametrize("seed", range(6))
def test_no_more_lies_in_slow_banks_than_by_executorchs_own(seed):
    target = banks(("fast", 40_000, 2, None), ("slow", 10**6, 1, None))
    from executorch.exir.banked_memory_planning import BankedGreedy

    make = lambda: [tensor(s.nbytes(), *s.lifetime) for s in drawn(seed)]  # noqa: E731
    rows, theirs = make(), make()
    result = placed(rows, algorithm=PlaceTensors(target=target, seconds=2.0))
    for k, a in enumerate(rows):
        assert all(apart(result, a, b) for b in rows[:k] if Verifier.lifetime_overlap(a, b))
    assert all(result.bufsizes[k] <= bank.size for k, bank in ((b.mem_id, b) for b in target.banks))
    assert cost(rows, result) <= cost(theirs, placed(theirs, algorithm=BankedGreedy(target)))


def test_a_model_runs_the_same_in_banks():
    x = torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(0))
    target = banks(("fast", 8192, 1, None), ("slow", 10**6, 2, None))
    theirs = lowered(Attention, x, by(greedy))
    mine = lowered(Attention, x, memory_planning_pass(PlaceTensors(target=target, speeds=(8, 1))))
    assert 0 < sizes(mine)[1] <= 8192 and sizes(mine)[2] > 0
    for a, b in zip(ran(theirs, x), ran(mine, x), strict=True):
        assert torch.equal(a, b)


# ---- exported models


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(32, 64), nn.Linear(64, 32)
        self.qkv, self.out = nn.Linear(32, 96), nn.Linear(32, 32)

    def forward(self, x):
        for _ in range(2):
            q, k, v = self.qkv(x).split(32, -1)
            x = x + self.out(((q @ k.transpose(-1, -2)) / 6).softmax(-1) @ v)
            x = x + self.second(nn.functional.gelu(self.first(x)))
        return x, x.mean(-1)


class Branching(nn.Module):
    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(32, 32)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda x: self.lin(x).relu() + 1, lambda x: self.lin(x).sin(), (x,))


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("seen", torch.zeros(32))

    def forward(self, x):
        self.seen.add_(x.mean((0, 1)))
        return x * self.seen


def lowered(model, x, memory_pass):
    torch.manual_seed(0)
    exported = torch.export.export(model().eval(), (x,), strict=True)
    edge = to_edge(exported, compile_config=EdgeCompileConfig(_check_ir_validity=False))
    return edge.to_executorch(ExecutorchBackendConfig(memory_planning_pass=memory_pass))


def sizes(program):
    return program.exported_program().graph_module.meta["non_const_buffer_sizes"]


def ran(program, x):
    method = Runtime.get().load_program(bytes(program.buffer)).load_method("forward")
    return [t.clone() for t in method.execute([x])]


def by(*algorithms, **flags):
    return MemoryPlanningPass(MemoryPlanningAlgorithmSuite(list(algorithms)), **flags)


@pytest.mark.parametrize("model", [Attention, Branching, Counting])
def test_a_model_runs_the_same_in_no_more_memory(model):
    x = torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(0))
    theirs, mine = lowered(model, x, by(greedy)), lowered(model, x, by(PlaceTensors()))
    assert sum(sizes(mine)) <= sum(sizes(theirs))
    for a, b in zip(ran(theirs, x), ran(mine, x), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("inputs", [True, False])
@pytest.mark.parametrize("outputs", [True, False])
def test_inputs_and_outputs_may_be_the_callers(inputs, outputs):
    x = torch.randn(1, 24, 32, generator=torch.Generator().manual_seed(0))
    flags = {"alloc_graph_input": inputs, "alloc_graph_output": outputs}
    theirs = lowered(Attention, x, by(greedy, **flags))
    mine = lowered(Attention, x, memory_planning_pass(**flags))
    assert sizes(mine)[1] < sizes(theirs)[1] if inputs and outputs else sizes(mine)[1] <= sizes(theirs)[1]
    if inputs and outputs:
        for a, b in zip(ran(theirs, x), ran(mine, x), strict=True):
            assert torch.equal(a, b)
