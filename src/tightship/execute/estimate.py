"""Will it fit? What a loop needs as it is, without a planner and before anything is allocated.

The loop runs on tensors without data (`EagerLoop`), each kind of kernel once on tensors of its sizes (`Kernels`), and
every byte is somebody's: of parameters, gradients, optimizer state, activations or temporaries, by module and line.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any, Final, TypedDict, Unpack

import torch
from torch.nn.parallel import DistributedDataParallel

from tightship.analysis.structure import ModuleSums, of_any_layer
from tightship.baselines.torch_allocator_settings import Settings
from tightship.errors import BadInput, Infeasible, Unsupported
from tightship.execute.blocks import checkpointed
from tightship.execute.compiled_loop import Emulation
from tightship.execute.eager_peak import Kernels, Timeline, reserved
from tightship.execute.estimate_remedies import Remedy, batches_within, remedies_of
from tightship.frontends.torch import compat_ddp
from tightship.frontends.torch.capture.checks import check_model
from tightship.frontends.torch.capture.eager_loop import EagerLoop, Loop
from tightship.frontends.torch.capture.expectations import Guesses, guessing
from tightship.frontends.torch.capture.step import module_of
from tightship.frontends.torch.optimizer.given import as_one
from tightship.frontends.torch.python_state import python_state_kept
from tightship.frontends.torch.structure import (
    LossFn,
    batch_size,
    called,
    checked_loss,
    loss_function,
)
from tightship.graph import CUDA_ALIGNMENT
from tightship.notebook import Shown
from tightship.planners.batch import LARGEST
from tightship.units import Budget, BudgetLike, format_bytes, parse_budget

__all__ = ["DEVICES", "Device", "Estimate", "EstimateOptions", "ModuleBytes", "Remedy", "Share", "estimate"]

MIB: Final = 1 << 20
_LOG = logging.getLogger("tightship.estimate")


@dataclass(frozen=True)
class Device:
    """A device by ``name``: ``memory`` is what its driver reports in bytes (0: not known), ``context`` what a process
    takes of it before the first tensor, ``workspace`` what PyTorch takes for cuBLAS. Both are assumed: they differ
    between drivers and libraries by some hundred MiB."""

    name: str
    memory: int = 0
    context: int = 0
    workspace: int = 0

    @property
    def is_gpu(self) -> bool:
        return self.name != "cpu"


def _gpu(name: str, mebibytes: int, context: int, workspace: int = 2 * 8320) -> Device:
    """``context`` in MiB, ``workspace`` in KiB."""
    return Device(name, mebibytes * MIB, context * MIB, workspace * 1024)


_HOPPER: Final = 2 * 32 * 1024
DEVICES: Final = {
    d.name: d
    for d in (
        Device("cpu"),
        _gpu("t4", 15_360, 350), _gpu("v100", 16_384, 400), _gpu("l4", 23_034, 400), _gpu("a10g", 23_028, 400),
        _gpu("a100-40gb", 40_960, 500), _gpu("a100", 81_920, 500), _gpu("l40s", 46_068, 450),
        _gpu("h100", 81_559, 550, _HOPPER), _gpu("h200", 143_771, 550, _HOPPER),
        _gpu("rtx3060", 12_288, 350), _gpu("rtx3090", 24_576, 400), _gpu("rtx4060", 8_188, 350),
        _gpu("rtx4080", 16_376, 400), _gpu("rtx4090", 24_564, 450), _gpu("rtx5090", 32_607, 550),
    )
}  # fmt: skip
"""Memory as nvidia-smi reports it. Workspace: PyTorch's default of 8320 KiB for a handle of cuBLAS (32 MiB on Hopper,
CUBLAS_WORKSPACE_CONFIG), of which a process has two: for the thread of the forward and for that of the backward pass.
Context: assumed, from what idle processes take."""


@dataclass(frozen=True)
class Share:
    """Bytes of the peak that have one ``place``: a module or a line; ``what`` they are."""

    place: str
    what: str
    nbytes: int


@dataclass(frozen=True, slots=True)
class ModuleBytes:
    """A module with all that is inside it, in bytes of the peak: its parameters and buffers, their gradients and
    optimizer state, and what it made (activations and temporaries); ``share`` of the peak. ``module`` is a path as in
    ``named_modules``; the whole is the empty one."""

    module: str
    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    share: float


@dataclass(frozen=True, repr=False)
class Estimate(Shown):
    """What a loop needs at its peak, in bytes. ``peak`` is the sum of ``parameters``, ``buffers``, ``batch``,
    ``gradients``, ``optimizer_state``, ``activations``, ``temporaries`` and ``constants``; ``static`` that of what is
    there in every step (parameters, buffers, batch, state and constants).

    Activations are what the forward pass has made, temporaries what the backward pass and the optimizer make for a
    while, and what the kernel at the peak holds for itself. ``total`` is the peak and what the ``device`` needs
    beside it; ``reserved``, on a GPU, the most that PyTorch's caching allocator takes for the same requests,
    simulated. ``phases``: the peaks of ``forward``, ``backward`` and ``update``. ``unknown``: how many calls of
    which ops were counted without the temporaries of their kernels, which are not known. ``unread``: the lines that
    read a number from data that only a real step has (``loss.item()``), which was taken to be 1.0: bytes follow
    from it only where the code compares it. ``answered``: the lines that ask yes or no of such data, with the answer
    that was taken for granted, as `fit` does. ``flops`` are those of one step.
    """

    peak: int
    static: int
    parameters: int
    gradients: int
    optimizer_state: int
    activations: int
    temporaries: int
    buffers: int
    batch: int
    constants: int
    at: str
    phases: Mapping[str, int]
    by_module: tuple[Share, ...]
    by_line: tuple[Share, ...]
    modules: tuple[ModuleBytes, ...]
    device: Device
    unknown: Mapping[str, int]
    unread: tuple[str, ...]
    answered: tuple[str, ...]
    flops: int
    training: bool
    compiled: bool = False
    reserved: int | None = None
    _asked: Any = field(default=None, compare=False)
    _requests: tuple[tuple[int, int], ...] = field(default=(), compare=False)

    @property
    def total(self) -> int:
        """The peak, and what the device's context and libraries take beside it."""
        return self.peak + self.device.context + self.device.workspace

    def fits(self, memory: BudgetLike = None) -> bool:
        """Whether ``total`` is within ``memory`` (``24GiB``), or within the device's own, and on a GPU PyTorch's
        allocator can place it there. Raises ``BadInput`` where neither is known."""
        limit = self.memory(memory)
        return self.total <= limit and not self._fragments(limit)

    def needs(self, limit: int) -> int:
        """``total``; where that is within ``limit`` but finds no room there, what is reserved, which is not."""
        if self.total > limit or not self._fragments(limit):
            return self.total
        return (self.reserved or 0) + self.total - self.peak

    def _fragments(self, limit: int, settings: Settings | None = None) -> bool:
        """Whether the caching allocator runs out of so much memory in spite of giving back what is cached."""
        beside = self.total - self.peak
        if self.reserved is None or self.reserved + beside <= limit:
            return False
        return reserved(self._requests, max(limit - beside, 0), settings) is None

    def memory(self, memory: BudgetLike = None) -> int:
        """``memory`` in bytes, or the device's own. Raises ``BadInput``."""
        if memory is None:
            if not self.device.memory:
                fault = f"{self.device.name} has no size of its own: give the memory there is, such as 24GiB"
                raise BadInput(fault, place="fits")
            return self.device.memory
        budget = memory if isinstance(memory, Budget) else parse_budget(memory)
        if budget.bytes is None:
            raise BadInput(f"{budget} is a percentage; give bytes, such as 24GiB", place="fits")
        return budget.bytes

    def remedies(self, memory: BudgetLike = None, *, seconds: float = 20.0) -> list[Remedy]:
        """What would make the loop fit ``memory``, with what it costs: checkpoints around its blocks, the largest
        batch, and tightship's own plan, searched for ``seconds``. Each is estimated or planned, none is a rule of
        thumb. Those that a loop of one's own leaves no way to try are not there."""
        return list(remedies_of(self, self._asked, self.memory(memory), seconds))

    def largest_batch(self, memory: BudgetLike = None, *, most: int = LARGEST) -> int:
        """The largest batch, at most ``most``, with which ``total`` is within ``memory`` (or the device's own), all
        else as it was asked for. Each size looked at is an estimate of its own; beyond 128 the answer is the largest
        to within one part in 64. It takes the bytes to grow with the batch.

        Raises ``Infeasible`` where not even a batch of 1 fits, ``BadInput`` for a sample without a batch, and what
        the loop raises at sizes at which it does not run.
        """
        limit, size = self.memory(memory), batch_size(self._asked.sample)
        found, known = batches_within(self, self._asked, limit, most)
        if found is None:
            least = known[min(known)]
            raise Infeasible(
                budget=limit, lower_bound=self.static, best_peak=least, at=f"a batch of {min(known)}"
            )
        _LOG.info("largest batch within %s: %d (the sample has %d)", format_bytes(limit), found, size)
        return found

    def rows(self, memory: BudgetLike = None) -> dict[str, Any]:
        """As JSON has it; ``fits`` is None where no memory is known."""
        known = memory is not None or self.device.memory > 0
        names = (
            "peak", "static", "parameters", "gradients", "optimizer_state", "activations", "temporaries", "buffers",
            "batch", "constants", "total", "reserved", "at", "training", "compiled", "flops",
        )  # fmt: skip
        rows: dict[str, Any] = {name: getattr(self, name) for name in names}
        rows |= {
            "device": self.device.name,
            "context": self.device.context,
            "workspace": self.device.workspace,
        }
        rows |= {"assumed": ["context", "workspace"] if self.device.is_gpu else []}
        rows |= {
            "memory": self.memory(memory) if known else None,
            "fits": self.fits(memory) if known else None,
        }
        rows |= {"phases": dict(self.phases), "unknown": dict(self.unknown), "unread": list(self.unread)}
        rows["answered"] = list(self.answered)
        rows["modules"] = [asdict(m) for m in self.modules]
        for key, shares in (("by_module", self.by_module), ("by_line", self.by_line)):
            rows[key] = [{"place": s.place, "what": s.what, "bytes": s.nbytes} for s in shares]
        return rows

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def lines(self, memory: BudgetLike = None) -> Iterator[str]:
        """In words, one fact a line."""
        known = memory is not None or self.device.memory > 0
        verdict = ""
        if known:
            limit = self.memory(memory)
            left = limit - self.total
            over = f"{format_bytes(left)} are left" if left >= 0 else f"{format_bytes(-left)} too much"
            fits = self.fits(memory)
            if left >= 0 and not fits:
                over += ", in pieces"
            verdict = f", {'fits' if fits else 'does NOT fit'} {format_bytes(limit)}: {over}"
        yield f"peak               {format_bytes(self.total)}{verdict}"
        for name in _PARTS:
            if nbytes := getattr(self, name):
                yield f"  {name.replace('_', ' '):17}{format_bytes(nbytes)}"
        if self.device.is_gpu:
            yield f"  context          {format_bytes(self.device.context)} (assumed for {self.device.name})"
            yield f"  cuBLAS           {format_bytes(self.device.workspace)} (assumed)"
        if self.reserved is not None:
            yield f"reserved           {format_bytes(self.reserved)} at most by PyTorch's allocator (simulated)"
        yield f"reached            {self.at}"
        if len(self.phases) > 1:
            shown = ", ".join(f"{_PHASES[p]} {format_bytes(n)}" for p, n in self.phases.items())
            yield f"peak of            {shown}"
        if self.compiled and self.device.is_gpu:
            yield "assumed            code for the CPU: Inductor fuses other ops on a GPU"
        if self.unread:
            yield f"assumed            1.0 for numbers that only a real step has: {', '.join(self.unread[:3])}"
        if self.answered:
            yield f"assumed            of what only a real step has: {', '.join(self.answered[:3])}"
        if self.unknown:
            names = ", ".join(n.removeprefix("aten.").partition(".")[0] for n in list(self.unknown)[:3])
            yield (
                f"not counted        what kernels hold for themselves: {sum(self.unknown.values())} calls of "
                f"{len(self.unknown)} ops ({names}, …) were not run"
            )


