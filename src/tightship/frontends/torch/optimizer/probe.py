"""Whether an optimizer may step its parameters one at a time: tried on small ones, together and in turns.

Of a class outside of torch.optim nothing is known. It takes turns if, over many kinds of gradients, both ways leave
the same bits in parameters, state, groups and attributes, and if no op of its step reads numbers of two parameters or
hands a number to Python, where it could decide anything: comparing numbers finds a coupling only where it acts, and a
norm over all gradients is seen whatever its limit. In all other cases it steps all at once.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from tightship.errors import Unsupported
from tightship.frontends.torch import compat, compat_distributed, compat_ops, compat_optimizers
from tightship.frontends.torch.optimizer.attributes import (
    Fixed,
    fixed,
    not_fixed,
    numbers_of,
    plain_part,
    set_numbers,
    told,
    unchanged_globals,
    why_not_plain,
)
from tightship.frontends.torch.optimizer.copy import (
    Disagreement,
    Turns,
    bare,
    copied,
    random_states,
    random_untouched,
    stepped,
)
from tightship.frontends.torch.program import tensors_in

__all__ = [
    "BY_ITSELF", "DRAWS", "Flow", "Follow", "Pair", "Scenario", "Trial", "does_not_run", "needs_closure", "normal",
    "same", "scenarios", "why_together",
]  # fmt: skip


# What these make does not depend on the numbers of their tensor.
_EMPTY = (
    "zeros_like", "ones_like", "empty_like", "full_like", "rand_like", "randn_like", "new_empty", "new_zeros",
    "new_ones", "new_full", "new_empty_strided",
)  # fmt: skip
_LEAVES = (
    "numpy", "tolist", "data_ptr", "untyped_storage", "storage", "__array__", "__dlpack__", "__reduce_ex__",
)  # fmt: skip

Owners = frozenset[int]


class Follow(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.owners: dict[int, Owners] = {}
        self.held: list[Any] = []  # or a storage's key would be given to another
        self.met: list[str] = []

    def own(self, tensor: torch.Tensor, owners: Owners) -> None:
        if owners:
            self.owners[compat.storage_key(tensor)] = owners
            self.held.append(tensor.untyped_storage())

    def of(self, tree: Any) -> Owners:
        found: Owners = frozenset()
        for t in tensors_in(tree):
            found |= self.owners.get(compat.storage_key(t), frozenset())
        return found

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.rpartition("::")[2]
        if name in _EMPTY:
            return out
        given = (*args, *kwargs.values())
        if name.startswith(("_foreach_", "_fused_")):
            self.listed(name, given, out)
            return out
        owners = self.of(given)
        if len(owners) > 1:
            self.met.append(f"{name} reads several")
        results = list(tensors_in(out))
        if owners and not results and func._schema.returns:
            self.met.append(f"{name} makes a number of Python of one")
        written = [given[k] for k, _ in compat_ops.written_arguments(func) if k < len(args)]
        for t in (*results, *tensors_in(written)):
            self.own(t, owners)
        return out

    def listed(self, name: str, given: Sequence[Any], out: Any) -> None:
        """Ops on lists take the k-th of each list together."""
        lists = [x for x in (*given, out) if isinstance(x, (list, tuple)) and list(tensors_in(x))]
        shared = self.of([x for x in given if isinstance(x, torch.Tensor)])
        for k in range(max(map(len, lists), default=0)):
            row = [x[k] for x in lists if k < len(x)]
            owners = self.of(row) | shared
            if len(owners) > 1:
                self.met.append(f"{name} reads several")
            for t in tensors_in(row):
                self.own(t, owners)


class _Leaving(TorchFunctionMode):
    """Numbers that leave torch by a way no op sees."""

    def __init__(self, follow: Follow) -> None:
        super().__init__()
        self.follow = follow

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _LEAVES and args and isinstance(args[0], torch.Tensor):
            with torch._C.DisableTorchFunction():
                owned = self.follow.of([args[0]])
            if owned:
                self.follow.met.append(f"{name}() makes a number of Python of one")
        return func(*args, **(kwargs or {}))


class Flow:
    """``met`` says where, in what ran while `watching`, numbers of several owners met or became Python's."""

    def __init__(self, follow: Follow | None = None) -> None:
        self._follow = follow or Follow()
        self.met = self._follow.met

    def own(self, owner: int, tensor: torch.Tensor) -> None:
        """Let the numbers in ``tensor`` be those of ``owner``."""
        self._follow.own(tensor, frozenset((owner,)))

    @contextmanager
    def watching(self) -> Iterator[None]:
        with self._follow, _Leaving(self._follow):
            yield


