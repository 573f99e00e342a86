"""The allocators' C++ extensions: compiled once per torch, Python and source, and installed as torch's allocators.

One compiler command on a few small files: quicker than torch's extension builder, and it needs neither ninja
nor setuptools. Several processes may do this at once.

torch takes another CUDA allocator (``CUDAPluggableAllocator``) only as long as its own has served nothing, so the
first thing a program does is ``allocator.load("cuda")``, before anything is put on the device. A ``MemPool`` with
this allocator would need no such order, but torch's own allocator would then ask for large segments and cut them up
itself, and the requests of a step would never be seen. Outside of planned steps, freed blocks are kept for requests
of the same size on the same stream, and given back when the device has no more memory. Blocks used on other streams
(``record_stream``) are waited for. CUDA graphs cannot be captured, and ``torch.cuda.memory_stats`` knows nothing.
The CUDA allocator is tested against a stand-in for the CUDA runtime, and has run on an H200 (docs/training.md).
"""

import atexit
import contextlib
import ctypes
import hashlib
import importlib.util
import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import torch

from tightship.errors import BadInput, Unsupported
from tightship.files import scratch_folder
from tightship.graph import alignment_of

__all__ = ["NoCompiler", "build_and_import", "install", "runtime"]

_NAMES: Final = {"cpu": "tightship_allocator", "cuda": "tightship_cuda"}
_SOURCES: Final = {
    "cpu": ("allocator.cpp", "allocator.h", "module.h", "arena.h"),
    "cuda": ("cuda.cpp", "module.h", "arena.h"),
}
"""By kind of device; the first is what is compiled."""
_CUDA: Final = "serving a step on CUDA from an arena"
_COMPILERS: Final = ("c++", "g++", "clang++")
_INSTEAD: Final = "run without the arena, or install a C++20 compiler (CXX names it) and Python's headers"


class NoCompiler(Unsupported):
    """The allocator cannot be built here; everything that needs no arena and no meter still works."""

    def __init__(self, why: str) -> None:
        super().__init__("serving a step from an arena", why, _INSTEAD)


def _command(kind: str, target: Path) -> list[str]:
    named = shlex.split(os.environ.get("CXX", ""))
    compiler = next((path for path in map(shutil.which, _COMPILERS) if path), None)
    if os.name == "nt" or not (named or compiler):
        raise NoCompiler("no C++ compiler was found" if os.name != "nt" else "Windows is not supported")
    root = Path(torch.__file__).parent
    python = sysconfig.get_paths()
    headers = [Path(python["include"]), Path(python["platinclude"])]
    libraries = ["-ldl"] if kind == "cuda" else [f"-L{root / 'lib'}", "-lc10", "-ltorch_cpu"]
    if kind == "cpu":
        headers.insert(0, root / "include")
    return [
        *(named or [str(compiler)]),
        *("-std=c++20", "-O2", "-shared", "-fPIC", "-fvisibility=hidden"),
        _alignment(kind),
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(flag for path in headers for flag in ("-isystem", str(path))),
        *(("-undefined", "dynamic_lookup") if sys.platform == "darwin" else ()),
        str(Path(__file__).with_name(_SOURCES[kind][0])),
        *(*libraries, "-o", str(target)),
    ]


def _alignment(kind: str) -> str:
    """The compiler's flag that says what sizes and offsets on devices of this kind are multiples of."""
    return f"-DTIGHTSHIP_ALIGNMENT={alignment_of(kind)}"


def _compile(kind: str, target: Path) -> None:
    """Writes the extension to ``target`` in one step, so that no other process ever sees half of it. What the
    compiler leaves where it is killed lies in a folder beside it, which is gone then or, where this process is
    killed, with the next time."""
    folder = target.with_name(f"{target.name}.{os.getpid()}")
    part = folder / target.name
    command = _command(kind, part)
    try:
        folder.mkdir()
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "TMPDIR": str(folder)},
        )
        if done.returncode != 0:
            lines = done.stderr.strip().splitlines()
            first = next((line for line in lines if "error" in line), lines[-1] if lines else "no message")
            raise NoCompiler(f"{command[0]} failed: {first}")
        os.replace(part, target)
    except OSError as error:
        raise NoCompiler(f"{command[0]} could not be run: {error}") from error
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _folder() -> Path:
    """The user's cache, or a private folder for this process where there is none to write to."""
    try:
        cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "tightship" / "allocator"
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        if os.access(cache, os.W_OK):
            return cache
    except (OSError, RuntimeError):
        pass
    held = contextlib.ExitStack()
    atexit.register(held.close)
    try:
        return held.enter_context(scratch_folder())
    except BadInput as error:
        raise NoCompiler(str(error)) from error


