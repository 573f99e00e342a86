import concurrent.futures
import json
import os
import stat
import time
from dataclasses import replace

import pytest
import torch

from support.runs import Pair
from tightship.errors import Unsupported
from tightship.execute import allocator, prepared
from tightship.execute import bench as bench_module
from tightship.execute import profile as profile_module
from tightship.execute.allocator import Event
from tightship.execute.bench import sample_tensor, workspace_of
from tightship.execute.cache import Cache, KeptPlans, Measurement
from tightship.execute.fit import fit
from tightship.execute.interpreter import Fallback
from tightship.execute.profile import model as modeled
from tightship.execute.profile import profile
from tightship.frontends.torch.capture.step import capture_step
from tightship.frontends.torch.program import Call
from tightship.graph import Value


def captured(name="cnn", optimizer="adamw"):
    pair = Pair(name, optimizer)
    return pair, capture_step(pair.model, pair.loss_fn, pair.optimizer, pair.batch(0))


def quick(program, cache=None):
    return profile(program, cache=cache, seconds_per_op=0.0)


@pytest.fixture(scope="module")
def measured():
    return quick(captured()[1])


def op_of(program, text):
    return next(k for k, o in enumerate(program.graph.ops) if text in o.target)


# ---- what is measured


def test_every_op_gets_time_and_requests_for_all_it_defines(measured):
    graph = measured.graph
    for op, defines in zip(graph.ops, graph.uses.defines, strict=True):
        assert op.time > 0
        made = {r.storage: r for r in op.requests if r.storage >= 0}
        assert set(made) == {j for j, s in enumerate(defines) if graph.storages[s].size}
        assert all(r.size == graph.storages[defines[j]].size and r.end == -1 for j, r in made.items())
        assert all(0 <= r.start < r.end for r in op.requests if r.storage < 0)


def test_measuring_changes_nothing_else(measured):
    _, program = captured()
    assert measured.graph.digest == program.graph.digest
    assert measured.calls is not None and len(measured.calls) == len(program.calls)


def test_workspace_is_what_a_recording_of_the_op_shows(measured):
    for op, defines in zip(measured.graph.ops, measured.graph.uses.defines, strict=True):
        events = sorted(
            [(r.start, r.size) for r in op.requests] + [(r.end, -r.size) for r in op.requests if r.end >= 0]
        )
        live = most = 0
        for _, size in events:
            live += size
            most = max(most, live)
        results = sum(measured.graph.storages[s].size for s in defines)
        assert op.workspace == max(0, most - results)


def test_workspace_of_a_temporary_that_ends_before_the_result_is_asked_for():
    def alloc(number, size):
        return Event("alloc", number, size, number, -1)

    def free(number, size):
        return Event("free", number, size, number, -1)

    early = [alloc(0, 640), free(0, 640), alloc(1, 128)]
    assert workspace_of(early, {1: 0}, 128) == (512, ((640, -1, 0, 1), (128, 0, 2, -1)), 0)
    late = [alloc(0, 128), alloc(1, 640), free(1, 640)]
    assert workspace_of(late, {0: 0}, 128) == (640, ((128, 0, 0, -1), (640, -1, 1, 2)), 0)
    assert workspace_of([alloc(0, 64), alloc(1, 128)], {1: 0}, 128)[2] == 64


def test_models_parameters_buffers_and_random_state_are_not_touched():
    pair, program = captured()
    before = {n: t.clone() for n, t in pair.model.state_dict().items()}
    torch.manual_seed(5)
    state = torch.get_rng_state()
    quick(program)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(t, before[n]) for n, t in pair.model.state_dict().items())
    assert not pair.optimizer.state


def test_state_that_exists_is_copied_for_measuring():
    pair, _ = captured("mlp")
    for p in pair.model.parameters():
        p.grad = torch.ones_like(p)
    pair.optimizer.step()
    before = [t.clone() for s in pair.optimizer.state.values() for t in s.values()]
    quick(capture_step(pair.model, pair.loss_fn, pair.optimizer, pair.batch(0)))
    assert all(
        torch.equal(t, b)
        for t, b in zip((t for s in pair.optimizer.state.values() for t in s.values()), before, strict=True)
    )


def test_without_a_compiler_only_times_are_measured(monkeypatch):
    monkeypatch.setattr(allocator, "why_not", lambda _kind: "no C++ compiler")
    program = quick(captured()[1])
    assert all(o.time > 0 and not o.requests and not o.workspace for o in program.graph.ops)
    assert any("compiler" in note for note in program.notes)