_LARGEST = 4096  # elements of a parameter that is tried
_LATER = (99, 999, 9999)  # what counters are set forward by: a round number of steps follows

Gradients = Callable[[int, int, torch.Tensor], "torch.Tensor | None"]


@dataclass(frozen=True)
class Scenario:
    """``gradient(step, parameter, normal)`` is made of a normally distributed one."""

    name: str
    steps: int
    gradient: Gradients
    goes_on: bool = False


@dataclass
class Pair:
    """Optimizers alike: ``whole`` steps ``ours`` together, each of ``twins`` does what it is compared with."""

    whole: Any
    ours: list[torch.Tensor]
    twins: list[tuple[Any, list[torch.Tensor]]]
    flow: Flow


def scenarios(count: int, last_group: int) -> tuple[Scenario, ...]:
    """For ``count`` parameters, those from ``last_group`` on in a group of their own."""

    def one_is(value: float) -> Gradients:
        return lambda step, k, g: g.fill_(value) if (step, k) in ((1, 0), (2, count - 1)) else g

    def missing(step: int, k: int, g: torch.Tensor) -> torch.Tensor | None:
        gone = step == k or (step == count and 0 < last_group <= k)
        return None if gone else g

    scales = (1.0, 50.0, 1e-4)
    return (
        Scenario("gradients of ordinary size", 12, lambda step, k, g: g * scales[k % 3], True),
        Scenario("gradients that are zero", 3, lambda step, k, g: g * 0),
        Scenario("tiny gradients", 3, lambda step, k, g: g * 1e-30),
        Scenario("a huge gradient", 4, lambda step, k, g: g * 1e15 if k == 1 else g),
        Scenario("an infinite gradient", 4, one_is(float("inf"))),
        Scenario("a gradient that is NaN", 4, one_is(float("nan"))),
        Scenario("parameters without a gradient", count + 2, missing),
    )


def why_together(optimizer: Any) -> str | None:
    """Why the optimizer's parameters are to be stepped all at once; None if each may be stepped by itself.

    The optimizer stays as it is. Raises ``Unsupported`` for a step that does not run, or that counts in its class or
    module.
    """
    name = f"the optimizer {type(optimizer).__name__}"
    with unchanged_globals(optimizer) as counted, random_untouched():
        before = random_states()
        try:
            why = _tried(optimizer)
        except Exception as error:
            raise does_not_run(optimizer, error) from error
        if random_states() != before:
            why = DRAWS
    if counted:
        raise Unsupported(
            name, f"its step changes {counted[0]}, which planning would change, too",
            f"{BY_ITSELF}, or keep it in the optimizer",
        )  # fmt: skip
    return why


DRAWS: Final = "its step draws random numbers"
COMPILES: Final = (
    "its step calls code that torch.compile makes, which may depend on the order in which sizes come"
)
BY_ITSELF: Final = "call step.backward(batch) and its own step() (fit with None for the optimizer)"


def does_not_run(optimizer: Any, error: Exception) -> Unsupported:
    """The error for an optimizer that cannot be tried."""
    text = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
    if "closure" in str(error).lower():
        return needs_closure(optimizer)
    if _holds_group(optimizer):
        return Unsupported(
            f"the optimizer {type(optimizer).__name__}", "its step sends to other ranks by itself",
            f"{BY_ITSELF}; to divide what an optimizer holds among ranks, give fit the plain model, the optimizer "
            "inside and parallel=tightship.DataParallel(shard=True)",
        )  # fmt: skip
    return Unsupported(
        f"the optimizer {type(optimizer).__name__}", f"its step does not run on copies of its parameters ({text})",
        f"call its .train() before fit; or {BY_ITSELF}" if callable(getattr(optimizer, "train", None)) else BY_ITSELF,
    )  # fmt: skip


