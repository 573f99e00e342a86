"""Program -> one fx graph of ATen ops: views as view ops, an optimizer's step as the arithmetic that it is made of.

A compiler wants to see what a program hides: a program's views are metadata, here they are the reshapes, transposes
and slices that make them, found from shapes and strides (``as_strided``, which a compiler cannot fuse, is left for
what is none of these). An update is the optimizer's own code, run on stand-ins as PyTorch runs it for one tensor at a
time; hyperparameters that schedulers change, and step counts, are tensors in double precision, as Python's numbers
are, so that no later step needs another graph.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch.fx import GraphModule
from torch.overrides import TorchFunctionMode

from tightship.errors import TightshipError, Unsupported
from tightship.frontends.torch import compat, compat_inductor_tracing, compat_optimizers
from tightship.frontends.torch.capture.expectations import only_raises
from tightship.frontends.torch.capture.number_inputs import OpNumber, computed
from tightship.frontends.torch.capture.whole_ops import Told, called_whole, is_whole, told_by
from tightship.frontends.torch.collectives import Collective
from tightship.frontends.torch.compiled_collectives import as_ops
from tightship.frontends.torch.optimizer.copy import bare
from tightship.frontends.torch.optimizer.given import each, independent
from tightship.frontends.torch.optimizer.tensors import Path
from tightship.frontends.torch.optimizer.updates import Updater
from tightship.frontends.torch.program import Program, Ref, dtype_of, flat, refs_in, substitute
from tightship.graph import Value

__all__ = ["Flat", "NoFormula", "Number", "fixed_settings", "flatten_program", "viewed"]


class NoFormula(Unsupported):
    """An optimizer's step cannot be written out as ops that are the same in every step."""


@dataclass(frozen=True)
class Number:
    """A hyperparameter that is read at each step: of the optimizer of that number, in its group, by its name, and
    its place where there are two of that name (betas)."""

    optimizer: int
    group: int
    name: str
    place: int = -1

    def read(self, optimizer: Any) -> Any:
        """Its value now."""
        return self.of_group(each(optimizer)[self.optimizer].param_groups[self.group])

    def of_group(self, group: Mapping[str, Any]) -> Any:
        """Its value in the settings of its group."""
        value = group[self.name]
        return value if self.place < 0 else value[self.place]


@dataclass(frozen=True)
class Flat:
    """``graph`` takes the tensors of those of the program's ``slots`` that something reads, then ``numbers`` of the
    optimizer and ``op_numbers``, each a tensor of one double; and returns the program's results. ``inputs`` are
    stand-ins for what it takes. ``told``: what is known of data that decide sizes, by op."""

    graph: GraphModule
    inputs: tuple[torch.Tensor, ...]
    slots: tuple[int, ...]
    numbers: tuple[Number, ...]
    op_numbers: tuple[OpNumber, ...] = ()
    told: Mapping[int, Told] = field(default_factory=dict)


def flatten_program(
    program: Program, optimizer: Any, given: Collection[OpNumber] = (), told: Mapping[int, Told] | None = None
) -> Flat:
    """The program as one fx graph, of which the numbers ``given`` are inputs; ``told``: as the program was written
    out before, where that has been done. Raises ``Unsupported`` for optimizers
    that cannot be written out, and for what has no ATen ops."""
    return _Flattening(program, optimizer, given, told or {}).run()


