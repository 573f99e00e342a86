"""How many turns a Loop of ONNX takes, where that follows from sizes and constants: its condition and what it carries
for that (a counter), are computed turn by turn. Exporters write conditions in place of trip counts.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final, Protocol

import numpy as np
import onnx

__all__ = ["turns_of"]

_MOST: Final = 16384
"""Turns that are counted, at most."""


class Scope(Protocol):
    """A graph, and what is known of the contents of its values."""

    proto: Any

    def value(self, name: str) -> Any: ...


def turns_of(
    node: Any, scope: Scope, inner: Scope, simple: Callable[[Any], bool], opsets: Mapping[str, int]
) -> int | None:
    """The turns of a Loop with the body ``inner``; None where they are not known before it runs. ``simple``: whether
    a node may be computed here."""
    trips = scope.value(node.input[0]) if node.input[0] else None
    if node.input[0] and (trips is None or trips.size != 1):
        return None
    most = _MOST + 1 if trips is None else int(trips.reshape(()))
    if trips is not None and not 0 <= most < 1 << 62:
        return None
    goes_on = scope.value(node.input[1]) if len(node.input) > 1 and node.input[1] else np.array(True)
    condition = _Condition(node, scope, inner)
    if goes_on is None or goes_on.size != 1 or not condition.follows(simple):
        return None
    if not goes_on.reshape(()):
        return 0
    if condition.passes_on or condition.always is True:  # a condition that no turn changes
        return most if trips is not None else None
    if condition.always is False:
        return min(1, most)
    return _counted(condition, most, opsets)


def _counted(condition: _Condition, most: int, opsets: Mapping[str, int]) -> int | None:
    from onnx.reference import ReferenceEvaluator

    turn, goes_on, state = 0, True, condition.begins
    evaluator = ReferenceEvaluator(condition.graph(), opsets=dict(opsets))
    while goes_on and turn < most:
        if turn >= _MOST:
            return None
        try:
            with warnings.catch_warnings(), np.errstate(all="ignore"):
                warnings.simplefilter("ignore")
                goes_on, state = condition.turn(evaluator, turn, goes_on, state)
        except Exception:  # whatever the reference cannot do stays unknown
            return None
        turn += 1
    return turn


class _Condition:
    """The part of a Loop's body that says whether it goes on. ``begins``: what it carries for that, by the names in
    the body; ``fixed``: what is the same in every turn, as what its nodes compute from constants is."""

    def __init__(self, node: Any, scope: Scope, inner: Scope) -> None:
        self.scope, self.inner = scope, inner
        body = inner.proto
        self.counter, self.told, *carried = (i.name for i in body.input)
        self.result = body.output[0].name
        follows = dict(zip(carried, (o.name for o in body.output[1:]), strict=False))
        made = {o: n for n in body.node for o in n.output if o}
        given = dict(zip(carried, node.input[2:], strict=False))
        self.carries: dict[str, str] = {}
        self.begins: dict[str, Any] = {}
        self.fixed: dict[str, Any] = {}
        nodes, more = set[int](), [self.result]
        while more:
            name = more.pop()
            if (known := inner.value(name)) is not None:
                self.fixed[name] = known
            elif name in made:
                if id(made[name]) not in nodes:
                    nodes.add(id(made[name]))
                    more.extend(n for n in made[name].input if n)
            elif name in follows:
                if name not in self.carries:
                    self.carries[name] = follows[name]
                    self.begins[name] = scope.value(given[name])
                    more.append(follows[name])
            elif name not in (self.counter, self.told):
                self.fixed[name] = None
        self.nodes = [n for n in body.node if id(n) in nodes]

    @property
    def passes_on(self) -> bool:
        """Whether it is what it was in the turn before."""
        return self.result == self.told or (
            len(self.nodes) == 1
            and self.nodes[0].op_type == "Identity"
            and self.nodes[0].input[0] == self.told
        )

    @property
    def always(self) -> bool | None:
        """What it is in every turn; None where turns differ."""
        known = self.fixed.get(self.result)
        return bool(known.reshape(())) if known is not None and known.size == 1 else None

    def follows(self, simple: Callable[[Any], bool]) -> bool:
        known = (*self.begins.values(), *self.fixed.values())
        return all(x is not None for x in known) and all(map(simple, self.nodes))

    def graph(self) -> Any:
        names = (self.counter, self.told, *self.begins, *self.fixed)
        results = dict.fromkeys((self.result, *self.carries.values()))
        made = {o for n in self.nodes for o in n.output}
        return onnx.helper.make_graph(
            self.nodes, "condition", [onnx.ValueInfoProto(name=n) for n in names],
            [onnx.ValueInfoProto(name=n) for n in results if n in made],
        )  # fmt: skip

    def turn(
        self, evaluator: Any, turn: int, goes_on: bool, state: Mapping[str, Any]
    ) -> tuple[bool, dict[str, Any]]:
        given = {self.counter: np.array(turn), self.told: np.array(goes_on), **state, **self.fixed}
        found = given | dict(zip(evaluator.output_names, evaluator.run(None, given), strict=True))
        following = {name: np.asarray(found[result]) for name, result in self.carries.items()}
        return bool(np.asarray(found[self.result]).reshape(())), following