_PARTS: Final = (
    "parameters", "buffers", "batch", "gradients", "optimizer_state", "activations", "temporaries", "constants",
)  # fmt: skip
_PHASES: Final = {"forward": "forward pass", "backward": "backward pass", "update": "optimizer step"}


class EstimateOptions(TypedDict, total=False):
    """What `estimate` takes by keyword."""

    loop: Loop | None
    steps: int
    accumulate: int
    autocast: torch.dtype | str | None
    checkpoint: bool
    set_to_none: bool
    kernels: bool | None
    compiled: bool


_DEFAULTS: Final[dict[str, Any]] = {
    "loop": None, "steps": 2, "accumulate": 1, "autocast": None, "checkpoint": False, "set_to_none": True,
    "kernels": None, "compiled": False,
}  # fmt: skip


@dataclass(frozen=True)
class _Asked:
    """What an estimate was asked for, so that it can be asked for with something else."""

    model: Any
    sample: Any
    optimizer: Any
    loss_fn: Any
    device: Device
    loop: Loop | None
    steps: int
    accumulate: int
    autocast: torch.dtype | None
    checkpoint: bool
    set_to_none: bool
    kernels: bool | None
    compiled: bool

    @property
    def trains(self) -> bool:
        return self.loss_fn is not None or self.optimizer is not None

    def answer(self) -> Estimate:
        model = self.model
        loop = EagerLoop(model, self.sample, compiled=self.compiled)
        run = loop.with_data and not self.device.is_gpu if self.kernels is None else self.kernels
        blocks = checkpointed(model) if self.checkpoint else nullcontext()
        with blocks, _mode(model, training=self.trains or self.loop is not None), guessing(Guesses()):
            loop.run(
                self.loop or self.own_loop(), self.optimizer, self.steps, foreach=self.device.is_gpu,
                backend=Emulation(loop, run=run) if self.compiled else None,
            )  # fmt: skip
        if isinstance(model, DistributedDataParallel):
            loop.add_buckets(compat_ddp.buckets_of(model))
        kernels = Kernels(loop, run=run)
        return _summed(
            loop, Timeline(loop, kernels, CUDA_ALIGNMENT if self.device.is_gpu else 0), kernels, self
        )

    def own_loop(self) -> Loop:
        """The loop of somebody who writes none: what the example of the documentation has."""
        cast = partial(torch.autocast, "cpu", self.autocast) if self.autocast is not None else nullcontext
        if not self.trains:
            return partial(_inference, cast=cast)
        loss_fn = loss_function(self.loss_fn, self.sample)
        return partial(
            _training, loss_fn=loss_fn, cast=cast, accumulate=self.accumulate, set_to_none=self.set_to_none
        )


