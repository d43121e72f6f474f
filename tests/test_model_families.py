"""Every family computes the same as its reference, also after rejected rows."""

from __future__ import annotations

import dataclasses
import random

import litgpt.generate.base
import litgpt.model
import pytest
import torch
import transformers
from families import FAMILIES, VOCAB, WINDOW, build, model_of, tiny

from litspec.model import GPT

TOLERANCE = 1e-4


@pytest.mark.parametrize("name", FAMILIES)
def test_a_forward_without_a_cache_is_the_references(name: str) -> None:
    _, _, reference = tiny(name)
    idx = torch.randint(3, VOCAB, (2, 70), generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(model_of(name)(idx), reference(idx), atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("batch_size", [1, 2, 3])
@pytest.mark.parametrize("name", FAMILIES)
def test_refused_rows_leave_no_trace(name: str, batch_size: int) -> None:
    """Blocks of 1 to 8 rows, of which any number is kept and the rest is junk; sequences of a batch drift apart."""
    rng = random.Random(f"{name} {batch_size}")
    generator = torch.Generator().manual_seed(batch_size)
    model, (_, _, reference) = model_of(name), tiny(name)
    length = 5 * WINDOW
    text = torch.randint(3, VOCAB, (batch_size, length), generator=generator)
    want = reference(text)
    cache = model.make_cache(length, batch_size=batch_size)

    # Prompts shorter and longer than the window, read whole or in chunks.
    prompt = rng.choice([1, WINDOW // 2, WINDOW + 3, 3 * WINDOW])
    logits = model.prefill(text[:, :prompt], cache, chunk_size=rng.choice([7, 32, 512]))
    torch.testing.assert_close(logits, want[:, prompt - 1 : prompt], atol=TOLERANCE, rtol=0)
    at = [prompt] * batch_size
    while min(at) < length:
        width = rng.randint(1, 8)
        kept = [min(rng.randint(0, width), length - begin) for begin in at]
        idx = torch.randint(3, VOCAB, (batch_size, width), generator=generator)
        for b, (begin, n) in enumerate(zip(at, kept)):
            idx[b, :n] = text[b, begin : begin + n]
        kv_length = rng.choice([None, cache.bucket(max(at) + width)])
        logits = model.verify(idx, torch.tensor(at), cache, kv_length=kv_length)
        for b, (begin, n) in enumerate(zip(at, kept)):
            torch.testing.assert_close(logits[b, :n], want[b, begin : begin + n], atol=TOLERANCE, rtol=0)
        at = [begin + n for begin, n in zip(at, kept)]


@pytest.mark.parametrize("name", ["llama-3", "mistral", "gemma-2", "gemma-3", "qwen-3-moe", "latent"])
def test_long_prompts_in_chunks_of_512_and_blocks_far_behind_the_window(name: str) -> None:
    _, _, reference = tiny(name)
    model = model_of(name)
    text = torch.randint(3, VOCAB, (1, 1100), generator=torch.Generator().manual_seed(2))
    want = reference(text)
    cache = model.make_cache(1100)
    logits = model.prefill(text[:, :1090], cache)
    torch.testing.assert_close(logits, want[:, 1089:1090], atol=TOLERANCE, rtol=0)
    junk = torch.full((1, 8), 5)
    model.verify(junk, torch.tensor([1090]), cache)
    logits = model.verify(text[:, 1090:1098], torch.tensor([1090]), cache, last=3)
    torch.testing.assert_close(logits, want[:, 1095:1098], atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize("prompt_size", [5, 100])
def test_greedy_text_of_a_windowed_model_is_that_of_transformers(prompt_size: int) -> None:
    _, _, hf = build("mistral")
    assert isinstance(hf, transformers.MistralForCausalLM)
    prompt = torch.randint(3, VOCAB, (1, prompt_size), generator=torch.Generator().manual_seed(3))
    want = hf.generate(prompt, max_new_tokens=100, do_sample=False, eos_token_id=None, pad_token_id=0)[0]

    model = model_of("mistral")
    cache = model.make_cache(prompt_size + 100)
    token = model.prefill(prompt, cache)[0, -1].argmax()
    got = [*prompt[0].tolist(), token.item()]
    while len(got) < prompt_size + 100:
        idx = torch.tensor([[got[-1], 5, 6, 7]])
        logits = model.verify(idx, torch.tensor([len(got) - 1]), cache)
        got.append(logits[0, 0].argmax().item())
    assert got == want.tolist()


@pytest.mark.parametrize("name", ["llama-3", "gemma-2", "mixtral"])
def test_taps_show_the_residual_stream_that_transformers_shows(name: str) -> None:
    _, _, hf = build(name)
    idx = torch.randint(3, VOCAB, (1, 20), generator=torch.Generator().manual_seed(4))
    with torch.no_grad():
        states = hf(idx, output_hidden_states=True).hidden_states  # embedding, after block 0, after the final norm
    want = torch.cat((states[2], states[1]), dim=-1)
    model = model_of(name)
    cache = model.make_cache(20)
    logits, hidden = model.prefill(idx[:, :15], cache, taps=(-1, 0), chunk_size=4)
    torch.testing.assert_close(hidden, want[:, :15], atol=TOLERANCE, rtol=0)
    assert logits.shape == (1, 1, VOCAB)
    logits, hidden = model.verify(idx[:, 15:], torch.tensor([15]), cache, last=2, taps=(-1, 0))
    torch.testing.assert_close(hidden, want[:, 15:], atol=TOLERANCE, rtol=0)
    assert logits.shape == (1, 2, VOCAB)


def test_an_early_exit_is_the_model_of_the_first_blocks() -> None:
    config, state_dict, _ = tiny("llama-3")
    short = litgpt.model.GPT(dataclasses.replace(config, n_layer=1)).eval()
    short.load_state_dict({key: value for key, value in state_dict.items() if ".h.1." not in key})
    model = model_of("llama-3")
    idx = torch.randint(3, VOCAB, (1, 8), generator=torch.Generator().manual_seed(5))
    logits = model.verify(idx, torch.tensor([0]), model.make_cache(8), n_layer=1)
    with torch.no_grad():
        torch.testing.assert_close(logits, short(idx), atol=TOLERANCE, rtol=0)


def test_litgpts_own_loop_runs_on_the_model_and_finds_the_same_text() -> None:
    config, state_dict, _ = tiny("llama-3")
    prompt = torch.randint(3, VOCAB, (600,), generator=torch.Generator().manual_seed(6))
    texts = []
    for model in (litgpt.model.GPT(config).eval(), GPT(config).eval()):
        model.load_state_dict(state_dict)
        model.max_seq_length = 650
        model.set_kv_cache(batch_size=1)
        texts.append(litgpt.generate.base.generate(model, prompt, 650, temperature=0.0))
    assert torch.equal(*texts)


def test_litgpts_convention_without_the_last_position_reads_the_whole_cache() -> None:
    model, (_, _, reference) = model_of("gemma-3"), tiny("gemma-3")
    idx = torch.randint(3, VOCAB, (2, 40), generator=torch.Generator().manual_seed(7))
    model.max_seq_length = 64
    model.set_kv_cache(batch_size=2)
    model(idx[:, :30], torch.arange(30))
    torch.testing.assert_close(model(idx[:, 30:], torch.arange(30, 40)), reference(idx)[:, 30:], atol=TOLERANCE, rtol=0)
    model.clear_kv_cache()
    with pytest.raises(TypeError, match="set_kv_cache"):
        model(idx[:, :1], torch.tensor([40]))


def test_checkpoints_with_interleaved_qkv_rows_load_as_in_litgpt() -> None:
    config, state_dict, _ = tiny("llama-3")
    generator = torch.Generator().manual_seed(8)
    legacy = {key.replace("attn.qkv", "attn.attn"): value for key, value in state_dict.items()}
    for key in legacy:
        if "attn.attn" in key:
            legacy[key] = torch.randn(legacy[key].shape, generator=generator)
    theirs, ours = litgpt.model.GPT(config), GPT(config)
    theirs.load_state_dict(dict(legacy))
    ours.load_state_dict(dict(legacy), assign=True)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(parameter, ours.get_parameter(name)), name


def test_the_models_parameters_are_named_as_litgpts() -> None:
    for name in FAMILIES:
        config, state_dict, _ = tiny(name)
        with torch.device("meta"):
            model = GPT(config)
        assert {key: tuple(value.shape) for key, value in model.state_dict().items()} == {
            key: tuple(value.shape) for key, value in state_dict.items()
        }


def test_the_context_length_limits_committed_tokens_and_not_the_last_blocks_overhang() -> None:
    model = model_of("llama-3")
    config = model.config
    with pytest.raises(ValueError, match=r"4097 positions.*4096"):
        model.make_cache(config.block_size + 1)
    with pytest.raises(ValueError, match=r"4097 positions.*4096"):
        model.max_seq_length = config.block_size + 1
    cache = model.make_cache(config.block_size, width=8)
    logits = model.verify(torch.ones(1, 8, dtype=torch.int64), torch.tensor([config.block_size - 1]), cache)
    assert logits.isfinite().all()


def test_two_texts_at_once_are_two_caches_over_one_model() -> None:
    model, (_, _, reference) = model_of("qwen-3"), tiny("qwen-3")
    texts = torch.randint(3, VOCAB, (2, 1, 40), generator=torch.Generator().manual_seed(9))
    caches = [model.make_cache(40), model.make_cache(200)]
    for text, cache in zip(texts, caches):
        model.prefill(text[:, :20], cache)
    for at in range(20, 40, 4):
        for text, cache in zip(texts, caches):
            logits = model.verify(text[:, at : at + 4], torch.tensor([at]), cache)
            torch.testing.assert_close(logits, reference(text)[:, at : at + 4], atol=TOLERANCE, rtol=0)


def test_a_cache_made_in_inference_mode_serves_outside_of_it() -> None:
    model, (_, _, reference) = model_of("llama-2"), tiny("llama-2")
    text = torch.randint(3, VOCAB, (1, 20), generator=torch.Generator().manual_seed(10))
    with torch.inference_mode():
        cache = model.make_cache(20)
        model.prefill(text[:, :10], cache)
    logits = model.verify(text[:, 10:], torch.tensor([10]), cache)
    torch.testing.assert_close(logits, reference(text)[:, 10:], atol=TOLERANCE, rtol=0)
