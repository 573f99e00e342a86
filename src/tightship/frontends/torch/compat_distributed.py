"""Every touch of torch.distributed's private interfaces: groups, what has distributed a model, collectives."""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tightship.frontends.torch.compat import storage_key
from tightship.graph import aligned


def world_size() -> int:
    """Ranks that train together; 1 where torch.distributed is not initialized."""
    return torch.distributed.get_world_size() if _initialized() else 1


def _initialized() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def alone() -> bool:
    """Whether torch.distributed is initialized, with one rank."""
    return _initialized() and torch.distributed.get_world_size() == 1


def imagined_ranks() -> bool:
    """Whether there are other ranks by name alone, so that nothing is sent."""
    return _initialized() and torch.distributed.get_backend() == "fake"


def imagine_ranks(rank: int, size: int) -> None:
    """Makes this process one of so many ranks, of which there are no others."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if imagined_ranks():
        torch.distributed.destroy_process_group()
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)


def process_group(name: str) -> Any:
    """The process group of a name, as functional collectives have it."""
    return torch.distributed.distributed_c10d._resolve_process_group(name)


def name_of_group(group: Any) -> str:
    """The name of a process group, as ops of torch.distributed are given it."""
    given = torch.distributed.ProcessGroup.unbox(group) if isinstance(group, torch._C.ScriptObject) else group
    name: str = given.group_name
    return name


def reduction_name(how: Any) -> str:
    """The name that functional collectives have for a reduction, as ops of torch.distributed are given it."""
    with torch.no_grad():  # asks by TorchScript, which is refused where gradients may go through it
        kind = torch.distributed.ReduceOp.RedOpType(how.op())
    name: str = kind.name
    return name.lower()


class _Ended:
    """What ops of torch.distributed return that have ended; made when first needed, as there may be no such ops."""

    work: Any = None
    boxed: Any = None


def ended_work() -> Any:
    """A work of torch.distributed that has ended."""
    if _Ended.boxed is None:
        from torch._C._distributed_c10d import FakeWork, Work

        _Ended.work = FakeWork()  # kept, so that whoever unboxes it gets this one
        _Ended.boxed = Work.boxed(_Ended.work)
    return _Ended.boxed


def mesh_of(name: str, device: str) -> Any:
    """The mesh of the ranks of a group."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    group = process_group(name)
    if group is torch.distributed.group.WORLD:
        return init_device_mesh(device, (world_size(),))
    return DeviceMesh.from_group(group, device)


def is_of_connection(error: RuntimeError) -> bool:
    """Whether a collective could not be completed."""
    return isinstance(error, torch.distributed.DistBackendError) or "/gloo/" in str(error)


def first_rank(group: Any) -> int:
    """Of a process group; its number among all ranks."""
    return int(torch.distributed.get_process_group_ranks(group)[0])


def name_of_all() -> str:
    """The name of the default process group."""
    name: str = torch.distributed.group.WORLD.group_name
    return name


def collectives_begun(name: str) -> int | None:
    """How many collectives this rank has begun among a group; None of a group that it does not know, or that does not
    count."""
    try:
        count: int = process_group(name)._get_sequence_number_for_group()
    except (RuntimeError, ValueError, KeyError):
        return None
    return count


def is_group(name: str) -> bool:
    """Whether this rank has made the group, or is making it."""
    try:
        process_group(name)
    except (RuntimeError, ValueError, KeyError):
        return False
    return True


def new_group_of(frame: Any) -> tuple[str, tuple[int, ...]] | None:
    """If a frame is of what makes a group of processes, once it knows: its name, and the ranks that it waits for."""
    module = frame.f_globals.get("__name__", "")
    if module != "torch.distributed.distributed_c10d" or frame.f_code.co_name != "_new_group_with_tag":
        return None
    own = frame.f_locals
    return (str(own["group_name"]), tuple(own["ranks"])) if "group_name" in own and own.get("ranks") else None


def call_of(frame: Any) -> tuple[str, str | None] | None:
    """If a frame is of torch.distributed's own code: what it calls that sends, and among whom, as far as it says."""
    module = frame.f_globals.get("__name__", "")
    if not module.startswith("torch.distributed") or module.endswith("c10d_logger"):
        return None
    name, own = frame.f_code.co_name, frame.f_locals
    group = own.get("group")
    among = group.group_name if isinstance(group, torch.distributed.ProcessGroup) else None
    if among is None and module == "torch.distributed.distributed_c10d" and "group" in own:
        among = name_of_all()
    short = "torch.distributed" if module == "torch.distributed.distributed_c10d" else module
    return f"{short}.{name}", among


