"""The command line: ``tightship VERB …``. See ``tightship --help``.

Exit status: 0 done, 1 not achievable (infeasible, not verified), 2 bad input or usage, 3 internal error, 130
interrupted, 143 terminated. With ``--json`` a verb prints one JSON object on standard output, also when it fails, and
nothing else there.
"""

from __future__ import annotations

import argparse
import errno
import gc
import os
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from types import FrameType, FunctionType
from typing import Any, NoReturn

import tightship
from tightship.cli.output import INTERRUPTED, Output
from tightship.errors import BadInput, InternalError, TightshipError
from tightship.files import unwritable
from tightship.options import add_options
from tightship.units import BUDGET_FORMS

__all__ = ["Usage", "main", "parser"]

_EPILOG = "exit status: 0 done, 1 infeasible or not verified, 2 bad input or usage, 3 internal error, 130 interrupted"
_BUDGET = BUDGET_FORMS.replace("%", "%%")
_CHOICE = argparse.BooleanOptionalAction


def _source() -> str:
    from tightship.sources import FILES

    return (
        "module:factory (found from the current folder; factory() returns (model, sample), (model, loss_fn, sample) "
        f"or (model, loss_fn, optimizer, sample)), {FILES}"
    )


def _placement() -> str:
    from tightship.planners.packing import DEFAULT

    return DEFAULT


def _argument(
    names: str, metavar: str | None, help: str | Callable[[], str], **how: Any
) -> tuple[list[str], dict[str, Any]]:
    """What functions give is asked for when a verb with the argument is parsed."""
    return names.split(), how | {"help": help} | ({} if metavar is None else {"metavar": metavar})


