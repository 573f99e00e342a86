"""The command line: ``tightship VERB …``. See ``tightship --help``.

Exit status: 0 done, 1 not achievable (infeasible, not verified), 2 bad input or usage, 130 interrupted. With
``--json`` a verb prints one JSON object on standard output, also when it fails, and nothing else there.
"""

from __future__ import annotations

import argparse
import gc
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import NoReturn

import tightship
from tightship import api
from tightship.cli import hlo, pack, verbs
from tightship.cli.options import add_model, add_options
from tightship.cli.output import Output
from tightship.errors import TightshipError

__all__ = ["Usage", "main", "parser"]

_EPILOG = "exit status: 0 done, 1 infeasible or not verified, 2 bad input or usage, 130 interrupted"
_SOURCE = (
    "module:factory (found from the current folder; factory() returns (model, sample), (model, loss_fn, sample) or "
    "(model, loss_fn, optimizer, sample)), model.onnx, a graph.pb of TensorFlow's, a module.txt of HLO, or a "
    "graph.json or plan.json of tightship's"
)
_BUDGET = (
    "bytes with a unit (6GiB, 512MB), a percentage of the unplanned peak (60%%), or static+60%%: the static set and "
    "that share of what the unplanned step needs beyond it"
)
_REPORT = "write one HTML page that shows everything, offline"