def bytes_in(frame: Any) -> int:
    """Of the tensors that a frame's code has by name, or in lists."""
    found = 0
    for value in frame.f_locals.values():
        for t in value if isinstance(value, list | tuple) else (value,):
            if isinstance(t, torch.Tensor):
                found += t.numel() * t.element_size()
    return found


def ranks_of_gloo(name: str) -> list[int]:
    """The ranks of a group that sends by gloo; none of another one, or of one that this rank does not know."""
    try:
        group = process_group(name)
        there = torch.distributed.get_backend(group) == "gloo"
    except (RuntimeError, ValueError, KeyError):
        return []
    return torch.distributed.get_process_group_ranks(group) if there else []


def ports_of_store(store: Any) -> tuple[int, ...]:
    """Where a store listens, if it does."""
    store = _underlying(store)
    return (store.port,) if isinstance(store, torch.distributed.TCPStore) else ()


def _underlying(store: Any) -> Any:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def process_groups_store() -> Any:
    """The key-value store that the default process group was made with, which all ranks reach."""
    return torch.distributed.distributed_c10d._get_default_store()


def other_connection(store: Any) -> Any:
    """The same store, for another thread: while one waits in it, as where a group is made, nobody else may use its
    connection. The store itself where it has no more than one."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError, RuntimeError):
        return store


def store_is_there(store: Any) -> bool:
    """Whether the process that has the store is there, as far as can be seen; a request to one that is not is told in
    the log at length."""
    store = _underlying(store)
    if not isinstance(store, torch.distributed.TCPStore):
        return True
    try:
        socket.create_connection((store.host, store.port), 1.0).close()
    except OSError:
        return False
    return True


def seconds_of_timeout() -> float:
    """How long collectives of the default process group may take."""
    world: Any = torch.distributed.group.WORLD
    known = [getattr(world._get_backend(d), "options", None) for d in world._device_types]
    timeouts: list[timedelta] = [t for o in known if (t := getattr(o, "_timeout", None)) is not None]
    return min(timeouts, default=torch.distributed.default_pg_timeout).total_seconds()


def launched_together() -> bool:
    """Whether a launcher has started this process as one of several ranks, which may not have met yet."""
    return os.environ.get("WORLD_SIZE", "1") not in ("", "0", "1")


def store_of_launcher() -> bool:
    """Whether torchrun has the store that ranks meet in, and not one of them."""
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def gloo_group(key: str, timeout: timedelta) -> Any:
    """A group of all ranks, which meet under ``key`` of the store: ``new_group`` counts its keys, and those of ranks
    that were started before, with the same store, are the same."""
    store = torch.distributed.PrefixStore(key, process_groups_store())
    rank, size = torch.distributed.get_rank(), torch.distributed.get_world_size()
    return torch.distributed.ProcessGroupGloo(store, rank, size, timeout=timeout)


def set_timeout(group: Any, timeout: timedelta) -> None:
    """How long collectives of a group of `gloo_group` may take."""
    group._set_default_timeout(timeout)


def hold_for_good(group: Any) -> None:
    """Has a group never be freed, not even when the process ends: its threads end with the process, and whoever frees
    it waits for what they still do."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def is_wait(fn: Any) -> bool:
    """Whether the op does nothing but wait for a collective, or wrap its result so that who reads it waits."""
    name = str(fn)
    return "c10d_functional" in name and (".wait_tensor." in name or "._wrap_tensor_autograd." in name)


def is_distributed(kind: type) -> bool:
    """Whether tensors of a class are DTensors, which make ops of their parts, and collectives, of each op."""
    return kind.__name__ == "DTensor" and kind.__module__ == "torch.distributed.tensor"


def divided_dims(t: Any) -> frozenset[int]:
    """Along which dimensions ranks have parts of a DTensor; none where they have summands."""
    if any(x.is_partial() for x in t.placements):
        return frozenset()
    return frozenset(x.dim % t.dim() for x in t.placements if x.is_shard())