def _training(
    model: Any, batch: Any, optimizer: Any, *, loss_fn: LossFn, cast: Callable[[], AbstractContextManager[Any]],
    accumulate: int, set_to_none: bool,
) -> Any:  # fmt: skip
    for _ in range(accumulate):
        with python_state_kept(batch):  # the next one is another, which this one's code has not changed
            with cast():
                loss = checked_loss(loss_fn(model, batch))
            if accumulate > 1:
                loss = loss / accumulate
            loss.backward()  # type: ignore[no-untyped-call]
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad(set_to_none=set_to_none)
    else:
        model.zero_grad(set_to_none=set_to_none)
    return loss.detach()


def _inference(model: Any, batch: Any, _: Any, *, cast: Callable[[], AbstractContextManager[Any]]) -> Any:
    with python_state_kept(batch), torch.no_grad(), cast():
        return called(model, batch)


def estimate(
    model: torch.nn.Module,
    sample: object,
    optimizer: Any = None,
    loss_fn: Any = None,
    device: str | None = None,
    **options: Unpack[EstimateOptions],
) -> Estimate:
    """What a training loop, or a forward pass, needs as it is: its peak in bytes, split up, with nothing allocated.

    With ``loss_fn`` or ``optimizer`` (torch's or anybody's; several in a list) the loop is forward pass, backward
    pass, ``optimizer.step()`` and ``zero_grad(set_to_none)``, run ``steps`` times, so that the optimizer has its
    state; with neither it is the forward pass in evaluation mode, without gradients. ``loss_fn`` and ``sample`` are
    as `fit` takes them. ``loop(model, sample, optimizer)`` is a step of your own instead: it must use what it is
    given, and what it returns lives until the next step has returned.

    ``accumulate``: so many backward passes before each step. ``autocast``: the forward pass runs under
    ``torch.autocast`` to that dtype (``bfloat16``). ``checkpoint``: each block is checkpointed, as
    ``torch.utils.checkpoint`` does it. ``compiled``: the model is what ``torch.compile(model)`` makes of it with
    Inductor's defaults: each pass is lowered for this machine, and its lines are followed, before kernels are built;
    code between graphs, the optimizer and what else the loop does run as in eager. ``device``: a name of `DEVICES`
    (``h100``, ``rtx4090``, ``cpu``); on a GPU sizes are rounded as its allocator does, torch's optimizers step all
    parameters together, and context and libraries take what is assumed for it; the ops are those of the CPU.

    In ``DistributedDataParallel``, or divided by ``fully_shard``, the answer is this rank's, with buckets, and what
    is gathered for as long as it is there; nothing is sent.

    A model on the meta device needs no memory; its sample should have data where the model looks at some. On the CPU,
    for models with data, the answer is what the allocator measures, to the byte: each kind of kernel is run once on
    tensors of its sizes for what it holds for itself (``kernels=False``: none is; True: also for models without
    data), unless arguments and results are beyond 1 GiB. What was not run is in ``unknown``.

    Raises ``BadInput`` for arguments that make no sense, ``Unsupported`` for loops that decide by data that comes
    from parameters, and whatever the model raises.
    """
    model = module_of(model)
    check_model(model.module if isinstance(model, DistributedDataParallel) else model, shards=True)
    chosen = {**_DEFAULTS, **options}
    if unknown := [name for name in chosen if name not in _DEFAULTS]:
        raise BadInput(
            f"unknown options {', '.join(unknown)}: they are {', '.join(_DEFAULTS)}", place="estimate"
        )
    for name in ("steps", "accumulate"):
        if not isinstance(chosen[name], int) or chosen[name] < 1:
            raise BadInput(f"{name} must be a whole number, at least 1", chosen[name], "estimate")
    if chosen["compiled"] and isinstance(model, DistributedDataParallel):
        raise Unsupported(
            "compiled=True of a model in DistributedDataParallel", "Dynamo cuts its graph at the buckets",
            "estimate its .module so, and add the buckets, a copy of its gradients",
        )  # fmt: skip
    chosen["autocast"] = _dtype(chosen["autocast"])
    asked = _Asked(model, sample, None, loss_fn, device_named(device), **chosen)
    own = asked.accumulate > 1 or asked.autocast is not None or not asked.set_to_none
    if asked.loop is not None and (loss_fn is not None or own):
        fault = "loop= is all of a step: leave out loss_fn, accumulate, autocast and set_to_none"
        raise BadInput(fault, place="estimate")
    if optimizer is not None:
        asked = replace(asked, optimizer=as_one(optimizer))
    return asked.answer()


