"""Large parameters are updated in pieces: their moments, and what the update works on, are never there as a whole."""

import copy
import gc
import weakref

import pytest
import torch

from support.runs import Failing, eager
from tightship.errors import Infeasible
from tightship.execute import allocator
from tightship.execute.away import FetchPiece
from tightship.execute.fit import fit
from tightship.execute.split_trials import same_in_pieces
from tightship.frontends.torch.optimizer.updates import updaters
from tightship.verify import verify

pytestmark = pytest.mark.skipif(not allocator.available(), reason="no C++ compiler")

WORDS, WIDTH = 1000, 32
LARGE = WORDS * WIDTH * 4


class Tied(torch.nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.words = torch.nn.Embedding(WORDS, WIDTH)
        self.middle = torch.nn.Linear(WIDTH, WIDTH)
        self.head = torch.nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        return self.head(torch.relu(self.middle(self.words(x))))


def loss_of(model, batch):
    return torch.nn.functional.cross_entropy(model(batch).flatten(0, 1), batch.flatten())


def batch(number):
    torch.manual_seed(1000 + number)
    return torch.randint(0, WORDS, (2, 4))


class Twins:
    def __init__(self, optimizer, budget, **options):
        self.model, self.twin = Tied(), Tied()
        self.optimizer, self.other = optimizer(self.model.parameters()), optimizer(self.twin.parameters())
        options = {"allow": "recompute,stream", "cache": None, "seconds": 2, "strict": True} | options
        self.step = fit(self.model, loss_of, self.optimizer, batch(0), budget, **options)

    def run(self, number):
        expected = eager(self.twin, loss_of, self.other, batch(number))
        assert torch.equal(self.step(batch(number)), expected)
        self.other.zero_grad()

    def same(self):
        with self.step.gathered():
            for p, q in zip(self.model.parameters(), self.twin.parameters(), strict=True):
                assert torch.equal(p, q)
            states = self.optimizer.state_dict()["state"], self.other.state_dict()["state"]
            assert states[0].keys() == states[1].keys()
            for one, two in zip(states[0].values(), states[1].values(), strict=True):
                assert list(one) == list(two)
                assert all(torch.equal(one[k], two[k]) for k in one if isinstance(one[k], torch.Tensor))


def pieces(step):
    return sum(isinstance(call.fn, FetchPiece) for call in step.program.calls)


OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "Adam, amsgrad": lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True, weight_decay=0.1),
    "AdamW, fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "Adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1, initial_accumulator_value=0.1),
    "NAdam": lambda p: torch.optim.NAdam(p),
    "RMSprop": lambda p: torch.optim.RMSprop(p, centered=True, momentum=0.5),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_bits_are_those_of_eager_and_bytes_the_planned_ones(name):
    budget = 5 * LARGE // 2  # parameter and gradient, and little beside them
    twins = Twins(OPTIMIZERS[name], budget)
    for number in range(4):
        twins.run(number)
    used = twins.step.measure()
    assert used["planned_peak"] == used["measured_peak"] <= budget
    assert pieces(twins.step) >= 4 and verify(twins.step.graph, twins.step.plan) == []
    twins.same()


def test_where_there_is_room_an_update_is_whole():
    twins = Twins(OPTIMIZERS["AdamW"], 7 * LARGE)
    twins.run(0)
    assert not pieces(twins.step)


def test_a_checkpoint_goes_on():
    twins = Twins(OPTIMIZERS["AdamW"], 5 * LARGE // 2)
    for number in range(2):
        twins.run(number)
    with twins.step.gathered():
        kept = copy.deepcopy((twins.model.state_dict(), twins.optimizer.state_dict()))
    twins.step(batch(7))
    with twins.step.gathered():
        twins.model.load_state_dict(kept[0])
        twins.optimizer.load_state_dict(kept[1])
    for number in range(2, 4):
        twins.run(number)
    twins.same()


def test_clipped_and_accumulated_gradients():
    torch.manual_seed(0)
    twins = Twins(OPTIMIZERS["AdamW"], 4 * LARGE, clip_norm=0.1)
    for number in range(3):
        expected = loss_of(twins.twin, batch(number))
        expected.backward()
        torch.nn.utils.clip_grad_norm_(twins.twin.parameters(), 0.1)
        twins.other.step()
        twins.other.zero_grad()
        assert torch.equal(twins.step(batch(number)), expected.detach())
    twins.same()


@pytest.mark.parametrize("which", ["read", "write"])
def test_whichever_copy_fails_each_row_is_as_before_or_as_after_its_update(tmp_path, which):
    twins = Twins(OPTIMIZERS["AdamW"], 5 * LARGE // 2, folder=tmp_path)
    twins.run(0)
    items = list(twins.step._streams.items.values())
    with twins.step.gathered():
        before = copy.deepcopy((twins.model.state_dict(), twins.optimizer.state_dict()))
    eager(twins.twin, loss_of, twins.other, batch(1))
    after = dict(twins.twin.named_parameters())
    at, partly = 0, 0
    while True:
        at, counter, pools = at + 1, [0], [away.pool for away in items]
        for away in items:
            away.pool = Failing(away.pool, which, at, counter)
        try:
            twins.step(batch(1))
            break
        except OSError as error:
            assert "the streamed " in str(error) and "failed on purpose" in str(error)
        finally:
            for away, pool in zip(items, pools, strict=True):
                away.pool = pool
        with twins.step.gathered():
            for name, p in twins.model.named_parameters():
                old, new = p == before[0][name], p == after[name]
                assert (old | new).all(), name
                partly += bool(not old.all() and not new.all())
            twins.model.load_state_dict(before[0])
            twins.optimizer.load_state_dict(copy.deepcopy(before[1]))
    assert at > len(items) and partly
    twins.same()


@pytest.mark.parametrize("cls", [torch.optim.Adafactor, torch.optim.Rprop])
def test_others_are_updated_as_a_whole(cls):
    model = Tied()
    (update, *_) = updaters(cls(model.parameters()), dict(model.named_parameters())).ops({"words.weight"})
    assert not same_in_pieces(update, (WORDS, WIDTH), "float32", [(0, 500), (500, 1000)])
    with pytest.raises(Infeasible):
        Twins(cls, 5 * LARGE // 2)


def test_state_that_is_replaced_is_let_go_of_at_once():
    twins = Twins(OPTIMIZERS["AdamW"], "100%", allow="recompute")
    twins.run(0)
    moments = [weakref.ref(state["exp_avg"]) for state in twins.optimizer.state.values()]
    twins.optimizer.load_state_dict(copy.deepcopy(twins.other.state_dict()))
    gc.collect()
    assert len(moments) == 3 and all(moment() is None for moment in moments)
    twins.run(1)
    twins.same()