def divides_evenly(t: Any) -> bool:
    """Whether all ranks have as large a part of a DTensor."""
    local = list(t.shape)
    for k, x in enumerate(t.placements):
        if x.is_shard():
            rows, rest = divmod(local[x.dim], t.device_mesh.size(k))
            if rest:
                return False
            local[x.dim] = rows
    return True


def maker_like(t: Any) -> Callable[[torch.Tensor], Any]:
    """What makes DTensors of parts that lie as those of another one."""
    from torch.distributed.tensor import DTensor

    mesh, placements, shape, stride = t.device_mesh, t.placements, t.shape, t.stride()

    def made(part: torch.Tensor) -> Any:
        return DTensor.from_local(part, mesh, placements, run_check=False, shape=shape, stride=stride)

    return made


def with_own_part(tensor: Any, part: torch.Tensor) -> torch.Tensor:
    """A DTensor like another one, with that part; no leaf's gradient is asked for."""
    from torch.distributed.tensor import DTensor

    return DTensor(part, tensor._spec, requires_grad=False)


def methods_of_parts() -> list[tuple[Any, str]]:
    """What looks at the parts of DTensors by itself; none where nobody has made one."""
    there = sys.modules.get("torch.distributed.tensor")
    names = ("from_local", "to_local", "redistribute", "full_tensor")
    return [] if there is None else [(there.DTensor, n) for n in names]


def expire(stand_in: torch.Tensor, kind: type) -> None:
    """Has every use of a stand-in be one of ``kind``."""
    local = getattr(stand_in, "_local_tensor", stand_in)
    local.__class__ = kind


@contextmanager
def captured_alike() -> Iterator[None]:
    """Inside, what torch.distributed does beside the ops of a step is done where no mode of the caller's sees it, and
    by the same ops on each rank."""
    with _shapes_asked_outside(), _parts_exchanged():
        yield


@contextmanager
def _shapes_asked_outside() -> Iterator[None]:
    """Inside, DTensors ask what results look like as a whole where no mode of the caller's sees the question."""
    from torch.distributed.tensor._sharding_prop import ShardingPropagator

    name = "_propagate_tensor_meta_non_cached"
    known = getattr(ShardingPropagator, name)

    def asked(self: Any, schema: Any) -> Any:
        with _disable_current_modes():
            return known(self, schema)

    setattr(ShardingPropagator, name, asked)
    try:
        yield
    finally:
        setattr(ShardingPropagator, name, known)


@contextmanager
def _parts_exchanged() -> Iterator[None]:
    """Inside, the differentiable exchange of ``torch.distributed.nn``, where it is used, is one collective: with gloo
    it is a scatter from one rank after the other, which is another op on each."""
    there = sys.modules.get("torch.distributed.nn.functional")
    if there is None:
        yield
        return
    known = vars(there._AlltoAll)["forward"]
    there._AlltoAll.forward = staticmethod(_exchange)
    try:
        yield
    finally:
        there._AlltoAll.forward = known


def _exchange(ctx: Any, group: Any, outs: Any, *tensors: Any) -> tuple[Any, ...]:
    ctx.group, ctx.input_tensor_size_list = group, [t.size() for t in tensors]
    torch.distributed.all_to_all(outs, [t.contiguous() for t in tensors], group=group)
    return tuple(outs)


class Placed(NamedTuple):
    """A parameter that is a DTensor: this rank's part, and where it is."""

    parameter: Any
    part: torch.Tensor
    places: tuple[tuple[torch.nn.Module, str], ...]


def placed(model: torch.nn.Module) -> list[Placed]:
    """The parameters that are DTensors."""
    found: dict[int, tuple[Any, list[tuple[torch.nn.Module, str]]]] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None and is_distributed(type(p.data)):
                found.setdefault(id(p), (p, []))[1].append((module, name))
    return [Placed(p, p.to_local().detach(), tuple(places)) for p, places in found.values()]


