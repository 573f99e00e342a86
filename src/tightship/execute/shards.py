"""Parameters of which each rank keeps a part: gathered where a module reads them, saved as DTensors.

A part stands in the place of its parameter, under its name, so that optimizers, checkpoints and plans see parts. The
module gets a class of its own, whose attribute of that name gathers (as SimpleFSDP does it), together with others
that go in one message. State dicts of such modules and of optimizers have DTensors, as those of ``fully_shard`` do,
and take them, or whole tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Container, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from tightship.execute.gathering import Averaging, Gathering, Part, Placed, Shard
from tightship.execute.parts_in_hand import NoParts, Parts, Telling, reading
from tightship.frontends.torch import compat_capture, compat_distributed, compat_fully_shard
from tightship.frontends.torch.collectives import Division, messages
from tightship.frontends.torch.fabric import modules_of_fabric
from tightship.frontends.torch.fully_shard_methods import METHODS
from tightship.frontends.torch.optimizer.given import each
from tightship.frontends.torch.structure import map_leaves

__all__ = [
    "average_reads", "read_once", "say_parts", "send_together", "shard_model", "shard_optimizer", "shards_of",
    "take_over", "take_over_placed",
]  # fmt: skip

_MARK, _SAYS = "_tightship_shards", "_tightship_says_parts"


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
    """Has the model warn, once, code that is given its parts where eager's would be given DTensors, or whole ones;
    so, too, the module that Fabric's wrapper hands out."""
    telling = Telling(_seen)
    for module in (model, *(m.module for m in modules_of_fabric(model))):
        if not getattr(type(module), _SAYS, False):
            own = {"named_parameters": telling.parameters(type(module)), _SAYS: True}
            _read_by(module, {}, **own)


def _seen(module: torch.nn.Module, rows: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
    ways = shards_of(module)
    for n, p in rows:
        yield n, ways[id(p)].seen(p) if id(p) in ways else p


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
    undone = compat_fully_shard.undo_fully_shard(model)
    for row in rows:
        p = row.parameter
        spec = p.device_mesh, tuple(p.placements)
        placed = None if row.within is None else Placed(row.within)
        shard = Shard(row.gathered, p.stride(), Division(*row.among), spec, placed)
        shard.dtype, shard.reduced = row.dtype, row.reduced
        shard.stays, shard.outermost = row.stays, row.outermost
        parts[id(p)] = part = torch.nn.Parameter(row.part, p.requires_grad)
        done[id(part)] = shard
        shard.replaces(p, part)
        for module, name in row.places:
            module._parameters[name] = part
            chosen.setdefault(module, {})[name] = shard
    for module, shards in chosen.items():
        _mark(module, shards)
    for module in undone:
        _read_by(module, {}, **METHODS)
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
        way.replaces(p, part)
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
