"""A step belongs to its process and its model: copies are refused before anything is damaged, forks do no harm.

What would end the process is tried in one of its own.
"""

from __future__ import annotations

import copy
import io
import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from support import plans
from support.runs import Pair
from tightship.errors import Unsupported
from tightship.execute import allocator
from tightship.execute.fit import fit
from tightship.execute.host_pool import FilePool
from tightship.execute.infer import infer
from tightship.process_local import NotCopied

TESTS = Path(__file__).parents[1]


@pytest.fixture
def pair():
    return Pair("mlp", "adamw")


@pytest.fixture
def step(pair):
    made = fit(
        pair.model, pair.loss_fn, pair.optimizer, pair.batch(0), planner=plans.keep, seconds_per_op=0.0
    )
    made(pair.batch(0))
    return made


def saved(thing):
    torch.save(thing, io.BytesIO())


WAYS = {"copy": copy.copy, "deepcopy": copy.deepcopy, "pickle": pickle.dumps, "save": saved}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_and_what_it_is_made_of_are_not_copied(step, pair, way):
    variant = step._variants[0]
    owners = [step, variant, variant.program, variant.executor, variant.binding]
    owners += [x for x in (step._arena, allocator.Script([], [], [0])) if x is not None]
    for owner in owners:
        with pytest.raises(Unsupported, match=rf"(copying|pickling) an? {type(owner).__name__}"):
            WAYS[way](owner)
    step(pair.batch(1))  # as good as before


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "save"])
def test_a_model_that_holds_its_step_says_what_to_do(step, pair, way):
    pair.model.step = step
    with pytest.raises(Unsupported, match=r"copying a TrainStep|pickling a TrainStep") as raised:
        WAYS[way](pair.model)
    assert "copy the model before" in str(raised.value)
    assert "state_dict()" in str(raised.value)
    del pair.model.step
    copied = copy.deepcopy(pair.model)
    for a, b in zip(copied.parameters(), pair.model.parameters(), strict=True):
        assert torch.equal(a, b) and a is not b
    step(pair.batch(1))


def test_an_average_of_a_model_is_kept_beside_its_step(pair):
    """What users of exponential moving averages do: copy first, then fit."""
    average = copy.deepcopy(pair.model)
    step = fit(
        pair.model, pair.loss_fn, pair.optimizer, pair.batch(0), planner=plans.keep, seconds_per_op=0.0
    )
    step(pair.batch(0))
    with torch.no_grad():
        for a, b in zip(average.parameters(), pair.model.parameters(), strict=True):
            a.lerp_(b, 0.5)


@pytest.mark.parametrize("way", WAYS)
def test_inference_is_not_copied(way):
    model = torch.nn.Linear(4, 4)
    run = infer(model, torch.randn(2, 4))
    with pytest.raises(Unsupported, match=r"(copying|pickling) an Inference"):
        WAYS[way](run)


@pytest.mark.parametrize("way", WAYS)
def test_a_file_with_threads_is_not_copied(way, tmp_path):
    pool = FilePool(1 << 12, tmp_path)
    with pytest.raises(Unsupported, match=r"(copying|pickling) a FilePool"):
        WAYS[way](pool)
    pool.close()


def test_all_that_owns_native_memory_is_told():
    """Every class that makes an arena, a script, threads or a weak count is one that is not copied."""
    from tightship.execute.host_pool import PinnedPool, TieredPool
    from tightship.execute.interpreter import Executor
    from tightship.execute.parallel import ParallelExecutor
    from tightship.frontends.torch import compat
    from tightship.integrations.torch_compile import Session
    from tightship.integrations.torch_partition import FrameArena, PlannedGraph

    for owner in (ParallelExecutor, PinnedPool, TieredPool, Session, Executor, FrameArena, PlannedGraph):
        assert issubclass(owner, NotCopied), owner
    with pytest.raises(Unsupported):
        copy.deepcopy(compat.storage_reference(torch.ones(3)))


FORKED = f"""
import os, signal, sys
sys.path[:0] = [{str(TESTS)!r}]
import torch
from support import plans
torch.set_num_threads(1)
from support.runs import Pair
from tightship.errors import Unsupported
from tightship.execute.fit import fit
from tightship.planners.evict import offload
from tightship.planners.evict.problem import EvictionProblem

def offloads(graph, budget):
    steps = offload.plan(EvictionProblem(graph, tuple(range(len(graph.ops)))), 0).steps
    plan = plans.placed(graph, steps)
    assert plan.count("offload")
    return plan

def made(planner):
    pair = Pair("mlp", "adamw")
    return pair, fit(pair.model, pair.loss_fn, pair.optimizer, pair.batch(0), planner=planner, seconds_per_op=0.0)

def losses(planner, between=lambda: None):
    pair, step = made(planner)
    found = []
    for k in range(4):
        found.append(float(step(pair.batch(k))))
        between(pair, step)
    return found

def child(how):
    def fork(pair, step):
        pid = os.fork()
        if pid == 0:
            if how == "wait":
                signal.pause()
            status = 1
            try:
                step(pair.batch(0))
            except Unsupported as error:
                status = 0 if "child" in str(error) else 2
            if how == "exit":
                del step, pair
                sys.exit(status)  # with all that ends with a process
            os._exit(status)
        if how == "wait":
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert status == (signal.SIGKILL if how == "wait" else 0), status
    return fork
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="there is no fork")
@pytest.mark.parametrize("planner", ["plans.keep", "offloads"])
@pytest.mark.parametrize("how", ["exit", "_exit", "wait"])
def test_a_forked_child_is_refused_the_step_and_harms_nothing(how, planner):
    """A child that ends, at once or in order, or is killed, as workers of a DataLoader are."""
    script = f"""
planner = {planner}
alone = losses(planner, lambda *_: None)
assert losses(planner, child({how!r})) == alone
print("same")
"""
    done = subprocess.run(
        [sys.executable, "-c", FORKED + script], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0 and done.stdout.endswith("same\n"), done.stderr[-2000:]
