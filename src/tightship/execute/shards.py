"""Parameters of which each rank keeps a part: gathered where a module reads them, saved as DTensors.

A part stands in the place of its parameter, under its name, so that optimizers, checkpoints and plans see parts. The
module gets a class of its own, whose attribute of that name gathers (as SimpleFSDP does it), together with others
that go in one message. State dicts of such modules and of optimizers have DTensors, as those of ``fully_shard`` do,
and take them, or whole tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from tightship.errors import Unsupported
from tightship.execute.parts_in_hand import NoParts, Parts, WrittenThrough, reading, telling_parameters
from tightship.frontends.torch import compat_capture, compat_distributed, compat_fully_shard
from tightship.frontends.torch.collectives import (
    Division,
    gathered,
    messages,
    reduced,
    scattered_means,
    share,
)
from tightship.frontends.torch.optimizer.given import each
from tightship.frontends.torch.structure import map_leaves

__all__ = [
    "Placed", "Shard", "average_reads", "read_once", "say_parts", "send_together", "shard_model", "shard_optimizer",
    "shards_of", "take_over", "take_over_placed",
]  # fmt: skip

_MARK, _SAYS = "_tightship_shards", "_tightship_says_parts"


class Gathering:
    """How a module reads a parameter."""

    together: tuple[tuple[Any, torch.nn.Module, str], ...] = ()
    """Those that one message gathers, and where their parts are: this one among them."""
    _read: dict[tuple[bool, int], torch.Tensor] | None = None

    def read(self, part: torch.Tensor) -> torch.Tensor:
        """The parameter. Inside of a step once: its gradients add up before they are sent, as in eager."""
        with reading.parts():
            return self._now(part)

    def _now(self, part: torch.Tensor) -> torch.Tensor:
        if self._read is None:
            return self.wholes([(self, part)])[0]
        grad = torch.is_grad_enabled()
        if (found := self._read.get((grad, id(part)))) is not None:
            return found
        rows = [(one, module._parameters[name]) for one, module, name in self.together]
        if not any(own is part for _, own in rows):  # of a copy of the model
            rows = [(self, part)]
        for (one, own), whole in zip(rows, self.wholes(rows), strict=True):
            one._read[grad, id(own)] = whole
        return self._read[grad, id(part)]

    def reading(self, once: bool) -> None:
        self._read = {} if once else None

    def has(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is what this step has read."""
        return any(t is tensor for t in (self._read or {}).values())

    @staticmethod
    def wholes(rows: Sequence[tuple[Any, Any]]) -> Sequence[torch.Tensor]:
        """The parameters of parts, by one message."""
        raise NotImplementedError


class Averaging(Gathering):
    """Of a whole parameter, whose gradient is averaged as soon as it is there."""

    def __init__(self, among: Division) -> None:
        self.among = among

    @staticmethod
    def wholes(rows: Sequence[tuple[Any, Any]]) -> Sequence[torch.Tensor]:
        made: Sequence[torch.Tensor] = _Averaged.apply(rows[0][0].among, *(part for _, part in rows))  # type: ignore[no-untyped-call]
        return made


