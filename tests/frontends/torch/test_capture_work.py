"""How the work of a capture grows: bytecodes of tightship's own code, which are the same in every run."""

import contextlib
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import tightship
from tightship.execute.prepared import Prepared
from tightship.frontends.torch.capture.step import capture_step

OURS = str(Path(tightship.__file__).parent)


class Layer(nn.Module):
    """Asks a buffer which way to go, so that each layer has a question about data and a guard."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("wide", torch.tensor(True))

    def forward(self, x):
        x = x + self.norm(self.linear(x)).relu()
        return x * 2 if bool(self.wide.logical_not().logical_not()) else x


def bytecodes(run) -> int:
    """How many instructions of tightship's code ``run()`` executes."""
    count = 0

    def local(frame, event, arg):
        nonlocal count
        count += event == "opcode"
        return local

    def entered(frame, event, arg):
        if not frame.f_code.co_filename.startswith(OURS):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return local

    before = sys.gettrace()
    sys.settrace(entered)
    try:
        run()
    finally:
        sys.settrace(before)
    return count


def captured(layers: int) -> None:
    model = nn.Sequential(*[Layer() for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters())
    capture_step(model, lambda net, x: net(x).sum(), optimizer, torch.ones(3, 4))


def prepared(layers: int) -> None:
    """With the record of its Python code, as `fit` captures."""
    model = nn.Sequential(*[Layer() for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters())
    tightship.fit(model, lambda net, x: net(x).sum(), optimizer, torch.ones(3, 4))


@pytest.mark.slow
@pytest.mark.parametrize("capture", [captured, prepared])
def test_the_work_of_a_capture_grows_with_the_step(capture, monkeypatch) -> None:
    class Captured(Exception):
        pass

    def variant(self, program, modes, **_more):
        raise Captured

    monkeypatch.setattr(Prepared, "_variant", variant)

    def work(layers: int) -> int:
        def run() -> None:
            with contextlib.suppress(Captured):
                capture(layers)

        return bytecodes(run)

    work(1)  # what is made once
    small, middle, large = work(2), work(5), work(11)
    assert small < middle < large
    assert (large - middle) <= 2.05 * (middle - small), (small, middle, large)
