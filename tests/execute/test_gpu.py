"""On a CUDA device: what people train, with eager's bits and the bytes that were planned.

Each program has a process of its own: PyTorch takes another CUDA allocator only as its first. It prints one line of
JSON. Kernels that add in no fixed order (flash attention's backward pass, some convolutions) give eager other bits
each time; there bits are compared under ``torch.use_deterministic_algorithms`` alone, bytes in both.
"""

import functools
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support import dry_cuda  # noqa: E402

ON_DRY = "TIGHTSHIP_DRY" in os.environ
"""A runtime that computes nothing runs the programs: only their bytes mean something (`support.dry_cuda`)."""

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available() and not ON_DRY, reason="no CUDA device"),
]

HEAD = """
import copy, json, os, sys, warnings
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import torch
from tightship.execute import allocator
from tightship.execute.allocator import Meter
allocator.load("cuda")
import tightship
import transformers
transformers.logging.set_verbosity_error()
warnings.simplefilter("ignore")
if DETERMINISTIC:
    torch.use_deterministic_algorithms(True, warn_only=True)
TEXT = dict(hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=256, vocab_size=512)

def tokens(number):
    made = torch.randint(0, 512, (8, 128), generator=torch.Generator().manual_seed(number)).cuda()
    return {"input_ids": made, "labels": made}

def pixels(number, size=64):
    g = torch.Generator().manual_seed(number)
    return {
        "pixel_values": torch.randn(8, 3, size, size, generator=g).cuda(),
        "labels": torch.randint(0, 10, (8,), generator=g).cuda(),
    }

class Recurrent(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(512, 64)
        self.cells = torch.nn.LSTM(64, 64, num_layers=2, dropout=0.1, batch_first=True)
        self.head = torch.nn.Linear(64, 512)

    def forward(self, input_ids, labels):
        found = self.head(self.cells(self.embed(input_ids))[0])
        return {"loss": torch.nn.functional.cross_entropy(found.flatten(0, 1), labels.flatten())}

class Convolutions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        n = torch.nn
        rows = [n.Conv2d(3, 32, 3, padding=1), n.BatchNorm2d(32), n.ReLU(), n.MaxPool2d(2)]
        for _ in range(4):
            rows += [n.Conv2d(32, 32, 3, padding=1, groups=4), n.GroupNorm(8, 32), n.SiLU(), n.Dropout(0.1)]
        self.body = n.Sequential(*rows, n.AdaptiveAvgPool2d(4), n.Flatten(), n.Linear(512, 10))

    def forward(self, pixel_values, labels):
        return {"loss": torch.nn.functional.cross_entropy(self.body(pixel_values), labels)}

def made(name):
    torch.manual_seed(0)
    t = transformers
    if name.startswith("gpt"):
        kind = {"attn_implementation": "eager"} if name == "gpt-eager" else {}
        config = t.GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=512, n_positions=128, **kind)
        model = t.GPT2LMHeadModel(config)
    elif name == "bert":
        model = t.BertForMaskedLM(t.BertConfig(**TEXT))
    elif name == "llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(**TEXT, num_key_value_heads=2))
    elif name == "t5":
        model = t.T5ForConditionalGeneration(t.T5Config(
            vocab_size=512, d_model=128, d_kv=32, d_ff=256, num_layers=3, num_heads=4, decoder_start_token_id=0))
    elif name == "vit":
        model = t.ViTForImageClassification(t.ViTConfig(**{k: v for k, v in TEXT.items() if k != "vocab_size"},
            image_size=64, patch_size=8, num_labels=10))
    elif name == "resnet":
        model = t.ResNetForImageClassification(t.ResNetConfig(
            num_labels=10, depths=[2, 2], hidden_sizes=[64, 128], embedding_size=32))
    elif name == "convnext":
        model = t.ConvNextForImageClassification(t.ConvNextConfig(
            num_labels=10, depths=[1, 1, 2, 1], hidden_sizes=[32, 64, 96, 128], image_size=64))
    else:
        model = {"lstm": Recurrent, "cnn": Convolutions}[name]()
    return model.cuda().train()

def sample(name, number):
    return pixels(number) if name in ("vit", "resnet", "convnext", "cnn") else tokens(number)

def loss_of(model, batch):
    with torch.autocast("cuda", HALF, enabled=HALF is not None):
        return model(**batch)["loss"]

def trained(model, optimizer, name, scaler=None, count=4):
    losses = []
    for number in range(count):
        torch.manual_seed(number)
        loss = loss_of(model, sample(name, number))
        if scaler:
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        else:
            loss.backward()
            optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach().clone())
    return losses, list(model.state_dict().values())

def same(one, other):
    return all(map(torch.equal, one[0], other[0])) and all(map(torch.equal, one[1], other[1]))
"""

