"""A step on the dry CUDA runtime, watched: what its streams do with which bytes, and whether the bytes are right.

Kernels do not run there, copies do, and the device's memory is the host's. So what an op would write is written here,
a pattern of each storage and version, and looked for where the storage is read.
"""

import ctypes
import os
from dataclasses import replace

import torch

from support import races
from tightship.execute import codecs

RECORD, WAIT, COPY, KERNEL, SYNC = range(1, 6)


class _Call(ctypes.Structure):
    _fields_ = [(n, ctypes.c_longlong) for n in ("kind", "stream", "event", "to", "source", "size")]


class Seen:
    """What is asked of streams between `start` and `races`; ``copying`` are those that copy, ``kernels`` those that
    compute."""

    def __init__(self):
        self.library = ctypes.CDLL(os.environ["DRY_CUDA"])
        self.library.dry_calls.restype = ctypes.POINTER(_Call)
        self.calls, self.copying, self.kernels = [], set(), set()

    def start(self):
        self.calls.clear()
        self.library.dry_log(1)

    def races(self):
        self.collect()
        self.library.dry_log(0)
        return races.races(self.calls)

    def collect(self):
        count = ctypes.c_int()
        found = self.library.dry_calls(ctypes.byref(count))
        for c in found[: count.value]:
            if c.kind == RECORD:
                self.calls.append(races.Record(c.stream, c.event))
            elif c.kind == WAIT:
                self.calls.append(races.Wait(c.stream, c.event))
            elif c.kind == SYNC:
                self.calls.append(races.Sync())
            elif c.kind == KERNEL:
                self.kernels.add(c.stream)
            elif c.size:
                self.copying.add(c.stream)
                reads, writes = ((c.source, c.source + c.size),), ((c.to, c.to + c.size),)
                self.calls.append(races.Work(c.stream, reads, writes, f"copy of {c.size} bytes"))


class Watched(Seen):
    """A step of an executor. ``checked`` counts the storages whose bytes were looked at, ``back`` those of them that
    are copied or packed at some time."""

    def __init__(self, executor):
        super().__init__()
        self.executor, self.program, self.plan = executor, executor.program, executor.plan
        self.graph = self.program.graph
        self.values = {}
        for v, info in enumerate(self.graph.values):
            self.values.setdefault(info.storage, []).append(v)
        self.rows = {}
        for r in self.plan.residences:
            if r.pool == "device":
                self.rows.setdefault(r.start, []).append(r)
        self.expected, self.checked, self.back = {}, 0, 0
        self.returned = {s for x in self.plan.steps if x.kind in ("fetch", "decompress") for s in x.storages}
        executor._code.instructions = [self.watch(i) for i in executor._code.instructions]

    def start(self):
        self.expected.clear()
        super().start()

    def watch(self, i):
        step = self.plan.steps[i.step]
        uses = self.graph.uses
        if i.op < 0 and not (step.kind in ("compress", "decompress") and i.asks):
            return i
        read = uses.reads[i.op] if i.op >= 0 else step.storages if step.kind == "compress" else ()
        made = step.storages  # of what a recomputation makes again, some may be there: that is another copy
        if i.op >= 0:
            made = (*(uses.defines[i.op] if step.kind == "compute" else made), *uses.mutates[i.op])

        def run(env):
            self.collect()
            for s in read:
                self.compare(env, s, i)
            reads = self.ranges(env, read)
            i.run(env)
            if step.kind in ("compute", "recompute"):
                for s in made:
                    self.fill(env, s, i.op)
            self.collect()
            rows = self.rows.get(i.step, ()) if self.executor.arena is not None else ()
            writes = [(r.offset + self.executor.arena.base, r.size) for r in rows]
            writes = [(at, at + size) for at, size in writes]
            writes += self.ranges(env, made if step.kind != "compress" else ())
            stream = torch.cuda.current_stream().cuda_stream
            self.calls.append(races.Work(stream, tuple(reads), tuple(writes), f"{step.kind} {i.step}"))

        return replace(i, run=run)

    # --- bytes ---

    def tensor(self, env, s):
        return next((env[v] for v in self.values[s] if env[v] is not None), None)

    def bytes(self, env, s):
        """The bytes of a storage as a tensor of the host, if it lies on the device."""
        tensor = self.tensor(env, s)
        if tensor is None or not tensor.is_cuda or not self.graph.storages[s].size:
            return None
        memory = tensor.untyped_storage()
        return _at(memory.data_ptr(), min(memory.nbytes(), self.graph.storages[s].size))

    def ranges(self, env, storages):
        found = [self.bytes(env, s) for s in storages]
        return [(m.data_ptr(), m.data_ptr() + m.numel()) for m in found if m is not None]

    def fill(self, env, s, op):
        """Zeros and ones are booleans and indices, too, if they are written as such. A write in place by ``op``
        is another version; the same op run again writes the same."""
        memory = self.bytes(env, s)
        if memory is None or s in self.graph.static:
            return
        generator = torch.Generator().manual_seed(1000 * s + op)
        tensor = self.tensor(env, s)
        numbers = memory[: memory.numel() // tensor.element_size() * tensor.element_size()].view(tensor.dtype)
        numbers.copy_(torch.randint(0, 2, numbers.shape, generator=generator))
        self.expected[s] = memory.clone()

    def compare(self, env, s, i):
        memory = self.bytes(env, s)
        if memory is not None and s in self.expected:
            written = self.expected[s]  # what has come back is rounded up
            assert torch.equal(memory[: written.numel()], written), (self.graph.storages[s].name, i.step)
            self.checked += 1
            self.back += s in self.returned


def _at(address, size):
    return torch.frombuffer((ctypes.c_char * size).from_address(address), dtype=torch.uint8)


def _on_host(tensor):
    if not tensor.numel():
        return torch.empty(0, dtype=tensor.dtype)
    return _at(tensor.data_ptr(), tensor.numel() * tensor.element_size()).view(tensor.dtype)


def packing_runs():
    """From now on codecs do on the host, on the same bytes, what their kernels would have done."""
    compress, decompress, check = codecs.compress_by_torch, codecs.decompress_by_torch, codecs.check

    def packed(codec, full, to):
        compress(codec, full, to)
        compress(codec, _on_host(full), _on_host(to))

    def unpacked(codec, source, full):
        decompress(codec, source, full)
        decompress(codec, _on_host(source), _on_host(full))

    def checked(codec, full, place):
        torch.aminmax(full.view(torch.uint8) if full.dtype == torch.bool else full)
        check(codec, _on_host(full), place)

    codecs.compress_by_torch, codecs.decompress_by_torch, codecs.check = packed, unpacked, checked