_ARGUMENTS = {
    "source": _argument("source", "SOURCE", _source),
    "explained": _argument("source", "SOURCE|PLAN|SNAPSHOT",
        lambda: f"{_source()}, or a memory snapshot of PyTorch's"),
    "plan|packed": _argument("plan", "PLAN|PACKED.csv", "a plan.json, or what pack wrote"),
    "problem": _argument("problem", "PROBLEM.csv", "columns id, lower, upper, size; see the docs"),
    "module": _argument("module", "MODULE.txt", "a scheduled HLO module as text"),
    "budget": _argument("--budget -b", "B", f"{_BUDGET}; none: keep everything"),
    "explained budget": _argument("--budget -b", "B", f"also explain a plan for it: {_BUDGET}"),
    "why": _argument("--why", "NAME", "why a plan keeps or recomputes this tensor, and what else would have cost"),
    "alloc-conf": _argument("--alloc-conf", "CONF", "allocator settings to try on a memory snapshot, as in "
        "PYTORCH_ALLOC_CONF: max_split_size_mb:128,expandable_segments:True"),
    "one": _argument("one", "A.json", "a plan that plan --output wrote"),
    "two": _argument("two", "B.json", "another; differences are simulated in the first"),
    "planner": _argument("--planner", "NAME", "one planner instead of the search, with options of its own: memonger, "
        "aitemplate, grappler, …; for a module.txt, the rematerialization: search or xla (default: search)"),
    "placement": _argument("--planner", "NAME", "placement algorithm (default: %(default)s)", default=_placement),
    "assignment": _argument("--planner", "NAME", "tight (default), or xla: XLA's own", default="tight"),
    "max-batch": _argument("--max-batch", None, "find the largest batch that fits the budget, and its plan",
        action="store_true"),
    "batch-dim": _argument("--batch-dim", "N",
        "which dimension of the sample's tensors is the batch, from 0 (with --max-batch; default: 0)", type=int),
    "factory": _argument("source", "SOURCE", "module:factory, as for plan; (model, sample) alone is a forward pass"),
    "fits": _argument("--fits", "B", "memory it should fit, such as 24GiB: exit status 1 if it does not"),
    "device": _argument("--device", "NAME", "h100, a10g, rtx4090, …: with its memory, context and libraries "
        "(default: cpu)"),
    "accumulate": _argument("--accumulate", "N", "backward passes before each step of the optimizer (default: 1)",
        type=int, default=1),
    "autocast": _argument("--autocast", "DTYPE", "the forward pass under torch.autocast to bfloat16 or float16",
        choices=("bfloat16", "float16")),
    "checkpoint": _argument("--checkpoint", None, "as if each block were checkpointed", action="store_true"),
    "compiled": _argument("--compiled", None, "as if the model were compiled: torch.compile(model), with Inductor",
        action="store_true"),
    "remedies": _argument("--remedies", None, "also try what would make it fit: checkpoints, a smaller batch, a plan",
        action="store_true"),
    "points": _argument("--points", "N", "budgets to plan for, all of them together in --seconds (default: 9)",
        type=int, default=9),
    "peers": _argument("--peers", None, "compare with others: checkpoints around blocks, PyTorch's "
        "activation_memory_budget, XLA's own way", action=_CHOICE, default=True),
    "top": _argument("--top", "N", "rows of each table (default: 10)", type=int, default=10),
    "baseline": _argument("--baseline", "FILE", "warm start; the result is never worse"),
    "order": _argument("--order", None, "look for another legal schedule that needs less", action="store_true"),
    "capacity": _argument("--capacity -c", "B", "bytes, with or without a unit, that have to do"),
    "pool": _argument("--pool", "NAME[=B]", "a pool, the first one being tried first, and the bytes it has (may be "
        "given several times)", action="append", default=[]),
    "what-if": _argument("--what-if", "N", "plan for N other budgets, too: a slider in the page of --report",
        type=int),
    "bank": _argument("--bank", "NAME[=B][@SPEED]", "a memory bank in spill order, its bytes and bytes per unit of "
        "time (may be given several times): buffers lie where their traffic costs least (default: each half as fast "
        "as the one before)", action="append", default=[]),
    "heap": _argument("--heap", "[NAME=]B", "the most bytes of a heap: of one pool, or where there is only one",
        action="append", default=[]),
    "checked source": _argument("--source", "SOURCE", "check against this graph, not the one in the plan's file"),
    "output": _argument("--output -o", "FILE", "write the plan as JSON"),
    "packed output": _argument("--output -o", "FILE", "write the same rows, each with its offset"),
    "picture": _argument("--picture --svg", "FILE", "draw it as SVG", dest="picture"),
    "report": _argument("--report", "FILE", "write one HTML page that shows everything, offline"),
    "arena header": _argument("--arena-header", "FILE",
        "write a C header: the arena's size and each tensor's offset"),
    "trace": _argument("--trace", "FILE", "write a Chrome trace for Perfetto (.gz: compressed)"),
    "snapshot": _argument("--snapshot", "FILE", "write a memory snapshot for PyTorch's viewers"),
    "write": _argument("--write", "FILE", "write the model, graph or module as planned: order, clones"),
    "copies": _argument("--copies", None, "how --write copies out in a graph.pb: copy (ops that GPUs have) or "
        "identity (to the host's device) (default: copy)", choices=("copy", "identity")),
    "optimize": _argument("--optimize", "LEVEL", "with --write, of a model.onnx: plan what onnxruntime's optimizer "
        "makes of it: all (for processors like this), extended (for onnxruntime), basic (for any runtime) or none "
        "(default: all, where it is installed)", choices=("all", "extended", "basic", "none")),
    "inputs": _argument("--inputs", "FILE", "with --write, of a model.onnx: an .npz of inputs, on which the file is "
        "compared with a default session (default: random numbers)"),
    "offline plan": _argument("--offline-plan", None, "with --write of a model.tflite: also where each tensor lies "
        "in the arena, for TensorFlow Lite Micro", action="store_true"),
    "out": _argument("--out", "DIR", "where plans and pictures go", default="demo-out"),
    "steps": _argument("--steps", "N", "training steps of each model, at least 5", type=int, default=12),
    "ranks": _argument("--ranks", "N", "of module:factory: one of so many ranks that train the model in shards (or "
        "as torch has made it parallel), all imagined: nothing is run or sent", type=int),
    "estimated ranks": _argument("--ranks", "N", "one of so many ranks, all imagined, among which fully_shard "
        "divides the blocks of the model (or as torch has made it parallel): nothing is run or sent", type=int),
    "rank": _argument("--rank", "R", "which of --ranks (default: 0)", type=int),
    "shape": _argument("--shape", "NAME=N,…", "of a model.onnx or a graph.pb: sizes of symbolic dimensions, such as "
        "batch=4,seq=128, or of a value, such as x=1x3x224x224", action="append"),
    "fetch": _argument("--fetch", "NAME,…", "of a graph.pb: nodes that are run; what they do not need is left out "
        "(default: a MetaGraph's train_op, else all)", action="append"),
    "feed": _argument("--feed", "NAME,…", "of a graph.pb: nodes besides placeholders whose results are given, and "
        "never recomputed", action="append"),
    "views": _argument("--views", None, "of a model.onnx: whether the runtime makes views where it can, or copies "
        "(default: views)", action=_CHOICE),
    "in-place": _argument("--in-place", None, "of a model.onnx: what the runtime writes over an input nobody needs: "
        "as onnxruntime does, all that is elementwise, or none (default: onnxruntime)",
        choices=("onnxruntime", "elementwise", "none")),
}  # fmt: skip
"""Every argument of every verb; those that differ between verbs by more than their place stand here twice."""

