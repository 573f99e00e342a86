"""The nodes that Grappler recomputes, by TensorFlow's own (tf_optimizer.OptimizeGraph) and by this project.

    python benchmarks/grappler.py [--write]

Needs TensorFlow. Training graphs of tests/tensorflow_models.py, at the levels "recompute" and "manual"; says of each
how many nodes are recomputed, and whether names, triggers and inputs are the same. ``--write`` puts the table into
docs/tensorflow.md, and what TensorFlow did into tests/data/grappler, where the tests compare with it without
TensorFlow.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import pages

from tightship.baselines.grappler_nodes import CLONE, TRIGGER, recomputed
from tightship.frontends.tensorflow.nodes import Node, to_rows

ROOT = Path(__file__).resolve().parent.parent
DATA = ROOT / "tests" / "data" / "grappler"
PAGE = ROOT / "docs" / "tensorflow.md"
BEGIN, END = "<!-- grappler: begin -->", "<!-- grappler: end -->"
HEAD = ("model", "nodes", "level", "recomputed by TensorFlow", "by tightship", "triggers and inputs")
LEVELS = {"recompute": "RECOMPUTATION_HEURISTICS", "manual": "MANUAL"}


def nodes_of(proto: Any) -> list[Node]:
    return [Node(n.name, n.op, tuple(n.input), n.device, "_recompute_hint" in n.attr) for n in proto.node]


def compared(name: str) -> tuple[list[list[str]], dict[str, Any]]:
    """The rows of a model, and what TensorFlow did with it."""
    from support.tensorflow_models import MODELS, grappler

    proto, fetch = MODELS[name]()
    nodes = nodes_of(proto)
    inputs = {n.name: n.inputs for n in nodes}
    rows, record = [], {"nodes": to_rows(nodes), "fetch": list(fetch), "levels": {}}
    for level, theirs in LEVELS.items():
        after = nodes_of(grappler(proto, fetch, theirs))
        changed = {n.name: list(n.inputs) for n in after if inputs.get(n.name) != n.inputs}
        mine = recomputed(nodes, heuristic=level != "manual")
        ours = {n.name: n.inputs for n in mine.added} | dict(mine.inputs)
        count = [sum(n.startswith(CLONE) for n in found) for found in (changed, ours)]
        same = {n: sorted(i) for n, i in changed.items()} == {n: sorted(i) for n, i in ours.items()}
        triggers = sum(n.startswith(TRIGGER) for n in changed)
        verdict = f"the same ({triggers} triggers)" if same else "DIFFER"
        rows.append([name, str(len(nodes)), level, str(count[0]), str(count[1]), verdict])
        record["levels"][level] = changed
    return rows, record


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="write the table and the recorded comparison")
    chosen = parser.parse_args()
    sys.path.insert(0, str(ROOT / "tests"))
    import tensorflow as tf

    from support.tensorflow_models import MODELS

    rows = []
    for name in MODELS:
        found, record = compared(name)
        rows += found
        if chosen.write:
            DATA.mkdir(parents=True, exist_ok=True)
            text = json.dumps({"tensorflow": tf.__version__} | record, separators=(",", ":"))
            (DATA / f"{name}.json").write_text(text + "\n")
    marks = ("---", "---:", "---", "---:", "---:", "---")
    table = pages.table(HEAD, marks, rows)
    print(table)
    if chosen.write:
        pages.put(PAGE, BEGIN, END, table)


if __name__ == "__main__":
    main()