TRAIN = """
how = eval("lambda p: " + OPTIMIZER, {"torch": torch})
model = made(NAME)
optimizer = how(model.parameters())
scaler = torch.amp.GradScaler("cuda") if SCALED else None
options = {"scaler": scaler} if SCALED else {}
options |= {"strict": True, "allow": ALLOW, "cache": None, "seconds": 5.0}
step = tightship.fit(model, loss_of, optimizer, sample(NAME, 0), budget=BUDGET, **options)
losses, rows = [], []
for number in range(4):
    torch.manual_seed(number)
    losses.append(step(sample(NAME, number)).detach().clone())
    rows.append((step.last.as_planned, step.last.misses, step.last.measured_peak))
ours = losses, list(model.state_dict().values())
eager = []
for _ in range(2):
    twin = made(NAME)
    eager.append(trained(twin, how(twin.parameters()), NAME, torch.amp.GradScaler("cuda") if SCALED else None))
print(json.dumps({
    "planned": step.plan.peak, "before": step.plan.peak_before, "rows": rows,
    "kinds": sorted({s.kind for s in step.plan.steps}), "notes": list(step.notes), "same": same(ours, eager[0]),
    "eager": same(*eager), "losses": [float(x) for x in losses], "eager losses": [float(x) for x in eager[0][0]],
}))
"""


@functools.cache
def _dry():
    return dry_cuda.build(Path(tempfile.mkdtemp()))


def run(text, **values):
    constants = {"HALF": None, "DETERMINISTIC": False, "SCALED": False, **values}
    lines = [f"{k} = {v if k == 'HALF' else repr(v)}" for k, v in constants.items()]
    program = "\n".join(["import torch", *lines, HEAD, text])
    environment = dict(os.environ)
    if ON_DRY:
        environment |= _dry()
        program = f"{dry_cuda.BEFORE}\nimport torch\ntorch.backends.cudnn.enabled = False\n{program}"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout.splitlines()[-1])


def holds(found, deterministic):
    rows = found["rows"]
    assert all(r[0] and r[1] == 0 for r in rows), found
    assert all(r[2] == found["planned"] for r in rows[1:]), (
        found
    )  # the first step makes the optimizer's state
    if ON_DRY:
        return
    assert found["same"] or not (found["eager"] or deterministic), found


ADAMW = "torch.optim.AdamW(p, lr=1e-3)"
FUSED = "torch.optim.AdamW(p, lr=1e-3, fused=True)"
NAMES = ("gpt", "gpt-eager", "bert", "llama", "t5", "vit", "resnet", "convnext", "cnn")


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_model_trains_as_in_eager_within_its_budget(name, deterministic):
    found = run(
        TRAIN, NAME=name, OPTIMIZER=ADAMW, BUDGET="85%", ALLOW="recompute", DETERMINISTIC=deterministic
    )
    holds(found, deterministic)
    assert found["planned"] < found["before"]


def test_recurrent_nets_without_cudnn():
    """With it they are refused in words."""
    values = {
        "NAME": "lstm",
        "OPTIMIZER": ADAMW,
        "BUDGET": "90%",
        "ALLOW": "recompute",
        "DETERMINISTIC": True,
    }
    if not ON_DRY:
        refused = run("try:\n" + textwrap.indent(TRAIN, "    ") + """
except tightship.Unsupported as error:
    print(json.dumps({"refused": str(error)}))
""", **values)  # fmt: skip
        assert "cuDNN" in refused["refused"], refused
    holds(run("torch.backends.cudnn.enabled = False\n" + TRAIN, **values), True)


@pytest.mark.parametrize("name", ["gpt", "bert", "llama", "resnet"])
def test_the_same_in_bfloat16_with_a_fused_optimizer(name):
    half = "torch.bfloat16"
    holds(
        run(
            TRAIN, NAME=name, OPTIMIZER=FUSED, BUDGET="85%", ALLOW="recompute", HALF=half, DETERMINISTIC=True
        ),
        True,
    )


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_the_same_in_float16_with_a_scaler(name):
    found = run(
        TRAIN, NAME=name, OPTIMIZER=ADAMW, BUDGET="100%", ALLOW="recompute", HALF="torch.float16", SCALED=True,
        DETERMINISTIC=True,
    )  # fmt: skip
    holds(found, True)


@pytest.mark.parametrize("optimizer", [
    "torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True)", "torch.optim.Adam(p, foreach=False)",
    "torch.optim.Adam(p, capturable=True)", "torch.optim.Adafactor(p)", "torch.optim.RMSprop(p)",
])  # fmt: skip
def test_optimizers(optimizer):
    holds(
        run(TRAIN, NAME="llama", OPTIMIZER=optimizer, BUDGET="90%", ALLOW="recompute", DETERMINISTIC=True),
        True,
    )


@pytest.mark.parametrize("allow", ["offload", "compress", "recompute,redraw,compress,offload"])
@pytest.mark.parametrize("name", ["gpt", "bert", "resnet"])
def test_what_leaves_the_device_comes_back_as_it_was(name, allow):
    if ON_DRY and "compress" in allow:
        pytest.skip("masks that nothing computes hold anything")
    found = run(TRAIN, NAME=name, OPTIMIZER=ADAMW, BUDGET="99%" if allow == "compress" else "80%", ALLOW=allow,
                DETERMINISTIC=True)  # fmt: skip
    holds(found, True)


