"""PyTorch's CUDA build on a runtime that computes nothing: every request of a step comes as planned.

Values mean nothing here. What is tested is what torch asks its allocator for, on which devices results are, and that
the arena serves all of it; `test_cuda` tests values where there is a GPU. ``make dry-cuda`` installs such a torch.
"""

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

from support import dry_cuda  # noqa: E402

REASON = dry_cuda.why_not()
pytestmark = [pytest.mark.slow, pytest.mark.skipif(REASON is not None, reason=str(REASON))]

MODELS = """
import warnings, torch, transformers, tightship
warnings.simplefilter("ignore")
transformers.logging.set_verbosity_error()
torch.manual_seed(0)
native = allocator.load("cuda")
text = dict(hidden_size=128, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, vocab_size=500)
x = torch.randint(0, 500, (4, 64)).cuda()

def made(name):
    if name.startswith("gpt"):
        kind = {"attn_implementation": "eager"} if name == "gpt-eager" else {}
        config = transformers.GPT2Config(n_layer=3, n_embd=128, n_head=4, vocab_size=500, n_positions=64, **kind)
        return transformers.GPT2LMHeadModel(config)
    if name == "bert":
        return transformers.BertForMaskedLM(transformers.BertConfig(**text))
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**text))

def loss(model, batch):
    with torch.autocast("cuda", torch.bfloat16, enabled=HALF):
        return model(input_ids=batch, labels=batch).loss
"""
STEP = """
step = tightship.fit(model, loss, optimizer, x, budget=BUDGET, strict=True, cache=CACHE)
for _ in range(3):
    step(x)
    assert step.last.as_planned and step.last.misses == 0, step.last
print(step.plan.count("recompute"), step.last.requests)
"""
RESNET = """
torch.backends.cudnn.enabled = False
config = transformers.ResNetConfig(num_labels=10, depths=[1, 1], hidden_sizes=[32, 64], embedding_size=16)
model = transformers.ResNetForImageClassification(config).cuda().train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
x = {"pixel_values": torch.randn(4, 3, 64, 64).cuda(), "labels": torch.zeros(4, dtype=torch.long).cuda()}
loss = lambda model, batch: model(**batch).loss
"""


@pytest.fixture(scope="module")
def dry(tmp_path_factory):
    return dry_cuda.build(tmp_path_factory.mktemp("dry"))


POOLED = """
torch.backends.cudnn.enabled = False
class Pooled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Conv2d(3, 16, 3), torch.nn.Conv2d(16, 16, 3)

    def forward(self, x):
        for layer in (self.first, self.second):
            x = torch.nn.functional.max_pool2d(torch.nn.functional.dropout(torch.relu(layer(x)), 0.2), 2)
        return x.square().mean()

model = Pooled().cuda()
optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(8, 3, 64, 64).cuda()
loss = lambda model, batch: model(batch)
"""


def program(name, body, *, half=False, budget="85%", cache=None, optimizer="torch.optim.AdamW({}, lr=1e-3)"):
    lines = [f"HALF, BUDGET, CACHE = {half}, {budget!r}, {cache!r}", MODELS]
    if name in ("resnet", "pooled"):
        return "\n".join([*lines, {"resnet": RESNET, "pooled": POOLED}[name], body])
    lines.append(f"model = made({name!r}).cuda().train()")
    lines.append(f"optimizer = {optimizer.format('model.parameters()')}")
    return "\n".join([*lines, body])


@pytest.mark.parametrize("name", ["gpt", "gpt-eager", "bert", "llama", "resnet"])
def test_a_training_step_asks_for_what_was_planned(dry, name):
    recomputed, requests = map(int, dry_cuda.run(dry, program(name, STEP)).split())
    assert recomputed > 0 and requests > 50


def test_the_same_under_autocast_and_with_a_fused_optimizer(dry):
    fused = "torch.optim.AdamW({}, lr=1e-3, fused=True)"
    assert dry_cuda.run(dry, program("gpt", STEP, half=True, optimizer=fused))


def test_a_profile_from_the_cache_runs_nothing_before_the_step(dry, tmp_path):
    """cuBLAS asks for its workspace in the first matmul, which then is the step's."""
    text = program("llama", STEP, cache=str(tmp_path))
    assert dry_cuda.run(dry, text) == dry_cuda.run(dry, text)


def test_another_stream_and_another_thread(dry):
    body = (
        STEP
        + """
import threading
with torch.cuda.stream(torch.cuda.Stream()):
    step(x)
assert step.last.as_planned
thread = threading.Thread(target=lambda: step(x))
thread.start(), thread.join()
assert step.last.as_planned
"""
    )
    assert dry_cuda.run(dry, program("llama", body))