def test_what_cannot_run_here_is_modeled():
    _, program = captured("mlp")
    ops = [replace(o, device="cuda") if k == 0 else o for k, o in enumerate(program.graph.ops)]
    program = quick(replace(program, graph=program.graph.with_ops(tuple(ops))))
    assert program.graph.ops[0].time > 0 and not program.graph.ops[0].requests
    assert any("modeled" in note for note in program.notes)


def test_the_model_is_the_roofline():
    _, program = captured("mlp")
    graph = modeled(program, flops=1.0, bandwidth=float("inf"), overhead=0.0).graph
    assert [o.time for o in graph.ops] == [float(o.flops) for o in graph.ops]
    slow = modeled(program, flops=float("inf"), bandwidth=1.0, overhead=2.0).graph
    k = op_of(program, "mm")
    made = sum(graph.storages[s].size for s in graph.uses.defines[k])
    assert slow.ops[k].time > made + 2.0


# ---- what is refused


def with_call(program, k, fn):
    calls = list(program.calls)
    calls[k] = Call(fn, *[getattr(calls[k], n) for n in ("args", "kwargs", "results")])
    return replace(program, calls=tuple(calls))


def test_another_result_than_captured_is_refused_by_name():
    _, program = captured("mlp")
    k = op_of(program, "addmm")
    fn = program.calls[k].fn
    for broken, word in (
        (lambda *a, **kw: fn(*a, **kw).double(), "dtype"),
        (lambda *a, **kw: fn(*a, **kw)[:1], "shape"),
        (lambda *a, **kw: fn(*a, **kw).t().contiguous().t(), "stride"),
    ):
        with pytest.raises(Unsupported, match=word) as error:
            quick(with_call(program, k, broken))
        assert program.graph.place(k) in str(error.value)


def test_a_result_that_is_not_new_memory_is_refused():
    _, program = captured("mlp")
    k = op_of(program, "addmm")
    kept = []

    def remembered(*args, **kwargs):
        kept.append(program.calls[k].fn(*args, **kwargs))
        return kept[0]

    with pytest.raises(Unsupported, match="memory that it did not ask for"):
        quick(with_call(program, k, remembered))


def test_memory_that_is_kept_is_refused():
    _, program = captured("mlp")
    k = op_of(program, "addmm")
    kept = []

    def hoarding(*args, **kwargs):
        kept.append(torch.empty(16))
        return program.calls[k].fn(*args, **kwargs)

    with pytest.raises(Unsupported, match="keeps 64 bytes"):
        quick(with_call(program, k, hoarding))


def test_an_op_that_does_not_run_is_refused():
    _, program = captured("mlp")

    def broken(*_args, **_kwargs):
        raise RuntimeError("no such kernel")

    with pytest.raises(Unsupported, match="no such kernel"):
        quick(with_call(program, 0, broken))


# ---- fresh tensors


@pytest.mark.parametrize(
    "value",
    [
        Value("a", 0, "float32", (3, 4), (4, 1), 0),
        Value("b", 0, "float32", (3, 4), (1, 3), 5),
        Value("c", 0, "bfloat16", (2, 1, 5), (20, 7, 3), 100),
        Value("d", 0, "int64", (), (), 3),
        Value("e", 0, "bool", (7,), (0,), 0),
        Value("f", 0, "float32", (0, 4), (4, 1), 8),
        Value("g", 0, "complex64", (300, 300), (300, 1), 0),
    ],
    ids=lambda v: v.name,
)
def test_fresh_tensors_have_the_metadata_and_alignment(value):
    tensor = sample_tensor(value, "cpu")
    assert str(tensor.dtype).endswith(value.dtype)
    assert (tuple(tensor.shape), tuple(tensor.stride())) == (value.shape, value.stride)
    assert (tensor.storage_offset() - value.offset) * tensor.element_size() % 64 == 0
    if not tensor.is_floating_point() and not tensor.is_complex():
        assert not tensor.any()
    elif tensor.numel() > 1:
        assert (tensor != tensor.flatten()[0]).any()


# ---- kept measurements


