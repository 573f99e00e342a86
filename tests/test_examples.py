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


LOOPS = {
    "classifier": "static+60%", "diffusion": "static+60%", "gan": "static+90%", "lora": "static+60%",
    "nanogpt": "static+60%", "ppo": "static+95%", "speech": "static+80%",
}  # fmt: skip


def ran(name: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(EXAMPLES / f"{name}.py"), *arguments]
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


def test_every_loop_is_known():
    assert {f.stem for f in (EXAMPLES / "loops").glob("*.py")} == set(LOOPS)


@pytest.mark.slow
@pytest.mark.parametrize("name", LOOPS)
def test_a_usual_script_prints_the_same_within_a_budget(name, tmp_path):
    pytest.importorskip("torch")
    eager, ours = ran(f"loops/{name}", tmp_path), ran(f"loops/{name}", tmp_path, LOOPS[name])
    assert eager.returncode == ours.returncode == 0, ours.stderr[-2000:]
    assert eager.stdout == ours.stdout
    peaks = [line.split() for line in ours.stderr.splitlines() if line.startswith("planned peak")]
    assert peaks
    assert all(words[2] == words[5] for words in peaks)


@pytest.mark.parametrize("name", LOOPS)
def test_at_most_five_lines_of_a_usual_script_are_ours(name):
    text = (EXAMPLES / "loops" / f"{name}.py").read_text()
    ours = [
        x
        for x in text.splitlines()
        if x.strip().startswith(("import tightship", "step", "loss = step")) or "= step" in x
    ]
    assert 2 <= len(ours) <= 5, ours