def test_seeds_on_the_host_take_no_bytes_of_the_device(dry):
    """Memory-efficient attention returns its seed and offset on the CPU, which shape inference does not say."""
    body = (
        STEP
        + """
hosted = {s.name for s in step.graph.storages if s.pool == "host"}
assert all(s.size == 0 for s in step.graph.storages if s.pool == "host")
ops = [o for o in step.graph.ops if "efficient_attention" in o.target and "backward" not in o.target]
assert len(ops) == 3
for op in ops:
    kinds = [step.graph.storages[step.graph.values[v].storage].pool for v in op.outputs]
    assert kinds.count("host") == 2, kinds
"""
    )
    assert dry_cuda.run(dry, program("bert", body))


def test_the_backend_and_inference(dry):
    body = """
from tightship.integrations import torch_partition
pieces, build = [], torch_partition.PlannedGraph._build
torch_partition.PlannedGraph._build = lambda self, *args: (pieces.append(self), build(self, *args))[1]
compiled = torch.compile(model, backend="tightship", options={"budget": "100%", "strict": True})
for _ in range(3):
    loss(compiled, x).backward()
    optimizer.step()
    optimizer.zero_grad()
    assert all(p.last.as_planned and p.last.arena for p in pieces), [p.last for p in pieces]
assert pieces
model.eval()
run = tightship.infer(model, {"input_ids": x, "use_cache": False})
for _ in range(2):
    run(input_ids=x, use_cache=False)
    assert run.last.misses == 0 and run.last.peak_as_planned, run.last
print("held")
"""
    assert dry_cuda.run(dry, program("llama", body)) == "held"


ALLOCATOR = """
import os, random, torch
from tightship.baselines.torch_allocator import CachingAllocator, OutOfMemory
from tightship.baselines.torch_allocator_settings import Settings
text, total = os.environ["PYTORCH_ALLOC_CONF"], int(os.environ["DRY_CUDA_BYTES"])
settings = Settings.parse(text)
if FRACTION: torch.cuda.set_per_process_memory_fraction(FRACTION)
assert Settings.recorded(torch.cuda.memory._snapshot()["allocator_settings"]) == settings
streams = [torch.cuda.current_stream(), torch.cuda.Stream()]
for seed in range(20):
    random.seed(seed)
    torch.cuda.empty_cache()
    kept = []
    ours = CachingAllocator(settings, capacity=total, limit=int(FRACTION * total) if FRACTION else None)
    for _ in range(400):
        if kept and random.random() < 0.47:
            tensor, address = kept.pop(random.randrange(len(kept)))
            del tensor
            ours.free(address)
        elif random.random() > 0.99:
            torch.cuda.empty_cache()
            ours.empty_cache()
        else:
            size = random.choice([1, 700_000, random.randrange(1, 1 << 20), random.randrange(1 << 20, 60 << 20)])
            stream, tensor, address = int(random.random() < 0.2), None, None
            try:
                with torch.cuda.stream(streams[stream]):
                    tensor = torch.empty(size, dtype=torch.uint8, device="cuda")
            except torch.OutOfMemoryError:
                pass
            try:
                address = ours.alloc(size, stream)
            except OutOfMemory:
                pass
            assert (tensor is None) == (address is None), seed
            kept += [] if tensor is None else [(tensor, address)]
            del tensor
        assert torch.cuda.memory_reserved() == ours.reserved, seed
        assert torch.cuda.memory_allocated() == ours.allocated, seed
    kept.clear()
print("the same")
"""


@pytest.mark.parametrize("mebibytes", [400, 16384])
@pytest.mark.parametrize("fraction", [0.0, 0.5])
@pytest.mark.parametrize(
    "settings",
    [
        "",
        "roundup_power2_divisions:8",
        "roundup_power2_divisions:[1:1,4:2,16:8,>:4]",
        "max_split_size_mb:25",
        "max_split_size_mb:25,max_non_split_rounding_mb:21",
        "garbage_collection_threshold:0.6",
        "large_segment_size_mb:40",
        "expandable_segments:True",
    ],
)
def test_the_simulated_allocator_reserves_what_torchs_does_in_each_setting(
    dry, settings, fraction, mebibytes
):
    more = {"PYTORCH_ALLOC_CONF": settings, "DRY_CUDA_BYTES": str(mebibytes << 20), "DRY_CUDA_DRIVER": "1"}
    environment = dry | more | {"TORCH_CUDA_EXPANDABLE_SEGMENTS_IPC": "0"}
    assert dry_cuda.run(environment, f"FRACTION = {fraction}\n{ALLOCATOR}") == "the same"