_MODEL = ("ranks", "rank", "shape", "fetch", "feed", "views", "in-place")


@dataclass(frozen=True)
class _Verb:
    """A verb: what it does, what runs it, its arguments by name, and the dataclass of its planner's options. Both are
    named as ``module:name``, and imported when the verb is there to be parsed."""

    summary: str
    run: str
    arguments: Sequence[str] = ()
    options: str | None = None


def _named(text: str) -> Any:
    module, _, name = text.partition(":")
    return getattr(import_module(f"tightship.{module}"), name)


_PLAN = (
    "source",
    "budget",
    "planner",
    "max-batch",
    "batch-dim",
    "output",
    "picture",
    "report",
    "what-if",
    "arena header",
    "bank",
    "trace",
    "snapshot",
)
_OPTIONS = "planners.default:Options"
_VERBS = {
    "demo": _Verb(
        "train real models within a budget and show what happened", "cli.verbs:demo", ("out", "steps")
    ),
    "plan": _Verb(
        "decide what to keep, recompute and move, and where every byte lies",
        "cli.plan:plan",
        (*_PLAN, "write", "optimize", "inputs", "copies", "offline plan", *_MODEL),
        _OPTIONS,
    ),
    "frontier": _Verb(
        "time against memory: plans for many budgets, and what other policies come to",
        "cli.plan:frontier",
        ("source", "points", "peers", "picture", "report", *_MODEL),
        _OPTIONS,
    ),
    "explain": _Verb(
        "who makes up the peak, and where it came from",
        "cli.explain:explain",
        ("explained", "explained budget", "why", "alloc-conf", "top", "report", *_MODEL),
        _OPTIONS,
    ),
    "estimate": _Verb(
        "will it fit? what a training loop or a forward pass needs as it is, before anything is allocated",
        "cli.verbs:estimate",
        (
            "factory",
            "fits",
            "device",
            "accumulate",
            "autocast",
            "checkpoint",
            "compiled",
            "remedies",
            "top",
            "estimated ranks",
            "rank",
        ),
    ),
    "diff": _Verb(
        "what two plans do differently, and what each difference costs",
        "cli.explain:diff",
        ("one", "two", "top", "report"),
    ),
    "pack": _Verb(
        "placement alone: give every buffer of a CSV file its offset",
        "cli.pack:pack",
        (
            "problem",
            "capacity",
            "pool",
            "heap",
            "bank",
            "packed output",
            "placement",
            "baseline",
            "picture",
            "report",
            "arena header",
        ),
        "planners.packing:Search",
    ),
    "verify": _Verb(
        "exit 0 only if nothing is wrong; say what is wrong and where",
        "cli.verbs:verify",
        ("plan|packed", "capacity", "pool", "bank", "heap", "checked source", *_MODEL),
    ),
    "assign": _Verb(
        "aliasing, liveness and buffer assignment of a scheduled HLO module",
        "cli.hlo:assign",
        ("module", "assignment", "order", "write", "report"),
        "hlo.assign.tight:Options",
    ),
    "planners": _Verb("what planners there are, one line each", "cli.verbs:planners"),
}