BACKEND = """
from tightship.integrations import torch_partition
pieces, build = [], torch_partition.PlannedGraph._build
torch_partition.PlannedGraph._build = lambda self, *args: (pieces.append(self), build(self, *args))[1]
model, twin = made(NAME), made(NAME)
one, other = torch.optim.AdamW(model.parameters()), torch.optim.AdamW(twin.parameters())
compiled = torch.compile(model, backend="tightship", options={"budget": "90%", "strict": True})
ours, rows = trained(compiled, one, NAME), []
rows = [[p.last.as_planned, p.last.misses] for p in pieces]
plain = torch.compile(twin, backend="eager")  # models ask whether they are compiled, and then take other kernels
print(json.dumps({"same": same(ours, trained(plain, other, NAME)), "rows": rows}))
"""


@pytest.mark.parametrize("name", ["bert", "llama", "resnet"])
def test_the_backend(name):
    found = run(BACKEND, NAME=name, DETERMINISTIC=True)
    assert found["rows"] and all(r[0] and r[1] == 0 for r in found["rows"]), found
    assert ON_DRY or found["same"], found


INFER = """
model = made(NAME).eval()
batch = {k: v for k, v in sample(NAME, 0).items()}
run = tightship.infer(model, batch)
rows, equal = [], True
for number in range(3):
    batch = sample(NAME, number)
    with torch.no_grad():
        expected = model(**batch)["logits"].clone()
    got = run(**batch)["logits"]
    equal = equal and torch.equal(expected, got)
    rows.append([run.last.peak_as_planned, run.last.misses])
print(json.dumps({"same": equal, "rows": rows}))
"""


@pytest.mark.parametrize("name", ["bert", "vit", "resnet"])
def test_inference(name):
    found = run(INFER, NAME=name, DETERMINISTIC=True)
    assert all(r[0] and r[1] == 0 for r in found["rows"]), found
    assert ON_DRY or found["same"], found


TRAINER = """
import contextlib, io, tempfile
from tightship.integrations.huggingface import Tightship
class Data(torch.utils.data.Dataset):
    def __len__(self): return 32
    def __getitem__(self, k):
        row = torch.randint(0, 512, (64,), generator=torch.Generator().manual_seed(k))
        return {"input_ids": row, "labels": row}
def run_(callback):
    model = made("gpt")
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        args = transformers.TrainingArguments(folder, per_device_train_batch_size=8, max_steps=4, report_to=[],
            bf16=True, save_strategy="no", disable_tqdm=True, dataloader_pin_memory=True, seed=0,
            torch_compile=callback is None, torch_compile_backend=None if callback else "eager")
        transformers.Trainer(model, args, train_dataset=Data(), callbacks=[callback] if callback else []).train()
    return list(model.state_dict().values())
callback = Tightship("100%")
ours, eager = run_(callback), run_(None)
print(json.dumps({"same": all(map(torch.equal, ours, eager))}))
"""


def test_huggingfaces_trainer():
    pytest.importorskip("accelerate")
    found = run(TRAINER, DETERMINISTIC=True)
    assert ON_DRY or found["same"], found


THREADS = """
import threading
model, twin = made("gpt"), made("gpt")
one, other = torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.SGD(twin.parameters(), lr=0.1)
step = tightship.fit(model, loss_of, one, sample("gpt", 0), budget="85%", strict=True, cache=None, seconds=5.0)
rows = []
def go(number):
    torch.manual_seed(number)
    step(sample("gpt", number))
    torch.cuda.synchronize()
    rows.append([step.last.as_planned, step.last.misses])
go(0)
stream = torch.cuda.Stream()
stream.wait_stream(torch.cuda.current_stream())
with torch.cuda.stream(stream):
    go(1)
torch.cuda.current_stream().wait_stream(stream)
thread = threading.Thread(target=go, args=(2,))
thread.start(), thread.join()
go(3)
expected = trained(twin, other, "gpt")
print(json.dumps({"rows": rows, "same": all(map(torch.equal, model.state_dict().values(), expected[1]))}))
"""


def test_another_stream_and_another_thread():
    found = run(THREADS, DETERMINISTIC=True)
    assert len(found["rows"]) == 4 and all(r[0] and r[1] == 0 for r in found["rows"]), found
    assert ON_DRY or found["same"], found


LARGE = """
model = made("gpt")
optimizer = torch.optim.AdamW(model.parameters())
try:
    tightship.fit(model, loss_of, optimizer, sample("gpt", 0), budget="1MiB", cache=None, seconds=5.0)
except tightship.Infeasible as error:
    refused = str(error)
step = tightship.fit(model, loss_of, optimizer, sample("gpt", 0), budget="85%", strict=True, cache=None, seconds=5.0)
step(sample("gpt", 0))
try:
    torch.empty(1 << 50, dtype=torch.uint8, device="cuda")
except RuntimeError as error:
    full = str(error)
step(sample("gpt", 1))
print(json.dumps({"refused": refused, "full": full, "rows": [[step.last.as_planned, step.last.misses]]}))
"""


def test_a_full_device_is_an_error_and_not_the_end():
    found = run(LARGE)
    assert "1.00 MiB" in found["refused"] and "out of memory" in found["full"], found
    assert found["rows"][0][0], found
