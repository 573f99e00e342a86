"""Models that are never whole in memory: parameters made on the meta device get bytes in a file, and contents there,
one module or one tensor after the other. What of them streams goes from there to the step's own file; what stays is
in memory with the first step.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from tightship.errors import BadInput, Unsupported
from tightship.execute.host_pool import FilePool, in_file
from tightship.graph import aligned

__all__ = ["into_memory", "materialize"]

Weights = Callable[[torch.nn.Module], None] | str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_PLACE = "materialize(weights=…)"
_BLANK = 0xFF
"""What the first bytes are of what was not filled."""

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "C64": torch.complex64,
}  # fmt: skip
"""Of safetensors, as its format says."""


def materialize(
    model: torch.nn.Module, weights: Weights | None = None, *, folder: os.PathLike[str] | str | None = None
) -> None:
    """Give a model that was made on the meta device its parameters and buffers, without ever holding all of them.

    Parameters lie in a file without a name in ``folder`` (default: the system's for temporary files), which is mapped
    into memory and gone with the process; buffers are in memory. ``weights`` is a function that is called with every
    module that has such parameters or buffers of its own, to fill them; without it, that is the module's
    ``reset_parameters()``. Or it is a safetensors file, or several that have parts of the model: tensors are copied
    one by one. Parameters stay the same objects, so that an optimizer may be made before or after. What is not on the
    meta device is left alone.

    Afterwards `tightship.fit` with ``allow="stream"`` trains the model within its budget. Raises ``BadInput`` where
    something is not filled, for files that do not go with the model, and where there is no room in ``folder``;
    ``Unsupported`` for modules that say no way to fill them.
    """
    modules = [m for m in model.modules() if any(True for _ in _own(m))]
    for module in modules if weights is None else ():
        if not hasattr(module, "reset_parameters"):
            raise Unsupported(
                f"filling a {type(module).__name__}", "it has parameters or buffers, and no reset_parameters()",
                "give a function of a module that fills what it has, or a safetensors file",
            )  # fmt: skip
    _give_bytes(model, folder)
    saved = {id(t) for t in model.state_dict(keep_vars=True).values()}
    fresh = [
        (f"{n}.{k}".lstrip("."), m, k) for n, m in model.named_modules() if m in modules for k in _names(m)
    ]
    if weights is None or callable(weights):
        with torch.no_grad():
            for module in modules:
                module.reset_parameters() if weights is None else weights(module)  # type: ignore[operator]
    else:
        _read(model, [weights] if isinstance(weights, (str, os.PathLike)) else list(weights))
        fresh = [
            row for row in fresh if id(getattr(row[1], row[2])) not in saved
        ]  # such buffers are in no file
    if empty := [name for name, module, key in fresh if _is_blank(getattr(module, key))]:
        what = "not filled: give weights=, a function that fills what the module it is called with has"
        raise BadInput(f"{len(empty)} parameters or buffers are {what}", empty[:4], _PLACE)


def into_memory(tensors: Iterable[torch.Tensor]) -> bool:
    """Those that lie in a file are in memory of their own afterwards; returns whether there are any."""
    had = False
    for tensor in tensors:
        if in_file(tensor):
            tensor.data = tensor.detach().clone()
            had = True
    return had


def _names(module: torch.nn.Module) -> list[str]:
    return [k for k, t in (*module._parameters.items(), *module._buffers.items()) if t is not None]


def _own(module: torch.nn.Module) -> Iterator[torch.Tensor]:
    """What a module has itself, on the meta device."""
    for tensor in (*module._parameters.values(), *module._buffers.values()):
        if tensor is not None and tensor.is_meta:
            yield tensor


def _give_bytes(model: torch.nn.Module, folder: os.PathLike[str] | str | None) -> None:
    parameters = {id(p): p for p in model.parameters() if p.is_meta}
    pool, at = FilePool(sum(aligned(p.nbytes) for p in parameters.values()), folder), 0
    for p in parameters.values():
        tensor = torch.empty(p.shape, dtype=p.dtype)
        if p.nbytes:
            tensor = pool.tensor(at, tuple(p.shape), p.stride(), p.dtype)
        at += aligned(p.nbytes)
        _mark(tensor)
        made = torch.nn.Parameter(tensor, p.requires_grad)
        made.__class__, made.__dict__ = p.__class__, dict(p.__dict__)
        torch.utils.swap_tensors(p, made)
    buffers: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_meta:
                made = buffers.setdefault(id(buffer), torch.zeros_like(buffer, device="cpu"))
                _mark(made)
                module._buffers[name] = made


def _head(tensor: torch.Tensor) -> torch.Tensor:
    """Its first bytes."""
    storage = tensor.detach().untyped_storage()
    return torch.empty(0, dtype=torch.uint8).set_(storage, 0, (min(storage.nbytes(), 64),), (1,))


def _mark(tensor: torch.Tensor) -> None:
    _head(tensor).fill_(_BLANK)


def _is_blank(tensor: torch.Tensor | None) -> bool:
    if not isinstance(tensor, torch.Tensor) or tensor.is_meta or not tensor.nbytes:
        return False
    return bool((_head(tensor) == _BLANK).all())


# --- safetensors ---


def _read(model: torch.nn.Module, files: list[str | os.PathLike[str]]) -> None:
    """Copies every tensor of the files to the model's of that name."""
    wanted = model.state_dict(keep_vars=True)
    filled: set[int] = set()
    for file in files:
        for name, source in _tensors(Path(file)):
            target = wanted.get(name)
            if target is None:
                raise BadInput(f"{os.fspath(file)!r} has a tensor that the model has not", name, _PLACE)
            if target.shape != source.shape:
                raise BadInput(
                    f"{name!r} is of shape {tuple(source.shape)} in {os.fspath(file)!r}, and of shape "
                    f"{tuple(target.shape)} in the model", place=_PLACE,
                )  # fmt: skip
            with torch.no_grad():
                target.copy_(source)
            filled.add(id(target))
    missing = [name for name, t in wanted.items() if id(t) not in filled]
    if missing:
        raise BadInput(f"{len(missing)} tensors of the model are in no file", missing[:4], _PLACE)


def _tensors(file: Path) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors of a safetensors file, whose pages are read where a tensor is."""
    try:
        with file.open("rb") as opened:
            memory = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
        (length,) = struct.unpack("<Q", memory[:8])
        header: dict[str, Any] = json.loads(memory[8 : 8 + length])
        header.pop("__metadata__", None)
        rows = [(name, _DTYPES[x["dtype"]], x["shape"], *x["data_offsets"]) for name, x in header.items()]
    except OSError as error:
        raise BadInput(f"cannot read {os.fspath(file)!r}: {error.strerror}", place=_PLACE) from error
    except (ValueError, KeyError, TypeError, AttributeError, struct.error) as error:
        raise BadInput(f"{os.fspath(file)!r} is no safetensors file ({error!r})", place=_PLACE) from error
    for name, dtype, shape, begin, end in rows:
        size, first = torch.Size(shape).numel() * dtype.itemsize, 8 + length + begin
        if end - begin != size or first + size > len(memory):
            raise BadInput(f"{os.fspath(file)!r} is cut off or damaged at {name!r}", place=_PLACE)
        flat = (
            torch.frombuffer(memory, dtype=torch.uint8, count=size, offset=first) if size else torch.empty(0)
        )
        yield (
            name,
            (flat.view(dtype) if first % dtype.itemsize == 0 else flat.clone().view(dtype)).view(shape),
        )
