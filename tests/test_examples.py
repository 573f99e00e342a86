"""Every example runs as its first lines say, in an empty folder, and says what is missing where something is."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"
NEEDS = {"training": ("torch",), "jax_program": ("jax",), "onnx_device": ("onnx", "onnxruntime")}
SAYS = {
    "training": "losses equal to the bit",
    "jax_program": "jax.checkpoint of its body",
    "onnx_device": "the same results to the bit",
    "compiler_placement": "optimal: True",
}


def ran(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py")]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True)


def test_every_example_is_known():
    assert {f.stem for f in EXAMPLES.glob("*.py")} == set(SAYS)


def test_placement_runs(tmp_path):
    done = ran("compiler_placement", tmp_path)
    assert done.returncode == 0, done.stderr
    assert SAYS["compiler_placement"] in done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(NEEDS))
def test_an_example_runs(name, tmp_path):
    for module in NEEDS[name]:
        pytest.importorskip(module)
    done = ran(name, tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    assert SAYS[name] in done.stdout
