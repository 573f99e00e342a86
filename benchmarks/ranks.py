"""Eight models on several ranks: bytes and time within budgets, replicated and sharded, beside what torch does.

    python benchmarks/ranks.py [--ranks N] [--steps N] [--models gpt,llama] [--shares 40,30] [--results FILE]
                               [--write]

Replicated parameters stand beside DistributedDataParallel, sharded ones beside FSDP2 (`fully_shard` of each block and
of the root): a budget is a share of what their step takes, everything included, as one meter sees it on rank 0. A row
says what was planned and what each rank measured, whether losses and parameters are those of torch's step to the bit
after the last one, and how long a step takes (medians, in turns). ``--results`` keeps what came of each model in a
file and does not run those that it has; ``--write`` puts the table into the page.
"""

from __future__ import annotations

import argparse
import json
import platform
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pages
import torch
import torch.distributed as dist
from torch import multiprocessing, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F

import tightship
from tightship.errors import Infeasible
from tightship.execute import allocator
from tightship.units import format_bytes

PAGE = Path(__file__).resolve().parent.parent / "docs" / "distributed.md"
BEGIN, END = "<!-- begin: benchmarks/ranks.py -->", "<!-- end: benchmarks/ranks.py -->"
HEAD = ("model", "parameters", "budget", "planned peak", "measured", "run again", "step over torch's", "bits")
MARKS = ("---", "---", "---:", "---:", "---:", "---:", "---:", "---")
SHARES = (100, 60, 40, 30)
LOSSLESS = "recompute,compress,offload"
WAYS: tuple[tuple[str, str, int | None], ...] = (
    ("", "recompute", None), (" (all ways)", LOSSLESS, None), (" (all ways, bucket=0)", LOSSLESS, 0),
    (" (recompute, stream, bucket=0)", "recompute,stream", 0),
)  # fmt: skip
"""What a row says, the ways allowed, and the bytes of a message."""
Batch = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Work:
    """A model, the blocks that FSDP2 wraps, its loss, and how to draw a batch."""

    make: Callable[[], nn.Module]
    blocks: Callable[[Any], Any]
    loss: Callable[[Any, Batch], torch.Tensor]
    draw: Callable[[torch.Generator], Batch]


def words(rows: int, tokens: int, count: int) -> Callable[[torch.Generator], Batch]:
    return lambda g: (torch.randint(0, count, (rows, tokens), generator=g),)


def images(rows: int, side: int) -> Callable[[torch.Generator], Batch]:
    return lambda g: (
        torch.randn(rows, 3, side, side, generator=g),
        torch.randint(0, 10, (rows,), generator=g),
    )


