"""Files that a coverage-guided fuzzer makes, read by the command line: what the campaign's class ``files`` does at
random (``benchmarks/soak.py``), led by which lines of tightship a file reaches.

    python benchmarks/fuzz.py KIND [OPTION OF LIBFUZZER ...]

Needs ``atheris`` (``make fuzz`` installs it beside the environment). Every other change is one of the file's
structure (``tests/support/hostile.py``). What reaches something new is kept in ``build/fuzz/KIND``, and the next run
goes on from there; the first finding ends the run and lies beside it.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import zlib
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
ROOT = Path("build/fuzz")
OPTIONS = ("-timeout=10", "-rss_limit_mb=2048", "-max_len=65536", "-print_final_stats=1")


class Sources(MetaPathFinder):
    """Modules that an editable install finds, as modules of their files: what atheris can follow."""

    def find_spec(self, name: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if name.split(".")[0] != "tightship":
            return None
        others = (finder for finder in sys.meta_path if type(finder).__name__ == "ScikitBuildInplaceFinder")
        spec = next(others, PathFinder).find_spec(name, path, target)
        if spec is None or not (spec.origin or "").endswith(".py"):
            return spec
        folders = spec.submodule_search_locations
        return spec_from_file_location(name, spec.origin, submodule_search_locations=folders)


def main() -> None:
    given = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    given.add_argument("kind", help="of a file, by tests/support/hostile.py: graph, plan, module, …")
    chosen, more = given.parse_known_args()

    import atheris

    os.environ["TIGHTSHIP_CACHE"] = "off"
    sys.meta_path.insert(0, Sources())
    with atheris.instrument_imports(include=["tightship"]):
        import soak

        from support.hostile import FORMATS, changed

        kind = chosen.kind
        kinds = [kind for kind in FORMATS if soak.VERBS[kind][0][0] != "fit"]
        if kind not in kinds:
            given.error(f"unknown kind {kind!r}: expected one of {', '.join(kinds)}")
        ending, make, _ = FORMATS[kind]
        corpus = ROOT / kind
        corpus.mkdir(parents=True, exist_ok=True)
        for k, verb in itertools.product(range(7), soak.VERBS[kind]):
            (corpus / f"valid-{k}").write_bytes(make(k))
            soak.read(kind, _quick(verb), f"{kind}{ending}", make(k), [])  # imports what reads it

    def one(data: bytes) -> None:
        verbs = soak.VERBS[kind]
        verb = _quick(verbs[zlib.crc32(data) % len(verbs)])
        case = soak.read(kind, verb, f"{kind}{ending}", data, [])
        assert not case.fault, case.fault

    def mutated(data: bytes, most: int, seed: int) -> bytes:
        if seed % 2:
            made: bytes = atheris.Mutate(data, most)
            return made
        return changed(kind, data, seed, 1)[:most]

    options = [*OPTIONS, f"-artifact_prefix={corpus}-", *more, str(corpus)]
    atheris.Setup([sys.argv[0], *options], one, custom_mutator=mutated)
    atheris.Fuzz()


def _quick(verb: list[str]) -> list[str]:
    """The same with less to search: it is the reading that counts."""
    return ["100" if before == "--work" else word for before, word in zip(["", *verb], verb, strict=False)]


if __name__ == "__main__":
    main()