def test_kept_measurements_are_used(tmp_path, monkeypatch):
    _, program = captured("mlp")
    first = quick(program, tmp_path)

    def measured(*_args: object, **_options: object) -> None:
        raise AssertionError("measured again")

    monkeypatch.setattr("tightship.execute.profile.sample_arguments", measured)
    assert quick(program, tmp_path).graph.ops == first.graph.ops
    with pytest.raises(AssertionError):
        quick(captured("tied")[1], tmp_path)


def test_a_learning_rate_is_not_part_of_the_key_but_other_settings_are(tmp_path):
    pair, program = captured("mlp")
    quick(program, tmp_path)
    (file,) = tmp_path.iterdir()
    known = set(json.loads(file.read_text())["entries"])
    pair.optimizer.param_groups[0]["lr"] = 0.5
    quick(program, tmp_path)
    assert set(json.loads(file.read_text())["entries"]) == known
    pair.optimizer.param_groups[0]["amsgrad"] = True
    quick(program, tmp_path)
    assert set(json.loads(file.read_text())["entries"]) > known


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"machine":1}', b"\xff\x00", b'{"machine":"x","entries":{"k":[]}}']
)
def test_a_broken_file_is_ignored_and_replaced(tmp_path, content):
    _, program = captured("mlp")
    quick(program, tmp_path)
    (file,) = tmp_path.iterdir()
    file.write_bytes(content)
    again = quick(program, tmp_path)
    assert any("cannot be read" in note for note in again.notes)
    assert json.loads(file.read_text())["entries"]
    assert not any("cannot be read" in note for note in quick(program, tmp_path).notes)


def test_a_file_of_another_machine_is_not_used(tmp_path):
    mine = Cache(tmp_path, "mine")
    mine.put("k", Measurement(1.0))
    mine.save()
    mine.path.rename(tmp_path / "profile-yours.json")
    assert Cache(tmp_path, "yours").get("k") is None


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="permissions mean nothing to root")
def test_a_folder_that_cannot_be_written_is_a_note(tmp_path):
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    cache = Cache(tmp_path / "deeper", "m")
    cache.put("k", Measurement(1.0))
    cache.save()
    assert "could not be kept" in cache.note


def test_a_folder_that_is_a_file_is_a_note(tmp_path):
    (tmp_path / "file").write_text("")
    cache = Cache(tmp_path / "file", "m")
    cache.put("k", Measurement(1.0))
    cache.save()
    assert "could not be kept" in cache.note and cache.get("k")


def _write(folder, worker):
    for k in range(20):
        cache = Cache(folder, "m")
        cache.put(f"{worker}.{k}", Measurement(float(k), k, ((64, -1, 0, 1),)))
        cache.save()
        if cache.note or Cache(folder, "m").note:
            return False
    return True


def test_processes_write_at_the_same_time(tmp_path):
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert all(pool.map(_write, [tmp_path] * 4, range(4)))
    cache = Cache(tmp_path, "m")
    assert not cache.note
    assert any(cache.get(f"{w}.19") for w in range(4))
    assert [p.name for p in tmp_path.iterdir()] == ["profile-m.json"]


# --- few runs -------------------------------------------------------------------------------------------------


def test_a_long_call_that_asks_for_more_the_first_time_is_recorded_again(monkeypatch) -> None:
    """A kernel's first run is believed only if the next one makes exactly its requests."""
    program = captured("mlp", "sgd")[1]
    k = next(k for k, op in enumerate(program.graph.ops) if op.target.startswith("aten.addmm"))
    want = quick(program).graph.ops[k].requests
    monkeypatch.setattr(profile_module, "_HEAVY", 0)
    known = profile_module._Profiler.work
    first = {}

    def work(self, k, call, device):
        run = known(self, k, call, device)

        def once():
            if first.setdefault(id(call), True):
                first[id(call)] = False
                torch.empty(4096)
            return run()

        return once

    monkeypatch.setattr(profile_module._Profiler, "work", work)
    assert quick(program).graph.ops[k].requests == want
    assert not any(first.values())


def test_times_that_agree_are_enough() -> None:
    times = iter([1.0, 1.01, 1.02, 5.0, 1.0])
    assert bench_module._agreed(lambda: next(times), 20) == 1.01
    times = iter([2.0, 1.0, 3.0, 1.5, 1.1])
    assert bench_module._agreed(lambda: next(times), 5) == 1.5


# ---- ops that only check


