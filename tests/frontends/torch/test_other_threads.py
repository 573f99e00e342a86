"""Threads beside one that captures a step: what they call of PyTorch's is PyTorch's."""

from __future__ import annotations

import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tightship import fit


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, grad):
        return 2 * grad


def test_a_thread_beside_a_capture_seeds_converts_checkpoints_and_differentiates_as_always():
    begun, done = threading.Event(), threading.Event()
    found: dict[str, object] = {}

    def beside():
        begun.wait(60)
        try:
            torch.manual_seed(3)
            found["half"] = nn.Linear(2, 2).half().weight.dtype
            runs = []

            def block(x):
                runs.append(1)
                return Doubled.apply(x).sin()

            x = torch.ones(3, requires_grad=True)
            checkpoint(block, x, use_reentrant=False).sum().backward()
            found["runs"], found["grad"] = len(runs), x.grad
        except Exception as error:
            found["error"] = error
        finally:
            done.set()

    calls = []

    def loss(model, x):
        calls.append(1)
        if len(calls) == 1:  # while the step is captured
            begun.set()
            done.wait(60)
        return model(x).square().mean()

    thread = threading.Thread(target=beside)
    thread.start()
    model = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1))
    x = torch.randn(16, 8)
    step = fit(model, loss, torch.optim.SGD(model.parameters()), x, "100%", cache=None)
    thread.join()
    assert "error" not in found
    assert found["half"] == torch.float16
    assert found["runs"] == 2
    assert torch.allclose(found["grad"], 2 * torch.full((3,), 2.0).cos())
    step(x)
    assert step.measure()["measured_peak"] == step.measure()["planned_peak"]


def test_modules_that_another_thread_calls_are_none_of_the_step():
    inside, done = threading.Event(), threading.Event()

    class Waits(nn.Module):
        def forward(self, x):
            inside.set()
            done.wait(60)
            return x

    class Held(nn.Linear):
        def forward(self, x):
            done.set()
            thread.join()
            return super().forward(x)

    def loss(model, x):
        if not thread.ident:
            thread.start()
            inside.wait(60)
        return model(x).square().mean()

    thread = threading.Thread(target=lambda: nn.Sequential(Waits())(torch.ones(1)))
    model = nn.Sequential(Held(8, 8), nn.GELU(), nn.Linear(8, 1))
    x = torch.randn(16, 8)
    step = fit(model, loss, torch.optim.SGD(model.parameters()), x, "100%", cache=None)
    step(x)
    places = {
        op.module for op in step.graph.ops if op.phase == "forward" and op.target.startswith("aten.addmm")
    }
    assert places == {"0", "2"}


def small_step(loss):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 1)), torch.randn(16, 8)
    return fit(model, loss, torch.optim.SGD(model.parameters()), x, "100%", cache=None), x


def test_a_queue_that_another_thread_empties_is_not_set_back():
    lines: queue.Queue[float | None] = queue.Queue()
    written: list[float] = []

    def write():
        while (line := lines.get()) is not None:
            time.sleep(0.01)
            written.append(line)
            lines.task_done()

    def loss(model, x):
        lines.put(float(x.shape[0]))
        return model(x).square().mean()

    thread = threading.Thread(target=write, daemon=True)
    thread.start()
    step, x = small_step(loss)
    step(x)
    step(x)
    lines.put(None)
    thread.join(30)
    assert not thread.is_alive()  # who waits for the next line is woken
    assert len(written) >= 2
    assert lines.unfinished_tasks == 1


def test_what_threads_agree_by_stays_as_others_have_left_it():
    begun, done = threading.Event(), threading.Event()
    pool = ThreadPoolExecutor(1)
    workers = []

    def beside():
        begun.wait(30)
        done.set()

    def loss(model, x):
        begun.set()
        assert done.wait(30)
        workers.append(pool.submit(threading.get_ident).result())
        return model(x).square().mean()

    thread = threading.Thread(target=beside)
    thread.start()
    step, x = small_step(loss)
    thread.join()
    assert done.is_set()
    step(x)
    assert len(workers) == 1  # the run beforehand is undone
    assert len(pool._threads) == 1
    pool.shutdown()


def test_a_queue_of_one_thread_is_put_back():
    waiting: queue.Queue[int] = queue.Queue()
    for k in range(4):
        waiting.put(k)
    taken = []

    def loss(model, x):
        taken.append(waiting.get_nowait())
        return model(x).square().mean()

    others = threading.active_count() - 1
    step, x = small_step(loss)
    step(x)
    if others:  # of the runner of the tests
        pytest.skip("other threads run: what is in the queue may be theirs")
    assert taken == [0]
    assert waiting.qsize() == 3
