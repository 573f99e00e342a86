"""The simplest interpreter of a Program: graph order, nothing freed, every claim about metadata checked."""

import torch

from tightship.frontends.torch.program import derive, flat, substitute
from tightship.frontends.torch.structure import tensor_leaves
from tightship.graph import aligned


def _metadata(t):
    return str(t.dtype).removeprefix("torch."), tuple(t.shape), tuple(t.stride())


def run(call, read):
    return call.fn(*substitute(call.args, read), **substitute(call.kwargs, read))


class Naive:
    """Runs steps of ``program`` on the real ``model`` and ``optimizer``; ``replay`` also runs recomputations."""

    def __init__(self, program, model, optimizer=None, replay=True):
        self.program, self.model, self.optimizer, self.replay = program, model, optimizer, replay
        self.names = dict(model.named_parameters()), dict(model.named_buffers())

    def caller(self, slot, leaves):
        """The caller's tensor of a slot; None for state that does not exist yet."""
        if slot.role == "parameter":
            return self.names[0][slot.key]
        if slot.role == "buffer":
            return self.names[1][slot.key]
        if slot.role == "constant":
            return self.program.constants[slot.key]
        if slot.role == "input":
            return leaves[slot.key]
        name, key = slot.key
        return self.optimizer.state.get(self.names[0][name], {}).get(key)

    def check_guards(self, tensors):
        by_role = {(s.role, s.key): tensors[s.value] for s in self.program.slots}
        for guard in self.program.guards:
            assert guard.holds(by_role), guard.place

    def __call__(self, batch):
        program = self.program
        assert program.batch.misfit(batch) is None
        leaves = tensor_leaves(batch)
        tensors = {s.value: self.caller(s, leaves) for s in program.slots}
        self.check_guards(tensors)
        return interpret(program, tensors)

    @staticmethod
    def with_inputs(program, args):
        """A lowered graph on the tensors of its placeholders."""
        free = iter(args)
        slots = [
            (s.value, program.constants[s.key] if s.role == "constant" else next(free)) for s in program.slots
        ]
        return interpret(program, dict(slots))


def interpret(program, tensors):
    graph = program.graph
    held = {}
    for s in reversed(program.slots):  # of several in one storage the first is the base
        held[graph.values[s.value].storage] = tensors[s.value]
    base = dict(enumerate(program.bases))

    def read(v):
        s = graph.values[v].storage
        tensor = held[s]
        return tensor if tensor is None else derive(tensor, graph.values[base[s]], graph.values[v])

    with torch.no_grad():
        for k, call in enumerate(program.calls):
            again = program.replays.get(k)
            repeated = run(again, read) if again else None
            out = flat(run(call, read))
            for v, t in zip(call.results, out, strict=True):
                if v >= 0:
                    value, storage = graph.values[v], graph.storages[graph.values[v].storage]
                    want = (value.dtype, value.shape, value.stride)
                    assert _metadata(t) == want, f"{graph.ops[k].name}: {_metadata(t)} instead of {want}"
                    assert aligned(t.untyped_storage().nbytes()) == storage.size, graph.ops[k].name
                    held[value.storage] = t
            if again:
                for v, a, b in zip(call.results, out, flat(repeated), strict=True):
                    assert v < 0 or torch.equal(a, b), f"{graph.ops[k].name}: a replay gives other bits"
        tensors = [read(v) for v in program.results]
    return tensors if program.result_spec is None else program.result_spec.unflatten(tensors)