def test_what_a_check_asks_of_the_allocator_is_planned():
    """`linalg.cholesky` looks at whether it has failed, which takes a request and makes nothing."""
    if not allocator.available():
        pytest.skip("needs the recording allocator")
    model = torch.nn.Linear(4, 4)

    def loss_fn(net, x):
        return torch.linalg.cholesky(net(x).T @ net(x) + torch.eye(4)).sum()

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = fit(model, loss_fn, optimizer, torch.randn(8, 4), cache=None, seconds_per_op=0.0, strict=True)
    assert any(o.effect and o.requests for o in step.graph.ops)
    for _ in range(2):
        step(torch.randn(8, 4))
    assert step.last.as_planned


# ---- with little time


def test_without_time_bytes_are_what_they_are_with_time(measured, monkeypatch):
    """Only times are thinned: nothing is timed, and each op is run for its requests all the same."""
    monkeypatch.setattr(bench_module.Bench, "time", None)
    hurried = profile(captured()[1], cache=None, seconds=0.0)
    for a, b in zip(hurried.graph.ops, measured.graph.ops, strict=True):
        assert (a.requests, a.workspace, a.overwrites) == (b.requests, b.workspace, b.overwrites)
        assert a.time > 0
    assert any("in one run or none" in n and "(seconds=0)" in n for n in hurried.notes)
    assert not any("in one run or none" in n for n in measured.notes)


def test_a_time_that_is_not_measured_follows_from_the_nearest_of_its_kind():
    program = captured()[1]
    profiler = profile_module._Profiler(program, Cache(None, "m"), {}, 0.0, profile_module._Hurry(0.0))
    k = op_of(program, "convolution.default")
    target, own = program.graph.ops[k].target, profiler.by_model(k)
    assert profiler.estimated(k, 0.125) == 0.125
    profiler.kin[target] = [(own * 100, 7.0)]
    assert profiler.estimated(k, 0.125) == 0.125
    profiler.kin[target] += [(own / 2, 3.0), (own * 4, 5.0)]
    assert profiler.estimated(k, 0.125) == pytest.approx(6.0)


def test_what_there_was_no_time_for_is_measured_when_there_is_more(tmp_path, monkeypatch):
    runs = []
    measure = profile_module._Profiler.measure
    monkeypatch.setattr(
        profile_module._Profiler, "measure", lambda *args: (runs.append(1), measure(*args))[1]
    )
    first = profile(captured()[1], cache=tmp_path, seconds=1e-6)
    count = len(runs)
    again = profile(captured()[1], cache=tmp_path, seconds=1e-6)
    assert len(runs) == count and again.graph == first.graph
    assert any("in one run or none" in n for n in again.notes)
    more = profile(captured()[1], cache=tmp_path, seconds=1000.0, seconds_per_op=0.0)
    assert len(runs) > count and not any("in one run or none" in n for n in more.notes)
    count = len(runs)
    profile(captured()[1], cache=tmp_path)
    profile(captured()[1], cache=tmp_path, seconds=1e-6)
    assert len(runs) == count


@pytest.mark.parametrize("name", ["cnn", "gpt2", "lstm", "buffers"])
def test_a_step_that_was_prepared_without_time_takes_what_was_planned(name, tmp_path):
    pair = Pair(name)
    step = fit(
        pair.model,
        pair.loss_fn,
        pair.optimizer,
        pair.batch(0),
        "100%",
        cache=tmp_path,
        seconds=1e-6,
        strict=True,
    )
    for number in range(3):
        pair.compare(step, number)
    assert step.last.measured_peak == step.plan.peak and not step.last.misses
    assert any("bytes are exact" in n for n in step.notes)


def test_the_search_has_what_measuring_leaves_of_the_seconds(tmp_path, monkeypatch):
    given, call, measure = [], KeptPlans.__call__, prepared.profile

    def planned(self, graph, budget, progress, like, seconds):
        given.append(seconds)
        return call(self, graph, budget, progress, like, seconds)

    def slow(*args, **named):
        time.sleep(wait)
        return measure(*args, **named)

    monkeypatch.setattr(KeptPlans, "__call__", planned)
    monkeypatch.setattr(prepared, "profile", slow)
    pair = Pair("mlp")
    for wait in (0.0, 0.3, 2.0):  # noqa: B007
        fit(pair.model, pair.loss_fn, pair.optimizer, pair.batch(0), "100%", cache=tmp_path, seconds=1.0)
    assert given[0] <= 1.0 and 0.25 <= given[1] <= 0.7 and given[2] == 0.25