class _Flattening:
    def __init__(
        self, program: Program, optimizer: Any, given: Collection[OpNumber], told: Mapping[int, Told]
    ) -> None:
        self.told = dict(told)
        self.program, self.optimizer = program, optimizer
        self.updaters = [c.fn for c in program.calls if isinstance(c.fn, Updater)]
        self.numbers, self.op_numbers = self._numbers(), tuple(sorted(given))
        values = program.graph.values
        self.strides: dict[Any, list[tuple[int, ...]] | None] = {}
        read = {values[v].storage for c in program.calls for v in refs_in((c.args, c.kwargs))}
        read |= {values[v].storage for v in program.results}
        self.slots = [s for s in program.slots if values[s.value].storage in read]

    def run(self) -> Flat:
        self._check()
        mode = compat.fake_mode(cached=True)
        graph = self.program.graph
        inputs = []
        for slot in self.slots:
            v = graph.values[slot.value]
            device = self._device(slot)
            inputs.append(compat.blank_like(mode, v.shape, v.stride, 0, dtype_of(v.dtype), device))
        inputs += [
            compat.blank_like(mode, (), (), 0, torch.float64, torch.device("cpu"))
            for _ in (*self.numbers, *self.op_numbers)
        ]
        with (
            torch.no_grad(),
            torch.autocast("cpu", enabled=False),
            compat_inductor_tracing.failing("writing out the step"),
        ):
            traced = compat_inductor_tracing.traced(self._computed, inputs, mode)
        if any(True for _ in (*traced.parameters(), *traced.buffers())):
            raise _no_formula(
                type(self.optimizer).__name__, "its step makes tensors of numbers anew each time"
            )
        places = {s.value: k for k, s in enumerate(self.program.slots)}
        slots = tuple(places[s.value] for s in self.slots)
        return Flat(traced, tuple(inputs), slots, self.numbers, self.op_numbers, self.told)

    def _device(self, slot: Any) -> torch.device:
        devices = {op.device for op in self.program.graph.ops if op.device}
        return torch.device(devices.pop() if len(devices) == 1 else "cpu")

    def _check(self) -> None:
        graph = self.program.graph
        homes: dict[int, int] = {}
        for slot in self.program.slots:
            s = graph.values[slot.value].storage
            if s in homes:
                names = graph.values[homes[s]].name, graph.values[slot.value].name
                raise Unsupported(
                    f"{names[0]} and {names[1]}, which share memory, in compiled mode",
                    "Inductor takes what it writes to for memory of its own",
                )
            homes[s] = slot.value
        for op, call in zip(graph.ops, self.program.calls, strict=True):
            if isinstance(call.fn, Collective):
                as_ops(call.fn)  # which raises
                continue
            known = isinstance(call.fn, (Updater, torch._ops.OpOverload)) or only_raises(call.fn)
            if not known and not is_whole(call.fn):
                where = graph.place(graph.ops.index(op))
                raise Unsupported(
                    f"{op.target} at {where} in compiled mode",
                    "eager runs code of Python's for it",
                    'use mode="exact"',
                )

    # --- the ops ---

    def _computed(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        program, graph = self.program, self.program.graph
        values, bases = graph.values, dict(enumerate(program.bases))
        held: dict[int, torch.Tensor] = {}
        seen: dict[int, torch.Tensor] = {}
        for slot, t in zip(self.slots, tensors, strict=False):
            held[values[slot.value].storage] = t
            bases[values[slot.value].storage] = slot.value
        rest = iter(tensors[len(self.slots) :])
        numbers = dict(zip(self.numbers, rest, strict=False))
        of_ops: dict[int, dict[int, torch.Tensor]] = defaultdict(dict)
        for number, t in zip(self.op_numbers, rest, strict=True):
            of_ops[number.op][number.place] = t

        def read(v: int) -> torch.Tensor:
            if v not in seen:
                s = values[v].storage
                seen[v] = viewed(held[s], values[bases[s]], values[v])
            return seen[v]

        sent = 0
        for index, (op, call) in enumerate(zip(graph.ops, program.calls, strict=True)):
            compat_inductor_tracing.of_module(op.module if op.phase == "forward" else None)
            args, kwargs = substitute((call.args, call.kwargs), read)
            whole = None
            if is_whole(call.fn):
                likes = [values[v] if v >= 0 else None for v in call.results]
                if index not in self.told:
                    self.told[index] = told_by(program.samples.get(index, {}))
                whole = called_whole(call, likes, self.told[index], read)
            if isinstance(call.fn, Updater):
                _update(call.fn, args, numbers)
                continue
            if only_raises(call.fn):
                continue
            if index in of_ops:
                like = dtype_of(values[next(v for v in (*call.results, *refs_in(call.args)) if v >= 0)].dtype)
                out = computed(call, of_ops[index], like, read)
            elif whole is not None:
                out = whole()
            elif isinstance(call.fn, Collective):
                out = as_ops(call.fn)(sent, *args, **kwargs)
                sent += 1
            else:
                fn = _dropout_mask if self._masks_a_dropout(index) else call.fn
                out = fn(*args, **kwargs)  # type: ignore[operator]
            for k, (v, t) in enumerate(zip(call.results, flat(out), strict=True)):
                if v < 0:
                    continue
                s = values[v].storage
                if v == bases[s]:
                    own = isinstance(call.fn, Collective) or whole is not None or index in of_ops
                    compiled = None if own else self._compiled_strides(call.fn, args, kwargs)
                    t = _laid_out(t, values[v], t.stride() if compiled is None else compiled[k])
                held[s] = t
        return [read(v) for v in program.results]

    def _masks_a_dropout(self, index: int) -> bool:
        """Whether an op draws the mask of a dropout of single elements, which Inductor has from its own uniform
        numbers. Masks of others (of channels, of paths) it draws as eager does."""
        call, *after = self.program.calls[index : index + 3]
        if call.fn is not torch.ops.aten.bernoulli_.float or call.kwargs.get("generator") is not None:
            return False
        if [c.fn for c in after] != [torch.ops.aten.div_.Scalar, torch.ops.aten.mul.Tensor]:
            return False
        scaled, masked = after
        made_by = self.program.calls[index - 1].fn
        if made_by is torch.ops.aten.new_empty.default:  # of channels, which may have one element
            return False
        values = self.program.graph.values
        shapes = [values[a.value].shape for a in masked.args if isinstance(a, Ref)]
        drawn = call.args if len(call.args) > 1 else (*call.args, 0.5)  # which torch leaves out
        return scaled.args == drawn and masked.args[-1] == drawn[0] and len({*shapes}) == 1

    def _compiled_strides(self, fn: Any, args: Any, kwargs: Any) -> list[tuple[int, ...]] | None:
        """How an op's results lie where it is compiled; None where that is as in eager: of what is contiguous."""
        leaves = flat((args, list(kwargs.items())))
        given = [t for t in leaves if isinstance(t, torch.Tensor)]
        if all(t.is_contiguous() for t in given):
            return None
        key = (
            fn,
            repr([x for x in leaves if not isinstance(x, torch.Tensor)]),
            *((t.shape, t.stride(), t.dtype) for t in given),
        )
        if key not in self.strides:
            self.strides[key] = compat_inductor_tracing.compiled_strides(fn, args, kwargs)
        return self.strides[key]

    def _numbers(self) -> tuple[Number, ...]:
        found: dict[Number, None] = {}
        for updater in self.updaters:
            for member in updater.members:
                group = updater.optimizer.param_groups[member.group]
                for name in _SCHEDULED:
                    value = group.get(name)
                    for k, x in enumerate(value) if isinstance(value, (tuple, list)) else [(-1, value)]:
                        if _is_number(x) and (x or name == "lr"):
                            found[Number(updater.number, member.group, name, k)] = None
        return tuple(found)


_SCHEDULED: Final = ("lr", "weight_decay", "momentum", "betas")
"""What schedulers of torch's change, and what is often changed by hand. Other settings are of the graph."""


def fixed_settings(optimizer: Any) -> tuple[Any, ...]:
    """The numbers among the optimizer's settings that are of the graph."""
    rows: list[Any] = []
    for k, o in enumerate(each(optimizer) if optimizer is not None else ()):
        for g, group in enumerate(o.param_groups):
            if not independent(o):  # whose ops may be others where a number is zero
                rows += [(k, g, n, _signs(group[n])) for n in _SCHEDULED if n in group and n != "lr"]
            names = [
                n for n in o.defaults if n not in _SCHEDULED and isinstance(group.get(n), (int, float, tuple))
            ]
            rows += [(k, g, n, group[n]) for n in names]
    return tuple(rows)


def _signs(value: Any) -> tuple[Any, ...]:
    numbers = value if isinstance(value, (tuple, list)) else [value]
    return tuple((x > 0) - (x < 0) for x in numbers if isinstance(x, (int, float)))


def _is_number(x: Any) -> bool:
    return isinstance(x, torch.Tensor) or (isinstance(x, (int, float)) and not isinstance(x, bool))


def _dropout_mask(x: torch.Tensor, p: float = 0.5, **_: Any) -> torch.Tensor:
    """As Inductor draws for dropout: of the uniform numbers that it has a kernel for."""
    return x.copy_((torch.rand_like(x) > 1 - p).to(x.dtype))


# --- layouts ----------------------------------------------------------------------------------------------------


def _laid_out(t: torch.Tensor, base: Value, compiled: Sequence[int]) -> torch.Tensor:
    """A result as eager lays it out. Stand-ins of some ops, and what ops become where they are compiled, lie
    otherwise, and so does what is made of them, of which somebody may read a view."""
    if all(_same_layout(t.shape, stride, base.stride) for stride in (t.stride(), compiled)):
        return t
    order = sorted(range(t.dim()), key=lambda d: (t.shape[d] != 1, base.stride[d]), reverse=True)
    copied = t.permute(order).clone(memory_format=torch.contiguous_format)
    made = copied.permute([order.index(d) for d in range(t.dim())])
    if not _same_layout(t.shape, made.stride(), base.stride):
        raise Unsupported(
            f"{base.name}, of strides {base.stride}, in compiled mode",
            "Inductor lays out results without gaps between their elements",
            'use mode="exact"',
        )
    return made


def _same_layout(shape: Sequence[int], a: Sequence[int], b: Sequence[int]) -> bool:
    return 0 in shape or all(x == y for n, x, y in zip(shape, a, b, strict=True) if n != 1)


# --- views -----------------------------------------------------------------------------------------------------


def viewed(tensor: torch.Tensor, base: Value, value: Value) -> torch.Tensor:
    """The view ``value`` of ``tensor``, which is ``base``, by ops that say what they do to its dimensions, where
    there are such. Raises ``Unsupported`` for another dtype."""
    if (base.dtype, base.shape, base.stride, base.offset) == (
        value.dtype,
        value.shape,
        value.stride,
        value.offset,
    ):
        return tensor
    if base.dtype != value.dtype:
        pairs = _as_pairs(tensor, base, value)
        if pairs is not None:
            return pairs
        raise Unsupported(
            f"{value.name}, {base.dtype} read as {value.dtype}, in compiled mode", "Inductor copies it"
        )
    made = _cut(tensor, base, value)
    if made is None:
        offset = tensor.storage_offset() + value.offset - base.offset
        made = torch.as_strided(tensor, value.shape, value.stride, offset)
    return made


def _as_pairs(tensor: torch.Tensor, base: Value, value: Value) -> torch.Tensor | None:
    """Complex numbers as pairs of real ones, or these as complex numbers; None for all other dtypes."""
    if dtype_of(base.dtype).is_complex and dtype_of(base.dtype).to_real() == dtype_of(value.dtype):
        return viewed(torch.view_as_real(tensor), _paired(base, value.dtype), value)
    if dtype_of(value.dtype).is_complex and dtype_of(value.dtype).to_real() == dtype_of(base.dtype):
        return torch.view_as_complex(viewed(tensor, base, _paired(value, base.dtype)))
    return None


def _paired(value: Value, dtype: str) -> Value:
    shape, stride = (*value.shape, 2), (*(2 * n for n in value.stride), 1)
    return replace(value, dtype=dtype, shape=shape, stride=stride, offset=2 * value.offset)


def _cut(tensor: torch.Tensor, base: Value, value: Value) -> torch.Tensor | None:
    """By permutation, reshape and slices; None where that is not possible."""
    order = sorted(range(len(base.shape)), key=lambda k: (base.shape[k] == 1, -base.stride[k]))
    dense = 1
    for k in reversed(order):
        if base.shape[k] != 1:
            if base.stride[k] != dense:
                return None
            dense *= base.shape[k]
    real = [k for k, n in enumerate(value.shape) if n != 1 and value.stride[k]]
    real.sort(key=lambda k: -value.stride[k])
    whole, starts, left, above = [], [], value.offset - base.offset, dense
    if 0 in value.shape or left < 0:
        return None
    for k in real:
        if above % value.stride[k]:
            return None
        whole.append(above // value.stride[k])
        starts.append(left // value.stride[k])
        left, above = left % value.stride[k], value.stride[k]
    if any(a + value.shape[k] > n for a, k, n in zip(starts, real, whole, strict=True)):
        return None
    rest = above > 1
    if rest:
        whole.append(above)
        starts.append(left)
    t = tensor if order == sorted(order) else tensor.permute(order)
    if tuple(t.shape) != tuple(whole):
        t = t.view(whole)
    for d, k in enumerate(real):
        if value.shape[k] != whole[d]:
            t = torch.narrow(t, d, starts[d], value.shape[k])
    if rest:
        t = t.select(len(real), left)
    return _spread(t, real, value)


def _spread(t: torch.Tensor, real: list[int], value: Value) -> torch.Tensor:
    """Puts dimensions, which are those of ``real``, where the value has them, and adds those that take no memory."""
    by_place = [d for d, _ in sorted(enumerate(real), key=lambda x: x[1])]
    if by_place != sorted(by_place):
        t = t.permute(by_place)
    for k in range(len(value.shape)):
        if k not in real:
            t = t.unsqueeze(k)
    return t if tuple(t.shape) == value.shape else t.expand(value.shape)


# --- updates ---------------------------------------------------------------------------------------------------


def _update(
    updater: Updater, tensors: Sequence[torch.Tensor], numbers: Mapping[Number, torch.Tensor]
) -> None:
    """The updater's step as ops on stand-ins: what torch's code for one tensor at a time asks for."""
    optimizer, cls = updater.optimizer, type(updater.optimizer)
    known = independent(optimizer)
    if why := _why_no_formula(updater):
        raise _no_formula(cls.__name__, why)
    (member,) = updater.members
    param, grad, *kept = tensors
    group = {**optimizer.param_groups[member.group], "params": [param]}
    group |= {
        k: False for k in ("foreach", "fused", "capturable") if k in group and (known or k == "foreach")
    }
    by_value = known and cls.__name__ in _BY_VALUE
    group |= {"capturable": True} if by_value else {}
    hints: dict[int, tuple[str, Any]] = {}
    for number, t in numbers.items():
        if (number.optimizer, number.group) == (updater.number, member.group):
            hints[id(t)] = number.name, number.of_group(group)
            _put(group, number, t)
    one = bare(optimizer)
    one.__dict__.update({n: x for n, x in vars(optimizer).items() if n not in vars(one) and n != "step"})
    before = optimizer.state.get(member.param) or {}
    state = {k: x for k, x in before.items() if not isinstance(x, torch.Tensor)}
    given = [t.to(torch.float64) if by_value and not t.dim() else t for t in kept]
    state |= dict(zip(member.state_keys, given, strict=True))
    settings = dict(group)
    one.param_groups, one.state = [group], defaultdict(dict, {param: dict(state)})
    param.grad = grad
    try:
        with _InDoubles(hints, cls.__name__, known=known), ExitStack() as stack:
            if by_value:
                stack.enter_context(compat_inductor_tracing.as_if_compiling())
            compat_optimizers.plain_step(cls)(one)
    except TightshipError:
        raise
    except Exception as error:
        if "local_scalar" in str(error):
            raise _no_formula(cls.__name__, "what its step does follows from numbers in tensors") from error
        raise _no_formula(cls.__name__, f"its step does not run on stand-ins ({error})") from error
    finally:
        param.grad = None
    now = one.state[param]
    for k, t in zip(member.state_keys, kept, strict=True):
        if now[k] is not t:
            t.copy_(now[k])
    rows = [(k, x, state.get(k)) for k, x in now.items() if k not in member.state_keys]
    rows += [(k, x, settings.get(k)) for k, x in one.param_groups[0].items()]
    for k, x, old in rows:
        if x is not old and (isinstance(x, torch.Tensor) or isinstance(old, torch.Tensor) or x != old):
            raise _no_formula(cls.__name__, f"it counts {k!r} in Python")


def _why_no_formula(updater: Updater) -> str:
    if len(updater.members) > 1 or updater.held:
        return "it steps several parameters at once, or keeps tensors of none"
    if updater.draws or updater.takes:
        return "its step draws random numbers" if updater.draws else "it keeps gradients as they are"
    if any(isinstance(k, Path) for k in updater.members[0].state_keys):
        return "it keeps tensors inside of others' containers"
    return ""


_BY_VALUE: Final = ("ASGD", "RAdam", "Rprop")
"""Classes whose step goes by numbers in its state: their capturable one computes both ways and chooses, here in
doubles."""


def _put(group: dict[str, Any], number: Number, t: torch.Tensor) -> None:
    if number.place < 0:
        group[number.name] = t
    else:
        row = list(group[number.name])
        row[number.place] = t
        group[number.name] = tuple(row)


def _no_formula(name: str, why: str) -> NoFormula:
    return NoFormula(
        f"the optimizer {name} in compiled mode", why,
        "call step.prepare(batch): the update is then planned by itself, op by op",
    )  # fmt: skip


class _InDoubles(TorchFunctionMode):
    """Inside, a tensor's number is a tensor of one double, and goes wherever an op takes a number. ``hints``: the
    names and values of hyperparameters, by id, which decide what is left out. Of ``cls``, where that is not
    ``known``, each kind of step is one of signs (`fixed_settings`): nothing else may decide."""

    def __init__(self, hints: Mapping[int, tuple[str, Any]], cls: str, *, known: bool) -> None:
        super().__init__()
        self.hints, self.cls, self.known = hints, cls, known

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = dict(kwargs or {}), getattr(func, "__name__", "")
        if name == "item":
            return args[0].to(torch.float64)
        if name in _COMPARED and any(id(a) in self.hints for a in args):
            return self._compared(name, args)
        if name == "to" and id(args[0]) in self.hints:
            return args[0]
        plain = name.rstrip("_")
        if plain in ("add", "sub") and isinstance(kwargs.get("alpha"), torch.Tensor):
            return func(args[0], args[1] * kwargs.pop("alpha"), **kwargs)
        if plain in ("addcmul", "addcdiv") and isinstance(kwargs.get("value"), torch.Tensor):
            a, b, c = args
            term = b * c if plain == "addcmul" else b / c
            return getattr(a, "add_" if name.endswith("_") else "add")(kwargs["value"] * term)
        if plain == "lerp" and isinstance(args[2], torch.Tensor):
            return func(args[0], args[1], args[2].to(args[0].dtype))
        return func(*args, **kwargs)

    def _compared(self, name: str, args: Any) -> bool:
        values = [self.hints[id(a)][1] if id(a) in self.hints else a for a in args]
        names = [self.hints[id(a)][0] for a in args if id(a) in self.hints]
        others = [a for a in args if id(a) not in self.hints]
        if not self.known and ("lr" in names or any(isinstance(a, torch.Tensor) or a != 0 for a in others)):
            raise _no_formula(self.cls, f"what its step does follows from the value of {names[0]}")
        return _COMPARED[name](*values)


_COMPARED: Final[dict[str, Callable[..., bool]]] = {
    f"{left}{name}{right}": getattr(operator, name)
    for name in ("eq", "ne", "lt", "le", "gt", "ge")
    for left, right in (("", ""), ("__", "__"))
} | {"__bool__": bool}