def placed_options(model: torch.nn.Module) -> list[str]:
    """What of DTensors' meshes and placements is not taken over."""
    options: dict[str, None] = {}
    for t in (*(row.parameter for row in placed(model)), *model.buffers()):
        if not is_distributed(type(t.data)):
            continue
        mesh = t.device_mesh
        if not isinstance(t, torch.nn.Parameter):
            options["buffers that are DTensors"] = None
        elif mesh.ndim != 1:
            options[f"a mesh of {mesh.ndim} dimensions"] = None
        elif mesh.size() != world_size():
            options[f"a mesh of {mesh.size()} of {world_size()} ranks"] = None
        elif t.placements[0].is_partial() or type(t.placements[0]).__name__ == "_StridedShard":
            options[f"placements {tuple(t.placements)}"] = None
    return list(options)


def is_process_group(x: Any) -> bool:
    return torch.distributed.is_available() and isinstance(x, torch.distributed.ProcessGroup)


def distributed_by(model: torch.nn.Module) -> str:
    """What of torch's own has distributed a model's parameters; empty if nothing has."""
    kinds = {
        c.__name__ for m in model.modules() for c in type(m).__mro__ if c.__module__.startswith("torch.dist")
    }
    tensors = {type(t).__name__ for t in (*model.parameters(), *model.buffers())}
    for name, known in (
        ("FSDPModule", "fully_shard"),
        ("FullyShardedDataParallel", "FullyShardedDataParallel"),
    ):
        if name in kinds:
            return known
    return "DTensor" if "DTensor" in tensors else ""


def own_part(t: Any) -> Any:
    """This rank's part of a DTensor; any other tensor as it is."""
    return t._local_tensor if is_distributed(type(t)) else t


def storage_sizes(given: Iterable[Any]) -> dict[int, int]:
    """Identity and bytes of the tensors among these, of this rank's part of those that are in parts."""
    found: dict[int, int] = {}
    for t in map(own_part, given):
        if isinstance(t, torch.Tensor):
            key, size = storage_key(t), aligned(t.numel() * t.element_size())
            found[key] = max(found.get(key, 0), size)
    return found


def layout_of(t: Any) -> Layout | None:
    """How a DTensor lies; None for other tensors."""
    if not is_distributed(type(t)):
        return None
    return Layout(t.device_mesh, tuple(t.placements), t.shape, t.stride(), t._local_tensor.shape)


def laid_out(part: Any, layout: Layout | None) -> Any:
    """The DTensor that lies as ``layout`` says, of this rank's part."""
    if layout is None or is_distributed(type(part)):
        return part
    made = sys.modules["torch.distributed.tensor"].DTensor
    return made.from_local(
        part,
        layout.device_mesh,
        layout.placements,
        run_check=False,
        shape=layout.shape,
        stride=layout.strides,
    )


def dividing_groups(mesh: Any, placements: Any) -> tuple[str, ...]:
    """Names of the groups whose ranks have different parts of a DTensor."""
    return tuple(mesh.get_group(k).group_name for k, x in enumerate(placements) if x.is_shard())


def stacked_along(layouts: Sequence[tuple[Any, Any] | None]) -> list[list[tuple[str, int]]]:
    """Of DTensors, by their meshes and placements (None: a plain tensor), the groups, with their sizes, along which
    ``torch.stack`` makes summands of their norms that are none by themselves: where all have one mesh, each dimension
    of it that divides another of them."""
    if not layouts or any(row is None or row[0] != (layouts[0] or row)[0] for row in layouts):
        return [[] for _ in layouts]
    rows = [row for row in layouts if row is not None]
    mesh, divided = rows[0][0], {k for _, p in rows for k, x in enumerate(p) if not x.is_replicate()}
    return [
        [(mesh.get_group(k).group_name, mesh.size(k)) for k in sorted(divided) if p[k].is_replicate()]
        for _, p in rows
    ]


class Layout(NamedTuple):
    """How a DTensor lies, without one."""

    device_mesh: Any
    placements: Any
    shape: torch.Size
    strides: tuple[int, ...]
    local: torch.Size

    def stride(self) -> tuple[int, ...]:
        return self.strides


def local_shape(t: Any) -> torch.Size:
    """Of this rank's part of a DTensor."""
    return t.local if isinstance(t, Layout) else torch.Size(t.to_local().shape)


def is_collective(fn: Any) -> bool:
    """Whether an op of PyTorch's sends to other ranks, or waits for what was sent."""
    return getattr(fn, "namespace", None) in _SENDING


_SENDING = (
    "c10d",
    "c10d_functional",
    "_c10d_functional",
    "_c10d_functional_autograd",
    "_dtensor",
    "symm_mem",
)