def _holds_group(optimizer: Any) -> bool:
    """Whether it, or what it holds, has a process group."""
    own = list(vars(optimizer).values())
    inside = [x for held in own for x in getattr(held, "__dict__", {}).values()]
    return any(compat_distributed.is_process_group(x) for x in (*own, *inside))


def needs_closure(optimizer: Any) -> Unsupported:
    """The error for an optimizer whose step runs the model."""
    return Unsupported(
        f"the optimizer {type(optimizer).__name__}", "its step needs a closure that runs the model again",
        "call its step yourself with a closure that calls step.backward(batch) (fit with None for the optimizer), "
        "or use one without, such as AdamW",
    )  # fmt: skip


def _tried(optimizer: Any) -> str | None:
    trial = Trial(optimizer)
    if compat_optimizers.calls_compiled(trial.copy_steps):
        return COMPILES
    return trial.tried(scenarios(len(trial.shapes), trial.last_group))


class Trial:
    """Small parameters in groups like the optimizer's, and its class stepping them."""

    def __init__(self, optimizer: Any, most: int = _LARGEST) -> None:
        self.optimizer = optimizer
        self.step = compat_optimizers.plain_step(type(optimizer))
        self.groups = [(k, _shapes(g["params"], most)) for k, g in enumerate(optimizer.param_groups)]
        rows = [(k, shape, dtype) for k, found in self.groups for shape, dtype in found]
        self.shapes = [(shape, dtype) for _, shape, dtype in rows]
        self.places = [k for k, _, _ in rows]
        self.last_group = self.places.index(self.places[-1]) if self.places else 0
        self.made: list[tuple[Any, Fixed]] = []

    def copy_steps(self) -> None:
        """Two steps of a copy, for what they raise, draw or count."""
        params = [p for g in self.optimizer.param_groups for p in g["params"] if p.requires_grad]
        others = {id(p): torch.nn.Parameter(torch.zeros_like(p)) for p in params}
        twin = copied(self.optimizer, others)
        for _ in range(2):
            stepped(twin, self.step, [(q, torch.zeros_like(q)) for q in others.values()])

    def tried(self, found: Iterable[Scenario]) -> str | None:
        """What goes wrong, or differs, in any of them."""
        why = why_not_plain(self.optimizer)
        if why is not None:
            return why
        for scenario in found:
            try:
                why = self.differs(scenario)
            except Exception as error:
                return f"tried with {scenario.name}, it raises {type(error).__name__}: {error}"
            if why is not None:
                return why
        return None

    def fresh(self, start: Sequence[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
        params = [torch.nn.Parameter(t.clone()) for t in start]
        made = bare(self.optimizer)
        attributes, groups = copy.deepcopy(plain_part(self.optimizer))
        made.__dict__.update(attributes)
        made.state = defaultdict(dict)
        made.param_groups = [
            {"params": [p for p, place in zip(params, self.places, strict=True) if place == k]} | g
            for k, g in enumerate(groups)
        ]
        self.made.append((made, fixed((attributes, groups))))
        return made, params

    def pair(self, start: Sequence[torch.Tensor]) -> Pair:
        pair = Pair(*self.fresh(start), [self.fresh(start)], Flow())
        for k, p in enumerate(pair.ours):
            pair.flow.own(k, p)
        return pair

    def differs(self, scenario: Scenario) -> str | None:
        generator = torch.Generator().manual_seed(0)
        self.made.clear()
        pair = self.pair([normal(s, d, generator) for s, d in self.shapes])
        try:
            for step in range(scenario.steps):
                rows = [normal(s, d, generator) for s, d in self.shapes]
                why = self.step_both(pair, [scenario.gradient(step, k, g) for k, g in enumerate(rows)])
                why = self.writes() or why
                if why is not None:
                    return f"with {scenario.name}, {why}"
            return self.later(pair, generator) if scenario.goes_on else None
        except Disagreement as error:
            why = self.writes() or f"the parameters do not agree on {error}"
            return f"with {scenario.name}, {why}"

    def writes(self) -> str | None:
        for optimizer, before in self.made:
            if (name := not_fixed(before, fixed(plain_part(optimizer)))) is not None:
                return f"its step changes the tensor in {name!r}"
        return None

    def later(self, pair: Pair, generator: torch.Generator) -> str | None:
        """As if many more steps had been done: what happens every hundredth step is seen, too."""
        before = numbers_of(pair.whole, pair.ours)
        counters = None
        for ahead in (0, *_LATER):
            if ahead:
                set_numbers(pair.whole, pair.ours, counters or (), ahead)
                for twin, params in pair.twins:
                    set_numbers(twin, params, counters or (), ahead)
            for _ in range(3 if ahead else 1):
                why = self.step_both(pair, [normal(s, d, generator) for s, d in self.shapes])
                if why is not None:
                    return f"after {ahead} steps, {why}"
            if not ahead:
                after = numbers_of(pair.whole, pair.ours)
                counters = [n for n, x in after.items() if before.get(n) == x - 1]
                if not counters:
                    return None
        return None

    def step_both(self, pair: Pair, grads: Sequence[torch.Tensor | None]) -> str | None:
        """Steps one together and the other in turns; what went wrong or differs afterwards."""
        mine, others = ([None if g is None else g.clone() for g in grads] for _ in range(2))
        for k, g in enumerate(mine):
            if g is not None:
                pair.flow.own(k, g)
        with pair.flow.watching():
            stepped(pair.whole, self.step, zip(pair.ours, mine, strict=True))
        if pair.flow.met:
            return f"an op of its step, {pair.flow.met[0]}"
        present = [k for k, g in enumerate(others) if g is not None]
        ((parts, theirs),) = pair.twins
        turns = Turns(parts, [theirs[k] for k in present])
        for k in present:
            turns.run(self.places[k], theirs[k], others[k])
        if not all(map(same, mine, others)):
            return "what it leaves in one gradient depends on the others"
        return _difference(pair)


def _shapes(params: Sequence[torch.Tensor], most: int) -> list[tuple[tuple[int, ...], torch.dtype]]:
    """Shapes and dtypes for a group like this: those it has, made smaller, and never one alone."""
    found = dict.fromkeys((_smaller(tuple(p.shape), most), p.dtype) for p in params if p.requires_grad)
    several = list(found)[:6]
    return (several * 2)[: max(2, len(several))]


def _smaller(shape: tuple[int, ...], most: int) -> tuple[int, ...]:
    """No more than so many elements, of the same number of dimensions."""
    sizes = list(shape)
    while torch.Size(sizes).numel() > most:
        k = max(range(len(sizes)), key=sizes.__getitem__)
        sizes[k] = -(-sizes[k] // 2)
    return tuple(sizes)


def normal(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    wide = torch.complex64 if dtype.is_complex else torch.float32
    return torch.randn(shape, generator=generator, dtype=wide).to(dtype)


# --- comparing ------------------------------------------------------------------------------------------------


def _difference(pair: Pair) -> str | None:
    whole, ((parts, theirs),) = pair.whole, pair.twins
    if not all(map(same, pair.ours, theirs)):
        return "its update of one parameter depends on the others"
    for k, (p, q) in enumerate(zip(pair.ours, theirs, strict=True)):
        if not same(whole.state.get(p), parts.state.get(q)):
            return f"its state of parameter {k} depends on the others"
    known = {id(p) for p in (*pair.ours, *theirs)}
    if any(id(k) not in known for k in (*whole.state, *parts.state)):
        return "its state has entries that are no parameter's"
    for what, a, b in zip(("attributes", "groups"), plain_part(whole), plain_part(parts), strict=True):
        if told(a) != told(b):
            return f"its {what} advance otherwise when parameters are stepped one at a time"
    return None


def same(a: Any, b: Any) -> bool:
    """Whether two trees are equal to the bit, in order."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if is_traceable_wrapper_subclass(a):  # it may know no op that compares
            names, _ = a.__tensor_flatten__()
            return type(a) is type(b) and all(same(getattr(a, n), getattr(b, n)) for n in names)
        if (a.dtype, a.shape, a.stride()) != (b.dtype, b.shape, b.stride()):
            return False
        left, right = (t.detach().contiguous().reshape(-1).view(torch.uint8) for t in (a, b))
        return torch.equal(left, right)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)