class Gpt(nn.Module):
    """Of torch's own layers, with dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(128, 64), nn.Embedding(64, 64)
        layers = [nn.TransformerEncoderLayer(64, 4, 256, batch_first=True) for _ in range(4)]
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(64, 128)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def gpt() -> Work:
    def loss(model: Any, batch: Batch) -> torch.Tensor:
        return F.cross_entropy(model(batch[0]).flatten(0, 1), batch[0].flatten())

    return Work(Gpt, lambda m: m.layers, loss, words(8, 64, 128))


def causal(model: Any, batch: Batch) -> torch.Tensor:
    loss: torch.Tensor = model(input_ids=batch[0], labels=batch[0]).loss
    return loss


def labeled(model: Any, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(pixel_values=batch[0]).logits, batch[1])


def gpt2() -> Work:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=4, n_embd=128, n_head=4, vocab_size=512, n_positions=64)
    return Work(lambda: GPT2LMHeadModel(config), lambda m: m.transformer.h, causal, words(8, 64, 512))


def llama() -> Work:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4, vocab_size=512,
        num_key_value_heads=2, max_position_embeddings=64, use_cache=False,
    )  # fmt: skip
    return Work(lambda: LlamaForCausalLM(config), lambda m: m.model.layers, causal, words(8, 64, 512))


def bert() -> Work:
    from transformers import BertConfig, BertForMaskedLM

    config = BertConfig(
        hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512, vocab_size=512,
        max_position_embeddings=64,
    )  # fmt: skip
    return Work(lambda: BertForMaskedLM(config), lambda m: m.bert.encoder.layer, causal, words(8, 64, 512))


def t5() -> Work:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=128, d_kv=32, d_ff=256, num_layers=2, num_decoder_layers=2, num_heads=4, vocab_size=512,
        decoder_start_token_id=0, use_cache=False,
    )  # fmt: skip
    return Work(
        lambda: T5ForConditionalGeneration(config),
        lambda m: [*m.encoder.block, *m.decoder.block],
        causal,
        words(8, 64, 512),
    )


def vit() -> Work:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512, image_size=32,
        patch_size=4, num_labels=10, hidden_dropout_prob=0.1,
    )  # fmt: skip
    return Work(lambda: ViTForImageClassification(config), lambda m: m.vit.layers, labeled, images(8, 32))


def resnet() -> Work:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=16, hidden_sizes=[32, 64, 128], depths=[2, 2, 2], num_labels=10)
    return Work(
        lambda: ResNetForImageClassification(config),
        lambda m: m.resnet.encoder.stages,
        labeled,
        images(16, 64),
    )


def convnext() -> Work:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    config = ConvNextConfig(hidden_sizes=[32, 64, 128], depths=[2, 2, 2], num_stages=3, num_labels=10)
    return Work(
        lambda: ConvNextForImageClassification(config),
        lambda m: m.convnext.encoder.stages,
        labeled,
        images(16, 64),
    )


WORKS: dict[str, Callable[[], Work]] = {
    "gpt": gpt, "gpt2": gpt2, "llama": llama, "bert": bert, "t5": t5, "vit": vit, "resnet": resnet,
    "convnext": convnext,
}  # fmt: skip


def made(work: Work) -> Any:
    torch.manual_seed(0)
    return work.make().train()


class Peer:
    """The step as torch has it: DistributedDataParallel, or FSDP2."""

    def __init__(self, work: Work, shard: bool) -> None:
        self.model = made(work)
        if shard:
            for block in work.blocks(self.model):
                fully_shard(block)
            fully_shard(self.model)
            self.called = self.model
        else:
            self.called = nn.parallel.DistributedDataParallel(self.model)
        self.loss = work.loss
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)

    def __call__(self, batch: Batch) -> torch.Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(self.called, batch)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def whole(self) -> dict[str, torch.Tensor]:
        return {name: _whole(p) for name, p in self.model.named_parameters()}


def _whole(tensor: Any) -> torch.Tensor:
    full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    kept: torch.Tensor = full.detach().clone()
    return kept


def seeded(k: int) -> None:
    torch.manual_seed(1000 * dist.get_rank() + k)


def row(work: Work, shard: bool, share: int, peak: int, batches: list[Batch]) -> list[str]:
    """One row of the table: how the step goes within ``share`` percent of torch's ``peak``."""
    head = ["sharded" if shard else "replicated", f"{share}%"]
    step = None
    for way in WAYS:
        more, allow, bucket = way
        if shard and "stream" in allow:  # refused
            continue
        model = made(work)
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
        how = tightship.DataParallel(shard=shard, bucket=bucket)
        try:
            step = tightship.fit(
                model, work.loss, optimizer, batches[0], peak * share // 100, parallel=how, allow=allow,
                progress=False,
            )  # fmt: skip
            break
        except Infeasible as no:
            bound, best = no.lower_bound, no.best_peak
    if step is None:
        proven = bound is not None and bound > peak * share // 100
        why = (
            f"impossible below {format_bytes(bound)}" if proven else f"none below {format_bytes(best)} found"
        )
        return [*head, why, "", "", "", ""]
    head[1] += more
    peers = [Peer(work, shard), *([Peer(work, False)] if shard else [])]
    losses: list[list[torch.Tensor]] = []
    times: tuple[list[float], ...] = tuple([] for _ in (step, *peers))
    for k, batch in enumerate(batches):
        losses.append([])
        for of, call in zip(times, (step, *peers), strict=True):
            seeded(k)
            start = time.perf_counter()
            losses[-1].append(call(batch))
            of.append(time.perf_counter() - start)
    ours = {name: _whole(t) for name, t in step.state_dict()["model"].items() if torch.is_tensor(t)}
    same = [
        all(torch.equal(row[0], row[n]) for row in losses)
        and all(torch.equal(ours[name], p) for name, p in peer.whole().items())
        for n, peer in enumerate(peers, 1)
    ]
    used, again = step.measure(), step.plan.count("recompute")
    said: list[Any] = [None] * dist.get_world_size()
    exact = used["measured_peak"] == used["planned_peak"] <= used["budget"]
    dist.all_gather_object(said, (same, exact, used["misses"]))
    over = statistics.median(times[0]) / statistics.median(times[1])
    planned = format_bytes(used["planned_peak"] or 0)
    measured = (
        "= planned" if all(e and not m for _, e, m in said) else format_bytes(used["measured_peak"] or 0)
    )
    return [
        *head,
        planned,
        measured,
        str(again),
        f"{over:.2f}",
        "equal" if all(s for s, *_ in said) else "differ",
    ]


