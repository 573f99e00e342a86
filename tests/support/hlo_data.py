"""The modules in tests/data/hlo and what XLA said of them."""

import lzma
from functools import cache
from pathlib import Path

from tightship.hlo import Module, parse

FOLDER = Path(__file__).parents[1] / "data" / "hlo"
CPU = ("cpu_cnn", "cpu_control", "cpu_lstm", "cpu_mlp", "cpu_tx_scan")
GPU = ("gpu_cnn_30000000", "gpu_mlp_35000000", "gpu_tx_unroll_250000000")
FINAL = "after_optimizations"
BEFORE = "0001.remat-pipeline.after_pipeline-start.before_rematerialization"
AFTER = "0002.remat-pipeline.after_rematerialization.before_stream-attribute-annotator"


def text(name: str, part: str = FINAL) -> str:
    """A file of a module: ``after_optimizations``, with ``-live-range`` … behind it, or one of ``000*``."""
    prefix = "" if part.startswith("000") else "cpu_" if name.startswith("cpu") else "sm_8.0_gpu_"
    return lzma.decompress((FOLDER / name / f"{prefix}{part}.txt.xz").read_bytes()).decode()


@cache
def module(name: str, part: str = FINAL) -> Module:
    return parse(text(name, part), f"{name}.txt")


def log(name: str) -> str:
    """What XLA's rematerialization reported."""
    return lzma.decompress((FOLDER / name / "remat_log.txt.xz").read_bytes()).decode()