@pytest.mark.parametrize("cache", [None, "folder"])
def test_the_seconds_of_a_plan_are_for_measuring_too(cache, tmp_path, monkeypatch):
    """Beside the command line's, whose source is read by `load_source`."""
    import tightship
    from tightship import sources
    from tightship.planners import default

    given, searched = [], []
    measure, left = profile, default.seconds_left

    def measured(program, *, seconds, **more):
        given.append(seconds)
        return measure(program, seconds=seconds, **more)

    def rest(seconds, took):
        searched.append((seconds, took))
        return left(seconds, took)

    monkeypatch.setattr("tightship.execute.profile.profile", measured)
    monkeypatch.setattr("tightship.requests.seconds_left", rest)
    kept = cache and tmp_path
    tightship.plan(torch.nn.Linear(4, 4), torch.randn(2, 4), cache=kept, seconds=3.0)
    (tmp_path / "of_seconds.py").write_text(
        "import torch\n\n\ndef step():\n    return torch.nn.Linear(4, 4), torch.randn(2, 4)\n"
    )
    monkeypatch.chdir(tmp_path)
    assert sources.load_source("of_seconds:step", seconds=5.0).took > 0
    assert given == [3.0, 5.0]
    assert searched[0][0] == 3.0 and searched[0][1] > 0


# ---- ops whose requests follow from data


def trained_alike(make, batches, between=lambda k, model: None):
    """The steps' misses and whether peaks were as planned; losses and state are compared with eager's."""
    sides, seen = [], []
    for planned in (True, False):
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        step = fit(model, summed, optimizer, batches[0], cache=None, seconds_per_op=0.0) if planned else None
        losses = []
        for k, batch in enumerate(batches):
            between(k, model)
            if step is None:
                optimizer.zero_grad()
                losses.append(summed(model, batch))
                losses[-1].backward()
                optimizer.step()
            else:
                losses.append(step(batch))
                seen.append(step.measure())
        sides.append([*losses, *model.state_dict().values()])
    assert all(map(torch.equal, *sides))
    assert all(m["planned_peak"] == m["measured_peak"] and m["misses"] == 0 for m in seen)
    return step


def summed(model, batch):
    return model(batch).square().sum()


@pytest.mark.parametrize("bag", [False, True])
@pytest.mark.parametrize("norm", [0.1, 2.0, 100.0])
def test_rows_of_an_embedding_that_are_cut_to_a_norm(norm, bag):
    batches = [
        torch.zeros(6, 4, dtype=torch.long),
        torch.arange(24).view(6, 4),
        torch.arange(24).view(6, 4) % 5,
    ]
    kind = torch.nn.EmbeddingBag if bag else torch.nn.Embedding
    trained_alike(lambda: torch.nn.Sequential(kind(30, 8, max_norm=norm), torch.nn.Linear(8, 3)), batches)


def quantized(channels=False):
    from torch.ao.quantization import FusedMovingAvgObsFakeQuantize, default_fused_per_channel_wt_fake_quant

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = torch.nn.Linear(8, 40), FusedMovingAvgObsFakeQuantize()
            self.weights = default_fused_per_channel_wt_fake_quant() if channels else torch.nn.Identity()

        def forward(self, x):
            return self.seen(torch.nn.functional.linear(x, self.weights(self.linear.weight)))

    return Net()


OLD_QUANTIZATION = pytest.mark.filterwarnings(
    "ignore:.*torch.ao.quantization is deprecated", "ignore:Please use quant"
)


@OLD_QUANTIZATION
@pytest.mark.parametrize("channels", [False, True])
def test_fake_quantization_whose_observers_are_switched_off(channels):
    batches = [torch.randn(6, 8) for _ in range(6)]

    def make():
        model = quantized(channels)
        model(batches[0])  # statistics by channel have no size before
        return model

    def between(k, model):
        if k == 2:
            model.apply(torch.ao.quantization.disable_observer)
        if k == 4:
            model.apply(torch.ao.quantization.disable_fake_quant)

    trained_alike(make, batches, between)


@OLD_QUANTIZATION
def test_statistics_by_channel_without_a_size_run_in_eager():
    model = quantized(channels=True)
    with pytest.warns(Fallback, match="run the model once"):
        step = fit(model, summed, torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(6, 8), cache=None)
    step(torch.randn(6, 8))
    assert step.measure()["planned_peak"] is None
