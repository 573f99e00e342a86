"""Graphs of real models, captured once per test process."""

from dataclasses import replace
from functools import cache

import torch

from support.models import MODELS
from tightship.execute import profile
from tightship.frontends.torch.capture.step import capture_step
from tightship.graph import Graph

__all__ = ["captured", "measured", "on_devices"]


@cache
def captured(name: str) -> Graph:
    """One training step of a model of the zoo."""
    return _program(name).graph


@cache
def measured(name: str) -> Graph:
    """The same, with the workspace and the requests of every op."""
    return profile.profile(_program(name), cache=None).graph


def on_devices(graph: Graph, *devices: str) -> Graph:
    """The graph with its ops on devices in turn, in blocks of four."""
    return graph.with_ops(
        tuple(replace(op, device=devices[k // 4 % len(devices)]) for k, op in enumerate(graph.ops))
    )


def _program(name: str):
    model, loss, batch = MODELS[name]()
    return capture_step(model, loss, torch.optim.SGD(model.parameters(), lr=0.1), batch(0))
