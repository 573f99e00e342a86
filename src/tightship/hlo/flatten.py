"""A copy of its own for each call of a computation that runs with its caller's buffers.

A buffer inside a computation that two calls run would be two. So before it schedules, XLA gives the second call
onwards clones, and clones of everything they run in turn; a module that was scheduled has none left to make, one
that was not (what frameworks hand to the compiler) often has. Computations applied element by element, and the
insides of fusions, have no buffers of the program: they stay shared. Source: XLA, ``FlattenCallGraph``; it leaves
asynchronous computations alone, which it never shares.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from tightship.errors import Unsupported
from tightship.hlo.module import Computation, Instruction, Module, names_in, run_keys, runs

__all__ = ["flattened"]

LIMIT = 2_000_000
"""The most instructions a module may come to: calls within calls multiply."""


def flattened(module: Module) -> Module:
    """The same module where nothing needs a copy. Clones stand behind what they are copies of, with names of their
    own, and a note says how many there are. Raises ``Unsupported`` beyond ``LIMIT`` instructions."""
    if not _shared(module):
        return module
    return _Flattening(module).run()


def _shared(module: Module) -> set[str]:
    """Computations that run in several places."""
    called = Counter(n for i in module.instructions for n in i.called)
    run = {n for i in module.instructions for n in runs(i)}
    return {n for n in run if called[n] > 1}


class _Flattening:
    def __init__(self, module: Module) -> None:
        self.module = module
        self.taken = _elsewhere(module)
        self.names = {c.name for c in module.computations} | {i.name for i in module.instructions}
        self.made: dict[str, list[Computation]] = {c.name: [] for c in module.computations}
        self.count = sum(len(c.instructions) for c in module.computations)
        self.clones: Counter[str] = Counter()
        self.numbers: Counter[str] = Counter()

    def run(self) -> Module:
        self._visit(self.module.entry, self.module.entry.name)
        reached = {c.name for found in self.made.values() for c in found}
        computations = [
            d
            for c in self.module.computations
            for d in ([] if c.name in reached else [c]) + self.made[c.name]
        ]
        listed = ", ".join(f"{name} {n + 1} times" for name, n in self.clones.most_common(3))
        more = f" and {len(self.clones) - 3} others" if len(self.clones) > 3 else ""
        note = f"computations run from several places are copied for each of them: {listed}{more}"
        return replace(
            self.module,
            computations=tuple(computations),
            notes=(*self.module.notes, *([note] if self.clones else [])),
        )

    def _visit(self, c: Computation, name: str) -> None:
        """Computation ``c`` as it is run in one place, under a name of its own there."""
        renamed = c.name != name
        names = {i.name: self._name(i.name) for i in c.instructions} if renamed else {}
        body = []
        for i in c.instructions:
            if renamed:
                i = _renamed(i, names)
            body.append(self._with_callees(i))
        self.made[c.name].append(replace(c, name=name, instructions=tuple(body)))

    def _with_callees(self, i: Instruction) -> Instruction:
        changed: dict[str, object] = {}
        for key in run_keys(i):
            text = i.attribute(key)
            own = []
            for callee in names_in(text):
                own.append(self._own(callee, i))
                self._visit(self.module.by_name[callee], own[-1])
            if tuple(own) != names_in(text):
                listed = ", ".join(f"%{n}" for n in own)
                changed[key] = f"{{{listed}}}" if text.lstrip().startswith("{") else listed
        return i.but(**changed) if changed else i

    def _own(self, callee: str, i: Instruction) -> str:
        """The name of ``callee`` where ``i`` runs it."""
        if callee not in self.taken:
            self.taken.add(callee)
            return callee
        self.clones[callee] += 1
        self.count += len(self.module.by_name[callee].instructions)
        if self.count > LIMIT:
            raise Unsupported(
                f"more than {LIMIT} instructions once each call has a copy of what it runs",
                f"{i.name!r} runs {callee!r} again, for the {self.clones[callee] + 1}th time",
                "compile the module with XLA first, which inlines calls",
            )
        return self._name(callee)

    def _name(self, name: str) -> str:
        """A name nobody has, as XLA makes them: ``name.clone``, ``name.clone.1`` …"""
        made = f"{name}.clone"
        while made in self.names:
            self.numbers[name] += 1
            made = f"{name}.clone.{self.numbers[name]}"
        self.names.add(made)
        return made


def _elsewhere(module: Module) -> set[str]:
    """Computations that are called in another way, too, or by what does not run in the program's order."""
    run, work = {module.entry.name}, [module.entry]
    while work:
        for i in work.pop().instructions:
            for n in runs(i):
                if n not in run:
                    run.add(n)
                    work.append(module.by_name[n])
    return {
        n
        for c in module.computations
        for i in c.instructions
        for n in i.called
        if c.name not in run or n not in runs(i)
    }


def _renamed(i: Instruction, names: dict[str, str]) -> Instruction:
    before = i.attribute("control-predecessors")
    i = replace(i, name=names[i.name], operands=tuple(names[o] for o in i.operands))
    if not before:
        return i
    listed = ", ".join(f"%{names[n]}" for n in names_in(before))
    return i.but(**{"control-predecessors": f"{{{listed}}}"})