class Usage(TightshipError):
    """Arguments that the command line does not know."""


class _Parser(argparse.ArgumentParser):
    def _print_message(self, message: str, file: Any = None) -> None:
        """Help, which argparse does not say that it could not print."""
        to = file or sys.stderr
        try:
            to.write(message)
            to.flush()
        except BrokenPipeError:
            raise
        except OSError as error:
            raise unwritable(error, "standard output") from error

    def error(self, message: str) -> NoReturn:
        raise Usage(f"{message} (see {self.prog} --help)")


def parser(given: Sequence[str] = ()) -> argparse.ArgumentParser:
    """All verbs and their options; a planner's options come from its own dataclass: that of ``plan --planner NAME``,
    where ``given`` has it. Only the verb of a command that was ``given`` has its arguments."""
    verbs = [word for word in given if not word.startswith("-")][:1] if given else [*_VERBS]
    top = _Parser(prog="tightship", description="Fits a neural network's work into the memory there is.")
    top.epilog = _EPILOG
    version = f"tightship {tightship.__version__}" if not given or "--version" in given else ""
    top.add_argument("--version", action="version", version=version)
    actions = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, verb in _VERBS.items():
        added = actions.add_parser(
            name, help=verb.summary, description=f"{name}: {verb.summary}.", epilog=_EPILOG
        )
        added.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        added.add_argument(
            "--quiet", "-q", action="store_true", help="no progress, and errors alone for people"
        )
        added.add_argument("--debug", action="store_true", help="show where an error was raised")
        if name not in verbs:
            continue
        for argument in verb.arguments:
            names, how = _ARGUMENTS[argument]
            asked = {k: v() if isinstance(v, FunctionType) else v for k, v in how.items()}
            added.add_argument(*names, **asked)
        options = None if verb.options is None else _named(verb.options)
        if name == "plan":
            options = _named_options(given) or options
        if options is not None:
            add_options(added, options)
        added.set_defaults(run=_named(verb.run), options=options)
    return top


def _named_options(given: Sequence[str]) -> type[Any] | None:
    """The options of the planner that ``plan --planner`` names in what was given, if it has its own."""
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    known.add_argument("--planner")
    try:
        name = known.parse_known_args(list(given))[0].planner if "plan" in given else None
    except argparse.ArgumentError:
        name = None  # the parser itself says what is wrong
    if not name:
        return None
    from tightship.api import systems

    system = systems().get(name)
    return None if system is None else system.options


@contextmanager
def _rarely_collected(*, last: bool) -> Iterator[None]:
    """Graphs are millions of objects without cycles: looking for some again and again took a fifth of the time.
    Not where models are trained and measured: what lies in cycles there is memory. ``last``: the interpreter ends
    with the command, and need not look through it all once more."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 30, 100)
    try:
        yield
    finally:
        if last:
            gc.freeze()
        gc.set_threshold(*before)


@contextmanager
def _one_blas_thread() -> Iterator[None]:
    """Nothing of ours multiplies matrices, and OpenBLAS's threads, which start with NumPy and wait for some, took a
    fifth of a short command's time. Other programs that are started get none of it."""
    name = "OPENBLAS_NUM_THREADS"
    if name in os.environ:
        yield
        return
    os.environ[name] = "1"
    try:
        yield
    finally:
        os.environ.pop(name, None)