def _target(kind: str) -> Path:
    key = hashlib.sha256(repr((torch.__version__, torch.version.git_version, _alignment(kind))).encode())
    for name in _SOURCES[kind]:
        key.update(Path(__file__).with_name(name).read_bytes())
    version = f"{sys.implementation.cache_tag}-{sys.platform}-{platform.machine()}"
    return _folder() / f"{_NAMES[kind]}-{version}-{key.hexdigest()[:20]}.so"


@contextlib.contextmanager
def _one_builder(target: Path) -> Iterator[None]:
    """Processes that start together build once; unlike a lock file, this lock dies with its holder."""
    import fcntl  # here, because Windows has none and is refused before

    with contextlib.ExitStack() as held:
        # Some network folders cannot lock, and a full disk has no file to lock: then each builds for itself.
        with contextlib.suppress(OSError):
            file = held.enter_context(open(target.with_suffix(".lock"), "w"))
            fcntl.flock(file, fcntl.LOCK_EX)
            for left in target.parent.glob(f"{target.name}.*"):  # by processes that were killed
                shutil.rmtree(left, ignore_errors=True)
        yield


def _import(kind: str, path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(_NAMES[kind], path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def build_and_import(kind: str = "cpu") -> Any:
    """The extension module for devices of this kind (``cpu``, ``cuda``), compiled unless the user's cache has it.
    Raises `NoCompiler`."""
    target = _target(kind)
    if target.exists():
        with contextlib.suppress(ImportError):  # from another machine that shares the cache: build anew
            return _import(kind, target)
    _command(kind, target)
    with _one_builder(target):
        if target.exists():
            with contextlib.suppress(ImportError):
                return _import(kind, target)
        _compile(kind, target)
    try:
        return _import(kind, target)
    except ImportError as error:
        raise NoCompiler(f"what the compiler made cannot be loaded: {error}") from error


def install(kind: str) -> Any:
    """Builds the extension for devices of this kind, makes it torch's allocator and returns its functions. Raises
    `NoCompiler`, and ``Unsupported`` where another allocator has priority or torch's own has been used."""
    if kind == "cuda":
        _check_cuda()
        native = build_and_import(kind)
        _install_cuda(native)
        return native
    if kind != "cpu":
        raise Unsupported(f"an arena on {kind}", "there is an allocator for CPU and CUDA")
    native = build_and_import(kind)
    if not native.install():
        raise Unsupported("serving a step from an arena", "another CPU allocator has priority")
    return native


def _check_cuda() -> None:
    """Raises ``Unsupported`` where it is clear beforehand that the allocator cannot be installed."""
    if not torch.cuda.is_available():
        raise Unsupported(_CUDA, "there is no CUDA device", "plan for it without running")
    if torch.cuda.is_initialized() and torch.cuda.memory.get_allocator_backend() == "pluggable":
        raise Unsupported(_CUDA, "another allocator has been installed")


def _install_cuda(native: Any) -> None:
    """Makes torch ask ``native``. Raises ``Unsupported`` if it is too late."""
    try:
        native.open(runtime())
    except OSError as error:
        raise Unsupported(_CUDA, f"the CUDA runtime cannot be loaded: {error}") from error
    memory = torch.cuda.memory
    pluggable = memory.CUDAPluggableAllocator(native.__file__, "ts_malloc", "ts_free")
    library = ctypes.CDLL(native.__file__)
    torch_side = pluggable.allocator()
    if hasattr(torch_side, "set_record_stream_fn"):
        torch_side.set_record_stream_fn(ctypes.cast(library.ts_record_stream, ctypes.c_void_p).value)
    try:
        memory.change_current_allocator(pluggable)
    except RuntimeError as error:
        raise Unsupported(
            _CUDA,
            "torch's own CUDA allocator has been used already",
            'call tightship.execute.allocator.load("cuda") before anything is put on the device',
        ) from error


def runtime() -> str:
    """The CUDA runtime that torch has loaded, by name."""
    return f"libcudart.so.{(torch.version.cuda or '').partition('.')[0]}".rstrip(".")
