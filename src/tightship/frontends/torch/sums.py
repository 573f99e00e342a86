"""Sums of gradients in place, as autograd takes them when nobody else holds one of the two.

While a step is recorded autograd cannot tell, and adds out of place, which would cost a tensor more than eager.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from tightship.frontends.torch.program import Call, Ref
from tightship.frontends.torch.tape import Record, Tape

__all__ = ["in_place_sums"]


def in_place_sums(
    tape: Tape, records: Sequence[Record], results: Sequence[int]
) -> tuple[list[Record], list[int]]:
    """``records`` and ``results`` with sums of gradients written into a summand that is read for the last time.

    The sum's storage vanishes; its values become values of the summand's storage. The bits are the same.
    """
    last: dict[int, int] = {}
    for k, r in enumerate(records):
        last.update({tape.storage(v): k for v in r.reads})
        last.update({s: k for s in r.writes})
    kept = {tape.storage(v) for v in results}
    made = {tape.storage(v) for r in records if r.phase == "backward" for v in r.results if v >= 0}
    moved: dict[int, int] = {}  # storage of a sum -> storage it is written into
    done: list[Record] = []
    for k, r in enumerate(records):
        r = _moved(tape, r, moved)
        operand = _operand(tape, r, k, last, made - kept) if _is_sum(r) else None
        if operand is not None:
            total, target = tape.storage(r.results[0]), tape.storage(operand)
            moved[total] = target
            last[target] = last.get(total, k)
            if total in kept:
                kept.add(target)
            tape.storages[target].name = tape.storages[target].name or tape.storages[total].name
            r = _in_place(tape, r, operand)
        done.append(r)
    return done, [_value(tape, v, moved) for v in results]


def _is_sum(r: Record) -> bool:
    return r.phase == "backward" and r.fn is torch.ops.aten.add.Tensor and not r.kwargs


def _operand(tape: Tape, r: Record, k: int, last: dict[int, int], allowed: set[int]) -> int | None:
    """The summand that may be overwritten: a gradient not needed later, and laid out like the sum."""
    total = tape.values[r.results[0]]
    size = tape.storages[total.storage].nbytes
    a, b = r.args[0], r.args[1]
    if type(a) is not Ref or type(b) is not Ref or tape.storage(a.value) == tape.storage(b.value):
        return None
    for ref in (a, b):
        info = tape.values[ref.value]
        free = last[info.storage] == k and info.storage in allowed
        if (
            free
            and info == replace(total, storage=info.storage)
            and tape.storages[info.storage].nbytes == size
        ):
            return int(ref.value)
    return None


def _in_place(tape: Tape, r: Record, operand: int) -> Record:
    other = next(x for x in r.args if x != Ref(operand))
    return replace(
        r,
        fn=torch.ops.aten.add_.Tensor,
        target=str(torch.ops.aten.add_.Tensor),
        args=(Ref(operand), other),
        results=(-1,),
        writes=(tape.storage(operand),),
    )


def _moved(tape: Tape, r: Record, moved: dict[int, int]) -> Record:
    if not any(tape.storage(v) in moved for v in r.reads) and not any(s in moved for s in r.writes):
        return r
    replay = r.replay
    if replay is not None:
        replay = Call(
            replay.fn, _tree(tape, replay.args, moved), _tree(tape, replay.kwargs, moved), replay.results
        )
    return replace(
        r,
        args=_tree(tape, r.args, moved),
        kwargs=_tree(tape, r.kwargs, moved),
        reads=tuple(dict.fromkeys(_value(tape, v, moved) for v in r.reads)),
        writes=tuple(dict.fromkeys(moved.get(s, s) for s in r.writes)),
        updates=tuple(dict.fromkeys(moved.get(s, s) for s in r.updates)),
        replay=replay,
    )


def _value(tape: Tape, v: int, moved: dict[int, int]) -> int:
    s = tape.storage(v)
    return tape.intern(replace(tape.values[v], storage=moved[s])) if s in moved else v


def _tree(tape: Tape, tree: Any, moved: dict[int, int]) -> Any:
    if type(tree) is Ref:
        return Ref(_value(tape, tree.value, moved))
    if isinstance(tree, (list, tuple)):
        return type(tree)(_tree(tape, x, moved) for x in tree)
    if isinstance(tree, dict):
        return {k: _tree(tape, x, moved) for k, x in tree.items()}
    return tree