class _Signals:
    """While a command runs by itself, signals that tell a process to end do it as Ctrl-C does: nothing is left
    behind. ``number`` is the one that came, 0 if none did. Those that somebody ignores (``nohup``) or handles are
    left alone."""

    def __init__(self) -> None:
        self.number, self._process = 0, os.getpid()

    def heed(self) -> None:
        """From now on, until the process ends."""
        if threading.current_thread() is not threading.main_thread():
            return
        for name in ("SIGTERM", "SIGHUP"):
            number = getattr(signal, name, None)  # Windows has one of them
            if number is not None and signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, self._told)

    def over(self) -> None:
        """The command is done, and Python looks after its own: a signal now ends the process, without a traceback of
        whatever of others runs at exit."""
        if threading.current_thread() is not threading.main_thread():
            return
        for number in (getattr(signal, name, None) for name in ("SIGINT", "SIGTERM", "SIGHUP")):
            if number is not None and signal.getsignal(number) in (self._told, signal.default_int_handler):
                signal.signal(number, signal.SIG_DFL)

    def _told(self, number: int, _: FrameType | None) -> None:
        if os.getpid() != self._process:  # one that a model of the user's has forked
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
            return
        self.number = number
        raise KeyboardInterrupt

    def status(self, status: int) -> int:
        """The exit status, as shells have it for signals."""
        return 128 + self.number if self.number and status == INTERRUPTED else status


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    runs_model = given[:1] == ["demo"] or any(":" in word for word in given)  # whose matrices are others'
    alone = argv is None and not runs_model
    collected = nullcontext() if given[:1] == ["demo"] else _rarely_collected(last=alone)
    threads = _one_blas_thread() if alone else nullcontext()
    with (
        collected,
        threads,
        Output(as_json="--json" in given, quiet=not {"--quiet", "-q"}.isdisjoint(given)) as out,
    ):
        signals = _Signals()
        status = signals.status(_status(given, out, signals, heeded=argv is None))
    if argv is None:
        signals.over()
    return status


def _status(given: list[str], out: Output, signals: _Signals, *, heeded: bool) -> int:
    try:
        if heeded:
            signals.heed()
        chosen, unknown = parser(given).parse_known_args(given)
        if unknown:
            fault = f"unrecognized arguments: {' '.join(unknown)}"
            raise Usage(f"{fault} (see tightship {chosen.verb} --help)")
        chosen.command = shlex.join(["tightship", *given])
        status: int = chosen.run(chosen, out)
        return status
    except (KeyboardInterrupt, Exception) as error:
        if signals.number or _is_interrupt(error):
            out.interrupted("terminated" if signals.number else "interrupted")
            return INTERRUPTED
        return _failed(error, given, out)
    except SystemExit as done:  # --help and --version
        return done.code if isinstance(done.code, int) else 0


def _is_interrupt(error: BaseException | None) -> bool:
    """Whether a signal ended it: modules of C++ say that they cannot be imported when one comes meanwhile."""
    while error is not None and not isinstance(error, KeyboardInterrupt):
        error = error.__cause__
    return error is not None


def _failed(error: BaseException, given: list[str], out: Output) -> int:
    """What is said of an error, and the exit status."""
    debug = "--debug" in given
    if isinstance(error, TightshipError):
        out.failed(error, debug=debug)
        return error.exit_status
    if isinstance(error, BrokenPipeError):
        out.closed()
        return 1
    if isinstance(error, OSError) and error.errno in _OF_THE_SYSTEM:
        out.failed(unwritable(error, str(error.filename or "a file")), debug=debug)
        return BadInput.exit_status
    out.failed(InternalError(error), debug=debug)
    return InternalError.exit_status


_OF_THE_SYSTEM = {
    getattr(errno, n, None)
    for n in ("ENOSPC", "EDQUOT", "EIO", "EROFS", "EACCES", "EPERM", "EMFILE", "ENFILE")
} - {None}
"""What a system says of its disks and limits, wherever it is noticed."""