class Part(Gathering):
    """Of a parameter of which this rank keeps a part, which state dicts have as a DTensor."""

    shape: torch.Size
    divided: tuple[str, ...]
    """The groups, by name, whose ranks have different ones, those of them that follow from others' parts last."""

    def read(self, part: torch.Tensor) -> torch.Tensor:
        return super().read(part) if self.is_part(part) else self.given(part)

    def given(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a module reads of a tensor that code has put into the place of a part (``functional_call``)."""
        return tensor

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """All parts, which every rank gives."""
        raise NotImplementedError

    def distributed(self, part: torch.Tensor) -> Any:
        """The part as torch's own tensor of several ranks."""
        raise NotImplementedError

    def listed(self, part: torch.Tensor) -> Any:
        """What ``parameters`` of the model has in eager, for code inside of a step."""
        return self.read(part)

    def between(self, part: torch.Tensor) -> Any:
        """What code between steps has as a module's attribute: what it writes there is written to the part."""
        return self.read(part)

    def is_part(self, t: Any) -> bool:
        raise NotImplementedError

    def seen(self, part: torch.Tensor) -> Any:
        """The part as torch's own tensor of several ranks, in the same memory, and its gradient likewise."""
        made = self.distributed(part.detach())
        if part.grad is not None:
            made.grad = self.distributed(part.grad.detach().as_subclass(torch.Tensor))
        return made

    def saved(self, t: Any) -> Any:
        """What a state dict has for a part; anything else as it is."""
        return self.distributed(t.detach()) if self.is_part(t) else t

    def loaded(self, t: Any) -> Any:
        """The part of what a state dict has: a DTensor or a whole tensor; anything else as it is."""
        raise NotImplementedError


class Shard(Part):
    """Which part of a parameter this rank keeps: as `torch.chunk` cuts the first dimension, filled up with zeros to
    the size of the largest part, so that all ranks run the same ops. ``placed``: what is gathered is itself a part,
    by tensor parallelism. ``spec``: of the DTensor that the part is in state dicts; None: one of a mesh of all."""

    dtype: torch.dtype | None = None
    """That it is gathered in, and ``reduced``: that its gradient is averaged in; None: as it is, and as it comes."""
    reduced: torch.dtype | None = None
    stays: bool = False
    """Whether ``fully_shard`` leaves it gathered behind the forward pass, and whether it is while any module runs."""
    outermost: bool = False

    def __init__(
        self, shape: torch.Size, stride: tuple[int, ...], among: Division, spec: Any = None,
        placed: Placed | None = None,
    ) -> None:  # fmt: skip
        self.among, self.spec, self.placed = among, spec, placed
        self.by_torch = spec is not None
        self._listed: dict[tuple[bool, int], Any] = {}
        self.stride: tuple[int, ...]
        self.gathered = torch.Size(shape)
        self.shape, self.stride = (placed.shape, placed.stride) if placed else (self.gathered, stride)
        self.rows = -(-shape[0] // among.size)
        self.padded = torch.Size((self.rows, *shape[1:]))
        self.divided = (among.group, *(placed.divided if placed else ()))

    def given(self, tensor: torch.Tensor) -> torch.Tensor:
        if compat_distributed.is_distributed(type(tensor)):
            raise Unsupported(
                "a DTensor in the place of a parameter that fully_shard has sharded (torch.func.functional_call)",
                "its gradient would not be averaged over ranks",
                "call the model itself, or give fit the plain model and parallel=tightship.DataParallel(shard=True)",
            )  # fmt: skip
        return tensor

    @property
    def own(self) -> int:
        """Rows of this rank's part that are the parameter's."""
        return max(0, min(self.rows, self.gathered[0] - self.among.rank * self.rows))

    def part(self, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor like the parameter, in memory of its own."""
        start = self.among.rank * self.rows
        return self.filled(whole[start : start + self.own])

    def filled(self, own: torch.Tensor) -> torch.Tensor:
        made = own.new_zeros(self.padded)
        made[: self.own].copy_(own)
        return made

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        whole = gathered([part.detach()], self.among)[0][: self.gathered[0]]
        return whole if self.placed is None else self.placed.whole(whole)

    def distributed(self, part: torch.Tensor) -> Any:
        """Without what fills the part up."""
        from torch.distributed.tensor import DTensor
        from torch.distributed.tensor import Shard as Placement

        if self.spec is None:
            self.spec = compat_distributed.mesh_of(self.among.group, part.device.type), (Placement(0),)
        mesh, placements = self.spec
        return DTensor.from_local(
            part[: self.own], mesh, placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def listed(self, part: torch.Tensor) -> Any:
        """``fully_shard`` leaves DTensors, whose gradients add up before those of what is gathered come to them, or,
        in the forward pass and behind it, what has been gathered."""
        ran = any(number == id(part) for _, number in self._read or ())
        if not self.by_torch or (self.stays and ran) or (self.outermost and compat_capture.in_a_module()):
            return self.read(part)
        key = torch.is_grad_enabled(), id(part)
        if key not in self._listed:
            with reading.parts():
                self._listed[key] = self.distributed(part)
        return self._listed[key]

    def between(self, part: torch.Tensor) -> Any:
        if self.by_torch:  # as eager has it
            return self.distributed(part.detach())
        whole = self.read(part).as_subclass(WrittenThrough)
        whole.base, whole.to = whole, (self, part)
        return whole

    def reading(self, once: bool) -> None:
        super().reading(once)
        self._listed = {}

    def has(self, tensor: torch.Tensor) -> bool:
        return super().has(tensor) or any(t is tensor for t in self._listed.values())

    def is_part(self, t: Any) -> bool:
        return isinstance(t, torch.Tensor) and t.shape == self.padded and not hasattr(t, "full_tensor")

    def loaded(self, t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or t.shape != self.shape:
            return t
        if hasattr(t, "full_tensor"):
            if self._lies_alike(t):
                return self.filled(t.to_local())
            t = t.full_tensor()
        return self.part(t if self.placed is None else self.placed.loaded(t))

    def _lies_alike(self, t: Any) -> bool:
        """Whether a DTensor has this rank's part where it lies."""
        if self.spec is not None and self.spec[0].ndim > 1:
            return (t.device_mesh, tuple(t.placements)) == (self.spec[0], tuple(self.spec[1]))
        rows = [getattr(x, "dim", None) for x in t.placements]
        mesh_alike = t.device_mesh.size() == self.among.size and t.device_mesh.ndim == 1
        return mesh_alike and rows == [0] and t.to_local().shape[0] == self.own

    @staticmethod
    def wholes(rows: Sequence[tuple[Any, Any]]) -> Sequence[torch.Tensor]:
        how = [(one.gathered[0], one.dtype or part.dtype, one.reduced) for one, part in rows]
        among = rows[0][0].among
        made: Sequence[torch.Tensor] = _Gathered.apply(among, how, *(part for _, part in rows))  # type: ignore[no-untyped-call]
        return [
            whole if one.placed is None else one.placed.wholes([(one.placed, whole)])[0]
            for (one, _), whole in zip(rows, made, strict=True)
        ]


class Placed(Part):
    """Of a parameter that torch's tensor parallelism has placed: ``part`` of it, or all, on each rank of a mesh. The
    model reads it as the DTensor that it was, which makes ops of parts and collectives of each op. ``late``: where
    each rank has a ``summand`` of a gradient, it is left to others to add up."""

    late = False
    summand: bool | None = None

    def __init__(self, parameter: Any) -> None:
        self.mesh, self.placements = parameter.device_mesh, parameter.placements
        self.shape, self.stride = parameter.shape, parameter.stride()
        self.local = compat_distributed.local_shape(parameter)
        self.divided = compat_distributed.dividing_groups(self.mesh, self.placements)

    def distributed(self, part: torch.Tensor) -> Any:
        from torch.distributed.tensor import DTensor

        return DTensor.from_local(
            part, self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        whole: torch.Tensor = self.distributed(part.detach()).full_tensor()
        return whole

    def is_part(self, t: Any) -> bool:
        return isinstance(t, torch.Tensor) and t.shape == self.local and not hasattr(t, "full_tensor")

    def loaded(self, t: Any) -> Any:
        if not isinstance(t, torch.Tensor) or t.shape != self.shape:
            return t
        from torch.distributed.tensor import distribute_tensor

        if not hasattr(t, "full_tensor"):
            given = distribute_tensor(t.detach(), self.mesh, self.placements, src_data_rank=None)
        elif t.device_mesh == self.mesh:
            given = t.detach().redistribute(self.mesh, self.placements)
        else:
            given = distribute_tensor(t.full_tensor(), self.mesh, self.placements, src_data_rank=None)
        return given.to_local().clone()

    @staticmethod
    def wholes(rows: Sequence[tuple[Any, Any]]) -> Sequence[torch.Tensor]:
        made: Sequence[torch.Tensor] = [_Read.apply(one, part) for one, part in rows]  # type: ignore[no-untyped-call]
        return made


class _Read(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, way: Placed, part: torch.Tensor) -> Any:
        ctx.way = way
        ctx.set_materialize_grads(False)
        return way.distributed(part)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> tuple[None, torch.Tensor | None]:
        way = ctx.way
        if gradient is None:
            return None, None
        sums = [x.is_partial() and x.reduce_op == "sum" for x in gradient.placements]
        if way.late and not way.divided:
            if way.summand not in (None, any(sums)):
                raise Unsupported(
                    "a gradient of which ranks have summands in one step, and all of it in another",
                    "they are added up behind accumulation and clipping, in all steps or in none",
                    "leave out accumulate and clip_norm, or fit with split=True",
                )  # fmt: skip
            way.summand = any(sums)
            if way.summand:
                return None, gradient.to_local()
        return None, gradient.redistribute(way.mesh, way.placements).to_local()


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        among: Division,
        how: Sequence[tuple[int, torch.dtype, torch.dtype | None]],
        *parts: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        ctx.among = among
        ctx.how = [(p.shape[0], p.dtype, reduced) for p, (_, _, reduced) in zip(parts, how, strict=True)]
        ctx.set_materialize_grads(False)
        wholes = gathered([p.to(dtype) for p, (_, dtype, _) in zip(parts, how, strict=True)], among)
        return tuple(
            w if rows == w.shape[0] else w[:rows] for w, (rows, _, _) in zip(wholes, how, strict=True)
        )

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        given = [(g, *how) for g, how in zip(gradients, ctx.how, strict=True) if g is not None]
        rows = [filled for _, filled, _, _ in given]
        sent = [g.to(reduced or g.dtype) for g, _, _, reduced in given]
        means = iter(scattered_means(sent, rows, ctx.among))
        rows_of = zip(gradients, ctx.how, strict=True)
        made = [None if g is None else next(means).to(dtype) for g, (_, dtype, _) in rows_of]
        return None, None, *made


class _Averaged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, among: Division, *wholes: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.among = among
        ctx.set_materialize_grads(False)
        return tuple(whole.view_as(whole) for whole in wholes)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        given = [g for g in gradients if g is not None]
        parts = [share(g, ctx.among, own=False) for g in given]
        rows = zip(given, reduced(parts, ctx.among.group), strict=True)
        means = iter([mean.to(g.dtype) for g, mean in rows])
        return None, *(None if g is None else next(means) for g in gradients)


def send_together(model: torch.nn.Module, ways: Mapping[int, Gathering], most: int | None) -> None:
    """Has parameters that lie next to each other in the model, by id, gathered by one message of ``most`` bytes."""
    rows: dict[int, tuple[Gathering, torch.nn.Module, str]] = {}
    kinds = []
    for module in model.modules():
        for name, p in module._parameters.items():
            way = None if p is None else ways.get(id(p))
            if p is None or way is None or id(p) in rows:
                continue
            rows[id(p)] = way, module, name
            if isinstance(way, Shard):
                dtype, size = way.dtype or p.dtype, math.prod(way.gathered)
                kind: tuple[Any, ...] = (p.dtype, dtype, way.reduced, way.among)
            else:
                dtype, size, kind = p.dtype, p.numel(), ()
            kinds.append(((type(way), p.device, p.dtype, p.requires_grad, kind), size * dtype.itemsize))
    flat = list(rows.values())
    for numbers in messages(kinds, most):
        together = tuple(flat[k] for k in numbers)
        for one, _, _ in together:
            one.together = together


@contextmanager
def read_once(shards: Iterable[Gathering], parts: Parts | None = None) -> Iterator[None]:
    """Inside, each parameter is gathered once, however often it is read; ``parameters`` of a model, too, has what its
    modules read, as a penalty on weights asks for them. ``parts`` are read in no other way."""
    shards = list(shards)
    for one in shards:
        one.reading(True)
    try:
        with (
            _listed_as_read() if shards else nullcontext(),
            NoParts(parts, shards) if parts else nullcontext(),
        ):
            reading.active = True
            yield
    finally:
        reading.active = False
        for one in shards:
            one.reading(False)


@contextmanager
def _listed_as_read() -> Iterator[None]:
    """Inside, ``named_parameters`` of all modules, and with it ``parameters``, gives what their attributes give."""
    kind = torch.nn.Module
    known = kind.named_parameters

    def named(
        module: torch.nn.Module, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Any]]:
        if compat_capture.lists_as_they_lie():
            yield from known(module, prefix, recurse, remove_duplicate)
            return
        seen: set[int] = set()
        inside = module.named_modules(prefix=prefix, remove_duplicate=remove_duplicate)
        for path, one in inside if recurse else [(prefix, module)]:
            for name, part in one._parameters.items():
                if part is None or id(part) in seen:
                    continue
                if remove_duplicate:
                    seen.add(id(part))
                way = _marked(one).get(name)
                read = getattr(one, name) if way is None else way.listed(part)
                yield f"{path}.{name}" if path else name, read

    kind.named_parameters = named  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        kind.named_parameters = known  # type: ignore[method-assign]


def say_parts(model: torch.nn.Module) -> None:
    """Has the model warn, once, code that is given its parts where eager's would be given DTensors, or whole ones."""
    if not getattr(type(model), _SAYS, False):
        _read_by(model, {}, **{"named_parameters": telling_parameters(type(model)), _SAYS: True})


# --- models ---


def shards_of(model: torch.nn.Module) -> dict[int, Part]:
    """By the id of each part, of a model that has been sharded."""
    return {id(m._parameters[n]): shard for m in model.modules() for n, shard in _marked(m).items()}


def _marked(module: torch.nn.Module) -> dict[str, Part]:
    return getattr(type(module), _MARK, {})


def shard_model(model: torch.nn.Module, among: Division, whole: Container[int] = ()) -> dict[int, Part]:
    """Leaves parts in the parameters, which keep their identity, but for scalars, those with fewer rows than there
    are ranks, those of recurrent modules, whose parameters are read in other ways, and those of ids in ``whole``."""
    done: dict[int, Part] = {}
    for module in list(model.modules()):
        if isinstance(module, torch.nn.RNNBase):
            continue
        chosen = {}
        for name, p in module._parameters.items():
            if p is None or not p.dim() or p.shape[0] < among.size or id(p) in whole:
                continue
            if id(p) not in done:
                done[id(p)] = shard = Shard(p.shape, p.stride(), among)
                shard.reduced = among.dtype
                with torch.no_grad():
                    p.data = shard.part(p.data)
            chosen[name] = done[id(p)]
        _mark(module, chosen)
    return done


def take_over(model: torch.nn.Module, optimizer: Any) -> dict[int, Part]:
    """Parts of a model that ``fully_shard`` has sharded, in the same memory, in the places of its DTensors, in the
    model as in the optimizer; the model is a plain one afterwards."""
    parts: dict[int, torch.nn.Parameter] = {}
    done: dict[int, Part] = {}
    chosen: dict[torch.nn.Module, dict[str, Part]] = {}
    rows, casts = compat_fully_shard.fully_sharded(model), compat_fully_shard.fully_shard_casts(model)
    methods = compat_fully_shard.forward_methods(model)
    compat_fully_shard.undo_fully_shard(model)
    for row in rows:
        p = row.parameter
        spec = p.device_mesh, tuple(p.placements)
        placed = None if row.within is None else Placed(row.within)
        shard = Shard(row.gathered, p.stride(), Division(*row.among), spec, placed)
        shard.dtype, shard.reduced = row.dtype, row.reduced
        shard.stays, shard.outermost = row.stays, row.outermost
        parts[id(p)] = part = torch.nn.Parameter(row.part, p.requires_grad)
        done[id(part)] = shard
        for module, name in row.places:
            module._parameters[name] = part
            chosen.setdefault(module, {})[name] = shard
    for module, shards in chosen.items():
        _mark(module, shards)
    for module, name in methods:
        _read_whole(module, name)
    for module, given, result in casts:
        _cast(module, given, result, [name for m, name in methods if m is module])
    _replace_in(optimizer, parts, done)
    return done


def take_over_placed(model: torch.nn.Module, optimizer: Any) -> dict[int, Part]:
    """This rank's parts of a model whose parameters are DTensors, in the same memory and in their places, in the
    model as in the optimizer."""
    parts: dict[int, torch.nn.Parameter] = {}
    done: dict[int, Part] = {}
    chosen: dict[torch.nn.Module, dict[str, Part]] = {}
    for row in compat_distributed.placed(model):
        p = row.parameter
        parts[id(p)] = part = torch.nn.Parameter(row.part, p.requires_grad)
        done[id(part)] = way = Placed(p)
        for module, name in row.places:
            module._parameters[name] = part
            chosen.setdefault(module, {})[name] = way
    for module, ways in chosen.items():
        _mark(module, ways)
    _replace_in(optimizer, parts, done)
    return done


def _replace_in(optimizer: Any, parts: Mapping[int, torch.nn.Parameter], done: Mapping[int, Part]) -> None:
    """Puts parts, by the ids of what they are parts of, into the places of these, with their state."""
    for one in each(optimizer) if optimizer is not None else ():
        for group in one.param_groups:
            group["params"] = [parts.get(id(p), p) for p in group["params"]]
        for p in [p for p in one.state if id(p) in parts]:
            part = parts[id(p)]
            one.state[part] = {k: done[id(part)].loaded(t) for k, t in one.state.pop(p).items()}


def _read_whole(module: torch.nn.Module, name: str) -> None:
    """Has a method find whole parameters, as ``forward`` does."""
    own = getattr(module, name)

    @functools.wraps(own)
    def called(*args: Any, **kwargs: Any) -> Any:
        before, reading.whole = reading.whole, True
        try:
            return own(*args, **kwargs)
        finally:
            reading.whole = before

    setattr(module, name, called)


def _cast(
    module: torch.nn.Module, given: torch.dtype | None, result: torch.dtype | None, methods: Iterable[str]
) -> None:
    """Has floating-point inputs and outputs of a module, and of methods of it, cast, as the policy for mixed
    precision said."""

    def cast(dtype: torch.dtype | None, tree: Any) -> Any:
        def one(x: Any) -> Any:
            return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

        return tree if dtype is None else map_leaves(one, tree)

    module.register_forward_pre_hook(
        lambda _, args, kwargs: (cast(given, args), cast(given, kwargs)), prepend=True, with_kwargs=True
    )
    module.register_forward_hook(lambda _, args, out: cast(result, out))
    for name in methods:
        own = getattr(module, name)

        @functools.wraps(own)
        def called(*args: Any, _own: Any = own, **kwargs: Any) -> Any:
            return cast(result, _own(*cast(given, args), **cast(given, kwargs)))

        setattr(module, name, called)


def average_reads(model: torch.nn.Module, done: Mapping[int, Part], among: Division) -> dict[int, Gathering]:
    """Has all parameters that are not in parts averaged where they are read; how each is read, by id."""
    ways: dict[int, Gathering] = dict(done)
    for module in model.modules():
        rows = [(n, p) for n, p in module._parameters.items() if p is not None and id(p) not in done]
        _read_by(module, {n: ways.setdefault(id(p), Averaging(among)) for n, p in rows if p.requires_grad})
    return ways


def _read_by(module: torch.nn.Module, ways: Mapping[str, Gathering], **own: Any) -> None:
    kind = type(module)
    names = {n: property(_reader(n, way)) for n, way in ways.items()}
    if not names and not own:
        return
    own |= {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    # Wrappers may hand on what is set to the module inside.
    object.__setattr__(module, "__class__", type(kind.__name__, (kind,), names | own))


def _mark(module: torch.nn.Module, shards: Mapping[str, Part]) -> None:
    if not shards:
        return
    _read_by(module, shards, **{_MARK: dict(shards)})
    module.register_state_dict_post_hook(_on_save)
    module.register_load_state_dict_pre_hook(_on_load)


def _reader(name: str, shard: Gathering) -> Any:
    def read(module: torch.nn.Module) -> torch.Tensor:
        part = module._parameters[name]
        assert part is not None
        if isinstance(shard, Part) and reading.by_caller():
            return shard.between(part)
        return shard.read(part)

    return read


def _on_save(module: torch.nn.Module, state: dict[str, Any], prefix: str, _: Any) -> None:
    for n, shard in _marked(module).items():
        if prefix + n in state:
            state[prefix + n] = shard.saved(state[prefix + n])


def _on_load(module: torch.nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    for n, shard in _marked(module).items():
        if prefix + n in state:
            state[prefix + n] = shard.loaded(state[prefix + n])


# --- optimizers ---


def shard_optimizer(optimizer: Any, shards: Mapping[int, Part]) -> None:
    """Leaves parts of the state that the optimizer has; its state dicts have DTensors."""
    for one in each(optimizer) if optimizer is not None and shards else ():
        for p, state in one.state.items():
            if id(p) in shards:
                state.update({k: shards[id(p)].loaded(t) for k, t in state.items()})
        if not getattr(one, _MARK, False):
            setattr(one, _MARK, True)
            one.register_state_dict_post_hook(_Translated(shards, lambda way, t: way.saved(t)))
            one.register_load_state_dict_pre_hook(_Translated(shards, lambda way, t: way.loaded(t)))


class _Translated:
    """A state dict of an optimizer, with what ``how`` makes of tensors that are like a part or a parameter."""

    def __init__(self, shards: Mapping[int, Part], how: Any) -> None:
        self.shards, self.how = shards, how

    def __call__(self, optimizer: Any, state: dict[str, Any]) -> dict[str, Any]:
        owners = [p for group in optimizer.param_groups for p in group["params"]]
        numbers = [k for group in state["param_groups"] for k in group["params"]]
        shards = {k: self.shards.get(id(p)) for k, p in zip(numbers, owners, strict=False)}
        rows = {
            k: {n: self.how(shard, t) for n, t in row.items()}
            if (shard := shards.get(k)) is not None
            else row
            for k, row in state["state"].items()
        }
        return {**state, "state": rows}