def run(
    rank: int, ranks: int, port: int, steps: int, shares: tuple[int, ...], name: str, answer: str
) -> None:
    """All rows of a model, on one of the ranks."""
    torch.set_num_threads(1)
    allocator.load()
    dist.init_process_group("gloo", f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    work, drawn = WORKS[name](), torch.Generator().manual_seed(rank)
    batches = [work.draw(drawn) for _ in range(steps)]
    rows = []
    for shard in (False, True):
        with allocator.Meter() as meter:
            peer = Peer(work, shard)
            for batch in batches[:3]:
                peer(batch)
        del peer
        peaks: list[Any] = [None] * ranks
        dist.all_gather_object(peaks, meter.peak)
        rows.append([name, "FSDP2" if shard else "DDP", "", "", format_bytes(peaks[0]), "", "1.00", ""])
        rows += [[name, *row(work, shard, share, min(peaks), batches)] for share in shares]
    if rank == 0:
        Path(answer).write_text(json.dumps(rows), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def rows_of(name: str, ranks: int, steps: int, shares: tuple[int, ...]) -> list[list[str]]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "rows.json"
        multiprocessing.spawn(run, (ranks, port, steps, shares, name, str(answer)), nprocs=ranks)
        rows: list[list[str]] = json.loads(answer.read_text(encoding="utf-8"))
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, default=2, help="processes on this machine")
    parser.add_argument("--steps", type=int, default=12, help="steps of each kind")
    parser.add_argument("--models", default=",".join(WORKS), help="with commas")
    parser.add_argument("--shares", default=",".join(map(str, SHARES)), help="percentages, with commas")
    parser.add_argument("--results", type=Path, help="file of rows, which is read first")
    parser.add_argument("--write", action="store_true", help=f"put the table into {PAGE.name}")
    args = parser.parse_args()
    shares = tuple(int(x) for x in args.shares.split(","))
    kept = args.results is not None and args.results.exists()
    known: dict[str, Any] = json.loads(args.results.read_text(encoding="utf-8")) if kept else {}
    for name in args.models.split(","):
        if name not in known:
            known[name] = rows_of(name, args.ranks, args.steps, shares)
            if args.results is not None:
                args.results.write_text(json.dumps(known), encoding="utf-8")
    said = (
        f"{time.strftime('%Y-%m-%d')}; {args.ranks} ranks of one thread each on {platform.machine()}; PyTorch "
        f"{torch.__version__}; {args.steps} steps, in turns; `python benchmarks/ranks.py`."
    )
    text = pages.table(HEAD, MARKS, [r for name in args.models.split(",") for r in known[name]])
    print(f"{said}\n\n{text}")
    if args.write:
        pages.put(PAGE, BEGIN, END, f"{said}\n\n{text}")


if __name__ == "__main__":
    main()
