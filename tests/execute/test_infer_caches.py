"""Decoding with caches of transformers: keys and values come out as in eager, in the caller's own object."""

from __future__ import annotations

import copy

import pytest
import torch

import tightship
from support.batches import cache_argument
from tightship.errors import BadInput, Unsupported
from tightship.execute import allocator

transformers = pytest.importorskip("transformers")
CACHE = cache_argument(transformers.LlamaForCausalLM)
pytestmark = pytest.mark.skipif(not allocator.available(), reason="no C++ compiler")

SMALL = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def llama(attention="eager"):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(**SMALL, **HEADS, attn_implementation=attention)
    return transformers.LlamaForCausalLM(config).eval()


def mistral():
    torch.manual_seed(0)
    config = transformers.MistralConfig(**SMALL, **HEADS, sliding_window=4, attn_implementation="eager")
    return transformers.MistralForCausalLM(config).eval()


def gpt2():
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        n_embd=32, n_layer=2, n_head=2, vocab_size=50, attn_implementation="eager"
    )
    return transformers.GPT2LMHeadModel(config).eval()


def filled(model, cache, length):
    ids = torch.arange(length)[None] % 50
    with torch.no_grad():
        model(input_ids=ids, **{CACHE: cache}, use_cache=True)
    return cache


def decoded(model, cache, count=4):
    """Logits of ``count`` steps, each of which reads the cache and writes into it."""
    found, ids = [], torch.tensor([[3]])
    with torch.no_grad():
        for _ in range(count):
            out = model(input_ids=ids, **{CACHE: cache}, use_cache=True)
            assert out.past_key_values is cache
            found.append(out.logits.clone())
            ids = out.logits[:, -1:].argmax(-1).contiguous()
    return found


def contents(cache):
    return [t for layer in cache.layers for t in (layer.keys, layer.values)]


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def infer(model, cache, **options):
    sample = {"input_ids": torch.tensor([[1]]), CACHE: cache, "use_cache": True}
    return tightship.infer(model, sample, strict=True, seconds_per_op=0.0, seconds=2.0, **options)


@pytest.mark.parametrize("make", [llama, mistral, gpt2])
def test_a_growing_cache_is_the_caller_s_object(make):
    model = make()
    mine = filled(model, transformers.DynamicCache(config=model.config), 5)
    theirs = copy.deepcopy(mine)
    layers = list(mine.layers)
    largest = filled(model, transformers.DynamicCache(config=model.config), 12)
    run = infer(model, largest, dynamic=True)
    assert same(decoded(model, theirs), decoded(lambda **batch: run(**batch), mine))
    assert same(contents(theirs), contents(mine)) and mine.get_seq_length() == theirs.get_seq_length() == 9
    assert all(a is b for a, b in zip(layers, mine.layers, strict=True))
    used = run.measure()
    assert used["measured_peak"] == used["planned_peak"] and used["misses"] == 0
    assert largest.get_seq_length() == 12  # a sample is not written into


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
def test_a_static_cache_is_written_in_place_by_one_program(attention):
    model = llama(attention)
    mine = filled(model, transformers.StaticCache(config=model.config, max_cache_len=12), 5)
    theirs = copy.deepcopy(mine)
    at = [t.data_ptr() for t in contents(mine)]
    run = infer(model, copy.deepcopy(mine), fresh=False, variants=1)
    program = run.program
    assert same(decoded(model, theirs), decoded(lambda **batch: run(**batch), mine))
    assert same(contents(theirs), contents(mine)) and [t.data_ptr() for t in contents(mine)] == at
    assert run.program is program and run.last.heap == 0
    assert run.measure()["measured_peak"] == run.measure()["planned_peak"]


def test_a_cache_that_is_made_by_the_model_comes_out():
    model = llama()
    ids = torch.tensor([[1, 2, 3]])
    run = tightship.infer(model, {"input_ids": ids}, strict=True, seconds_per_op=0.0)
    with torch.no_grad():
        want = model(input_ids=ids)
    first, second = run(input_ids=ids), run(input_ids=ids)
    assert isinstance(first.past_key_values, transformers.DynamicCache)
    assert first.past_key_values is not second.past_key_values
    for out in (first, second):
        assert torch.equal(out.logits, want.logits)
        assert same(contents(out.past_key_values), contents(want.past_key_values))


def test_caches_of_encoder_and_decoder():
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=50, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, decoder_start_token_id=0
    )
    model = transformers.T5ForConditionalGeneration(config).eval()
    encoded = torch.randn(1, 6, 32)
    mine = transformers.EncoderDecoderCache(transformers.DynamicCache(), transformers.DynamicCache())
    batch = {"encoder_outputs": (encoded,), "decoder_input_ids": torch.tensor([[0]]), "use_cache": True}
    with torch.no_grad():
        model(**batch, **{CACHE: mine})
        theirs = copy.deepcopy(mine)
        run = tightship.infer(model, {**batch, CACHE: copy.deepcopy(mine)}, strict=True, seconds_per_op=0.0)
        want, got = model(**batch, **{CACHE: theirs}), run(**batch, **{CACHE: mine})
    assert torch.equal(want.logits, got.logits) and got.past_key_values is mine
    for a, b in zip(
        (theirs.self_attention_cache, theirs.cross_attention_cache),
        (mine.self_attention_cache, mine.cross_attention_cache),
        strict=True,
    ):
        assert same(contents(a), contents(b))


def test_results_in_the_arena_are_no_input():
    model = llama()
    cache = filled(model, transformers.DynamicCache(config=model.config), 5)
    run = infer(
        model, filled(model, transformers.DynamicCache(config=model.config), 8), dynamic=True, fresh=False
    )
    ids = torch.tensor([[1]])
    out = run(input_ids=ids, **{CACHE: cache}, use_cache=True)
    with pytest.raises(BadInput, match="lies in the arena"):
        run(input_ids=ids, **{CACHE: out.past_key_values}, use_cache=True)


def test_more_keys_than_planned_for_are_refused():
    model = llama()
    run = infer(model, filled(model, transformers.DynamicCache(config=model.config), 5), dynamic=True)
    cache = filled(model, transformers.DynamicCache(config=model.config), 6)
    with pytest.raises(BadInput, match=r"largest shape that was planned for is \(1, 2, 5, 8\)"):
        run(input_ids=torch.tensor([[1]]), **{CACHE: cache}, use_cache=True)


def test_a_cache_in_a_training_batch_is_refused():
    model = llama()
    ids = torch.tensor([[1]])
    cache = filled(model, transformers.DynamicCache(config=model.config), 5)
    with pytest.raises(Unsupported, match="a cache of keys and values in a training batch"):
        tightship.plan(model, {"input_ids": ids, "labels": ids, CACHE: cache})