def device_named(name: str | None) -> Device:
    """A device of `DEVICES`. Raises ``BadInput``."""
    key = "cpu" if name is None else str(name).lower().replace(" ", "").replace("_", "-")
    if key not in DEVICES:
        raise BadInput(
            f"unknown device {name!r}: those known by name are {', '.join(DEVICES)}", place="device"
        )
    return DEVICES[key]


def _dtype(name: torch.dtype | str | None) -> torch.dtype | None:
    dtype = getattr(torch, name, None) if isinstance(name, str) else name
    if name is not None and dtype not in (torch.bfloat16, torch.float16):
        raise BadInput("autocast is to bfloat16 or float16", name, "estimate")
    return dtype


@contextmanager
def _mode(model: torch.nn.Module, *, training: bool) -> Iterator[None]:
    """The model as it is, or in evaluation mode."""
    modes = [(m, m.training) for m in model.modules()]
    try:
        if not training:
            for m in model.modules():
                m.training = False
        yield
    finally:
        for m, was in modes:
            m.training = was


# --- who it is that needs the bytes ---

_ROLES: Final = {
    "parameter": "parameters", "buffer": "buffers", "input": "batch", "gradient": "gradients",
    "state": "optimizer_state", "constant": "constants",
}  # fmt: skip


def _summed(loop: EagerLoop, timeline: Timeline, kernels: Kernels, asked: _Asked) -> Estimate:
    peak = timeline.peak()
    parts: Counter[str] = Counter()
    modules: Counter[tuple[str, str]] = Counter()
    lines: Counter[tuple[str, str]] = Counter()
    for s in peak.live:
        life, size = timeline.lives[s], timeline.sizes[s]
        made = "activations" if life.phase == "forward" else "temporaries"
        what = _ROLES.get(life.role, made)
        parts[what] += size
        module = life.origin.module
        if what in ("parameters", "buffers"):
            module = str(loop.tape.storages[s].key).rpartition(".")[0]
        modules[module, what] += size
        if what in ("activations", "temporaries"):
            lines[life.origin.source, what] += size
    parts["temporaries"] += peak.inside
    at = "before the first op"
    if peak.op >= 0:
        r = timeline.records[peak.op]
        at = f"{r.target} of the {_PHASES[r.phase]}" + (f" at {r.origin}" if str(r.origin) else "")
        modules[r.origin.module, "temporaries"] += peak.inside
        lines[r.origin.source, "temporaries"] += peak.inside
    static = sum(parts[x] for x in ("parameters", "buffers", "batch", "optimizer_state", "constants"))
    alike: Counter[tuple[str, str]] = Counter()
    for (module, what), size in modules.items():
        alike[of_any_layer(module), what] += size
    requests = timeline.requests() if asked.device.is_gpu else ()
    return Estimate(
        peak.nbytes, static, **{name: parts[name] for name in _PARTS}, at=at, phases=dict(timeline.phases),
        by_module=_shares(alike), by_line=_shares(lines), modules=_modules(modules, peak.nbytes),
        device=asked.device, unknown=dict(kernels.unknown),
        unread=tuple(dict.fromkeys(map(str, loop.tape.unread))),
        answered=tuple(dict.fromkeys(f"{c.expected} at {c.place}" for c in loop.tape.checks if not c.raises)),
        flops=timeline.flops, training=asked.trains, compiled=asked.compiled,
        reserved=reserved(requests) if requests else None, _asked=asked, _requests=requests,
    )  # fmt: skip


def _shares(count: Counter[tuple[str, str]]) -> tuple[Share, ...]:
    return tuple(Share(place, what, n) for (place, what), n in count.most_common() if n)


_COLUMNS: Final = {"parameters": 0, "buffers": 0, "gradients": 1, "optimizer_state": 2}


def _modules(count: Counter[tuple[str, str]], peak: int) -> tuple[ModuleBytes, ...]:
    """The bytes of each module with all that is inside it; batch and constants are of no module."""
    sums = ModuleSums(4)
    for (module, what), nbytes in count.items():
        if what not in ("batch", "constants"):
            sums.add(module, _COLUMNS.get(what, 3), nbytes)
    return tuple(
        ModuleBytes(name, int(p), int(g), int(o), int(a), (p + g + o + a) / max(peak, 1))
        for name, (p, g, o, a) in sums
    )