class Usage(TightshipError):
    """Arguments that the command line does not know."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise Usage(f"{message} (see {self.prog} --help)")


def parser(given: Sequence[str] = ()) -> argparse.ArgumentParser:
    """All verbs and their options; a planner's options come from its own dataclass: that of ``plan --planner NAME``,
    where ``given`` has it."""
    top = _Parser(prog="tightship", description="Fits a neural network's work into the memory there is.")
    top.epilog = _EPILOG
    top.add_argument("--version", action="version", version=f"tightship {tightship.__version__}")
    actions = top.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name, (add, summary) in _VERBS.items():
        verb = actions.add_parser(name, help=summary, description=f"{name}: {summary}.", epilog=_EPILOG)
        verb.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
        verb.add_argument(
            "--quiet", "-q", action="store_true", help="no progress, and errors alone for people"
        )
        add(verb)
        if name == "plan":
            _add_planner(verb, given)
    return top


def _add_planner(verb: argparse.ArgumentParser, given: Sequence[str]) -> None:
    """The option ``--planner`` and the options of the planner that it names in what was given."""
    known = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    text = "one planner instead of the search, with options of its own: memonger, aitemplate, grappler, …; for a "
    text += "module.txt, who rematerialises it: search or xla (default: search)"
    for either in (verb, known):
        either.add_argument("--planner", metavar="NAME", default=None, help=text)
    try:
        name = known.parse_known_args(list(given))[0].planner if "plan" in given else None
    except argparse.ArgumentError:
        name = None  # the parser itself says what is wrong
    from tightship.planners.default import Options

    system = api.systems().get(name or "")
    options = Options if system is None else system.options
    add_options(verb, options)
    verb.set_defaults(run=verbs.plan, options=options)


def _add_demo(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("--out", metavar="DIR", default="demo-out", help="where plans and pictures go")
    verb.add_argument(
        "--steps", type=int, metavar="N", default=12, help="training steps of each model, at least 5"
    )
    verb.set_defaults(run=verbs.demo)


def _add_plan(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("source", metavar="SOURCE", help=_SOURCE)
    verb.add_argument("--budget", "-b", metavar="B", help=f"{_BUDGET}; none: keep everything")
    verb.add_argument("--output", "-o", metavar="FILE", help="write the plan as JSON")
    verb.add_argument(
        "--max-batch", action="store_true", help="find the largest batch that fits the budget, and its plan"
    )
    text = "which dimension of the sample's tensors is the batch, from 0 (with --max-batch; default: 0)"
    verb.add_argument("--batch-dim", type=int, metavar="N", help=text)
    verb.add_argument("--picture", metavar="FILE", help="draw memory over the step as SVG")
    verb.add_argument("--report", metavar="FILE", help=_REPORT)
    verb.add_argument("--trace", metavar="FILE", help="write a Chrome trace for Perfetto (.gz: compressed)")
    verb.add_argument("--snapshot", metavar="FILE", help="write a memory snapshot for PyTorch's viewers")
    verb.add_argument(
        "--write", metavar="FILE", help="write the model, graph or module as planned: order, clones"
    )
    text = (
        "how --write copies out in a graph.pb: copy (ops that GPUs have) or identity (to the host's device)"
    )
    verb.add_argument("--copies", choices=("copy", "identity"), help=f"{text} (default: copy)")
    add_model(verb)


def _add_frontier(verb: argparse.ArgumentParser) -> None:
    from tightship.planners.default import Options

    verb.add_argument("source", metavar="SOURCE", help=_SOURCE)
    verb.add_argument("--report", metavar="FILE", help=_REPORT)
    text = "budgets to plan for, all of them together in --seconds (default: 9)"
    verb.add_argument("--points", type=int, metavar="N", default=9, help=text)
    verb.add_argument("--svg", "--picture", dest="picture", metavar="FILE", help="draw it as SVG")
    text = "compare with others: checkpoints around blocks, PyTorch's activation_memory_budget, XLA's own way"
    verb.add_argument("--peers", action=argparse.BooleanOptionalAction, default=True, help=text)
    add_model(verb)
    add_options(verb, Options)
    verb.set_defaults(run=verbs.frontier, options=Options)


def _add_explain(verb: argparse.ArgumentParser) -> None:
    from tightship.planners.default import Options

    verb.add_argument("source", metavar="SOURCE|PLAN", help=_SOURCE)
    verb.add_argument("--budget", "-b", metavar="B", help=f"also explain a plan for it: {_BUDGET}")
    verb.add_argument("--top", type=int, metavar="N", default=10, help="rows of each table (default: 10)")
    add_model(verb)
    add_options(verb, Options)
    verb.set_defaults(run=verbs.explain, options=Options)


def _add_pack(verb: argparse.ArgumentParser) -> None:
    from tightship.planners.packing import DEFAULT, Search

    verb.add_argument("problem", metavar="PROBLEM.csv", help="columns id, lower, upper, size; see the docs")
    verb.add_argument("--capacity", "-c", metavar="B", help="bytes, with or without a unit, that have to do")
    _add_pools(verb)
    verb.add_argument("--output", "-o", metavar="FILE", help="write the same rows, each with its offset")
    verb.add_argument("--planner", metavar="NAME", default=DEFAULT, help=f"who places (default: {DEFAULT})")
    verb.add_argument("--baseline", metavar="FILE", help="a packing that the answer is never worse than")
    verb.add_argument("--svg", "--picture", dest="picture", metavar="FILE", help="draw the packing as SVG")
    verb.add_argument("--report", metavar="FILE", help=_REPORT)
    add_options(verb, Search)
    verb.set_defaults(run=pack.pack, options=Search)


def _add_pools(verb: argparse.ArgumentParser) -> None:
    text = "a pool, the first one being tried first, and the bytes it has (may be given several times)"
    verb.add_argument("--pool", action="append", default=[], metavar="NAME[=B]", help=text)
    text = "the most bytes of a heap: of one pool, or where there is only one"
    verb.add_argument("--heap", action="append", default=[], metavar="[NAME=]B", help=text)


def _add_assign(verb: argparse.ArgumentParser) -> None:
    from tightship.hlo.assign.tight import Options

    verb.add_argument("module", metavar="MODULE.txt", help="a scheduled HLO module as text")
    verb.add_argument("--planner", metavar="NAME", default="tight", help="tight (default), or xla: XLA's own")
    verb.add_argument("--order", action="store_true", help="look for another legal schedule that needs less")
    verb.add_argument("--write", metavar="FILE", help="write the module, in the order chosen")
    verb.add_argument("--report", metavar="FILE", help=_REPORT)
    add_options(verb, Options)
    verb.set_defaults(run=hlo.assign, options=Options)


def _add_verify(verb: argparse.ArgumentParser) -> None:
    verb.add_argument("plan", metavar="PLAN|PACKED.csv", help="a plan.json, or what pack wrote")
    verb.add_argument("--capacity", "-c", metavar="B", help="bytes that a packing has to do with")
    _add_pools(verb)
    verb.add_argument(
        "--source", metavar="SOURCE", help="check against this graph, not the one in the plan's file"
    )
    add_model(verb)
    verb.set_defaults(run=verbs.verify)


def _add_planners(verb: argparse.ArgumentParser) -> None:
    verb.set_defaults(run=verbs.planners)


_VERBS = {
    "demo": (_add_demo, "train real models within a budget and show what happened"),
    "plan": (_add_plan, "decide what to keep, recompute and move, and where every byte lies"),
    "frontier": (
        _add_frontier,
        "time against memory: plans for many budgets, and what other policies come to",
    ),
    "explain": (_add_explain, "who makes up the peak, and where it came from"),
    "pack": (_add_pack, "placement alone: give every buffer of a CSV file its offset"),
    "verify": (_add_verify, "exit 0 only if nothing is wrong; say what is wrong and where"),
    "assign": (_add_assign, "aliasing, liveness and buffer assignment of a scheduled HLO module"),
    "planners": (_add_planners, "what planners there are, one line each"),
}


@contextmanager
def _rarely_collected() -> Iterator[None]:
    """Graphs are millions of objects without cycles: looking for some again and again took a fifth of the time.
    Not where models are trained and measured: what lies in cycles there is memory."""
    before = gc.get_threshold()
    gc.set_threshold(200_000, 30, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit status."""
    given = list(sys.argv[1:] if argv is None else argv)
    collected = nullcontext() if given[:1] == ["demo"] else _rarely_collected()
    with collected, Output(as_json="--json" in given, quiet=not {"--quiet", "-q"}.isdisjoint(given)) as out:
        try:
            chosen, unknown = parser(given).parse_known_args(given)
            if unknown:
                said = f"unrecognized arguments: {' '.join(unknown)}"
                raise Usage(f"{said} (see tightship {chosen.verb} --help)")
            chosen.command = shlex.join(["tightship", *given])
            status: int = chosen.run(chosen, out)
            return status
        except Usage as error:
            out.failed(error)
            return 2
        except TightshipError as error:
            out.failed(error)
            return error.exit_status
        except KeyboardInterrupt:
            out.interrupted()
            return pack.INTERRUPTED
        except BrokenPipeError:
            out.closed()
            return 1
        except SystemExit as done:  # --help and --version
            return done.code if isinstance(done.code, int) else 0
