"""How a module reads a parameter that it does not have as eager does: of which this rank keeps a part, or whose
gradient is averaged with that of other ranks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch

from tightship.errors import Unsupported
from tightship.execute import part_of_gradient
from tightship.execute.part_in_hand import plain
from tightship.execute.part_of_gradient import PartOfGradient
from tightship.execute.parts_in_hand import WrittenThrough, reading
from tightship.frontends.torch import compat_capture, compat_distributed
from tightship.frontends.torch.collectives import Division, gathered, reduced, scattered_means, share

__all__ = ["Averaging", "Gathering", "Part", "Placed", "Shard"]


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
    by_torch = True
    """Whether eager has a DTensor there."""
    before: weakref.ref[Any] | None = None
    """The DTensor whose place the part has taken, in the same memory: code may hold it (an optimizer of its own)."""
    kept: Any = None
    """That DTensor where code holds it weakly (torch_ema): eager's model would keep it."""
    lent = False
    """Whether the DTensor has been given the part's gradient."""

    def read(self, part: torch.Tensor) -> torch.Tensor:
        return super().read(part) if self.is_part(part) else self.given(part)

    @property
    def layout(self) -> tuple[Any, Any] | None:
        """The mesh and the placements of eager's DTensor; None where it has a plain tensor."""
        raise NotImplementedError

    def given(self, tensor: torch.Tensor) -> torch.Tensor:
        """What a module reads of a tensor that code has put into the place of a part (``functional_call``)."""
        return tensor

    def whole(self, part: torch.Tensor) -> torch.Tensor:
        """All parts, which every rank gives."""
        raise NotImplementedError

    def distributed(self, part: torch.Tensor) -> Any:
        """The part as torch's own tensor of several ranks."""
        raise NotImplementedError

    @property
    def division(self) -> part_of_gradient.Division:
        """How a gradient in the caller's hands is divided."""
        raise NotImplementedError

    def listed(self, part: torch.Tensor) -> Any:
        """What ``parameters`` of the model has in eager, for code inside of a step."""
        return self.read(part)

    def between(self, part: torch.Tensor) -> Any:
        """What code between steps has as a module's attribute: what it writes there is written to the part."""
        return self.read(part)

    def meets(self, other: torch.Tensor) -> bool:
        """Whether code that mixes a part with ``other`` means the whole parameter, as eager has it."""
        return compat_distributed.is_distributed(type(other))

    def is_part(self, t: Any) -> bool:
        raise NotImplementedError

    def seen(self, part: torch.Tensor) -> Any:
        """The part as torch's own tensor of several ranks, in the same memory, and its gradient likewise."""
        made = self.distributed(part.detach())
        if part.grad is not None:
            made.grad = self.distributed(part.grad.detach().as_subclass(torch.Tensor))
        return made

    def replaces(self, parameter: Any, part: torch.Tensor) -> None:
        """Takes over the gradient of a DTensor in whose place the part is from now on."""
        self.kept = parameter if weakref.getweakrefcount(parameter) else None
        self.before = weakref.ref(parameter)
        if parameter.grad is not None:
            part.grad, self.lent = self.part_of(parameter.grad), True

    def lend(self, part: torch.Tensor) -> None:
        """Gives the part's gradient, in the same memory, to whoever holds the DTensor that was there before."""
        known = None if self.before is None else self.before()
        if known is not None:
            gradient = None if part.grad is None else part.grad.detach().as_subclass(torch.Tensor)
            known.grad = None if gradient is None else self.distributed(gradient)
            self.lent = gradient is not None

    def take_back(self, part: torch.Tensor) -> None:
        """Does with the part's gradient what was done with the one that was lent."""
        known = None if self.before is None or not self.lent else self.before()
        self.lent = False
        if known is None:
            return
        if known.grad is None or part.grad is None:
            known.grad = part.grad = None
        elif known.grad.to_local().data_ptr() != part.grad.data_ptr():
            part.grad.copy_(self.part_of(known.grad))

    def part_of(self, t: Any) -> torch.Tensor:
        """This rank's part of a DTensor that lies as the parameter does, in memory of its own."""
        raise NotImplementedError

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
    def layout(self) -> tuple[Any, Any] | None:
        return self.spec if self.by_torch else None

    @property
    def division(self) -> part_of_gradient.Division:
        along = _dims(self.spec[1], len(self.shape)) if self.spec else frozenset((0,))
        return part_of_gradient.Division(
            along, self.shape.numel(), self.distributed if self.by_torch else None
        )

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
            _plain(part)[: self.own], mesh, placements, run_check=False, shape=self.shape, stride=self.stride
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

    def meets(self, other: torch.Tensor) -> bool:
        if self.by_torch:
            return super().meets(other)
        dims = other.dim() - len(self.shape)
        return dims >= 0 and other.shape[dims] == self.shape[0]

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

    def part_of(self, t: Any) -> torch.Tensor:
        return self.filled(t.detach().to_local())

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
            _plain(part), self.mesh, self.placements, run_check=False, shape=self.shape, stride=self.stride
        )

    @property
    def layout(self) -> tuple[Any, Any]:
        return self.mesh, self.placements

    @property
    def division(self) -> part_of_gradient.Division:
        along = _dims(self.placements, len(self.shape))
        return part_of_gradient.Division(along, self.shape.numel(), self.distributed)

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

    def part_of(self, t: Any) -> torch.Tensor:
        own: torch.Tensor = t.detach().to_local()
        return own.clone()

    @staticmethod
    def wholes(rows: Sequence[tuple[Any, Any]]) -> Sequence[torch.Tensor]:
        made: Sequence[torch.Tensor] = [_Read.apply(one, part) for one, part in rows]  # type: ignore[no-untyped-call]
        return made


def _plain(part: torch.Tensor) -> torch.Tensor:
    """Out of the caller's hands."""
    return part.as_subclass(torch.Tensor) if isinstance(part, PartOfGradient) else plain(part)


def _dims(placements: Any, dims: int) -> frozenset[int]:
    return frozenset(x.dim % dims for x in placements if x.is_shard())


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
