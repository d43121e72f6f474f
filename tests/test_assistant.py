"""The single-position assistant: drafts are those of transformers' class on the same keys, values and states."""

from __future__ import annotations

import random
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import lively_weights, tiny_config, write_checkpoint
from heads import Recorder, fixture, write_folder
from litgpt.config import Config
from torch import Tensor

from litspec import SpecLLM
from litspec.drafters.assistant import Assistant, load_assistant
from litspec.drafters.folders import kind_of
from litspec.errors import InputError
from litspec.model import GPT
from litspec.testing import check_drafter

RECORDED, CONFIG = fixture("assistant")
WEIGHTS = {name.removeprefix("weights."): w for name, w in RECORDED.items() if name.startswith("weights.")}
WINDOW = CONFIG["text_config"]["sliding_window"]


def gemma_like(**fields: Any) -> Config:
    """Gemma 3's structure: scaled embeddings, norms on both sides, two sliding layers before each full one."""
    defaults = dict(
        name="Gemma-3-like",
        n_layer=4,
        n_embd=24,
        n_head=4,
        n_query_groups=2,
        head_size=8,
        mlp_class_name="GemmaMLP",
        gelu_approximate="tanh",
        scale_embeddings=True,
        norm_qk=True,
        post_attention_norm=True,
        post_mlp_norm=True,
        sliding_window_size=WINDOW,
        sliding_window_indices=[1, 1, 0, 1],
        attention_scores_scalar=8,
    )
    return tiny_config(**(defaults | fields))


@pytest.fixture(scope="module")
def target() -> GPT:
    model = GPT(gemma_like(vocab_size=96, padded_vocab_size=96)).eval().requires_grad_(False)
    model.load_state_dict(model.state_dict() | {"transformer.wte.weight": RECORDED["embed"]})
    return model


# --- the reference ----------------------------------------------------------------------------------------------------


def replay(assistant: Assistant, model: GPT, stale: bool = False) -> None:
    """Plays the recorded rounds; the cache holds stale rows after the committed ones, as after rejected proposals."""
    cache = model.make_cache(64)
    recorder = Recorder()
    session = assistant.start(
        SimpleNamespace(model=model, config=model.config, cache=cache, device=torch.device("cpu")), 64, recorder
    )
    tokens, states = RECORDED["tokens"].tolist(), RECORDED["states"]
    told = 0
    for known, drafts, logits in zip(RECORDED["known"].tolist(), RECORDED["drafts"], RECORDED["logits"], strict=True):
        n = known - 1
        for layer, kind in ((3, "sliding_attention"), (2, "full_attention")):
            for buffer, lent in zip((cache.k, cache.v), RECORDED[f"lent.{kind}"], strict=True):
                buffer[layer].fill_(9.0)  # must not be read
                buffer[layer][:, :, :n] = lent[:, :, :n]
        rows = torch.cat((torch.zeros(1, 24), states))[told:known].clone()
        session.commit(tokens[told:known], told, rows)
        rows.fill_(torch.nan)
        told = known
        for _ in range(2):  # proposing does not change the state
            recorder.logits.clear()
            found = session.propose(tokens[n], n + stale, 4).tokens.tolist()
            torch.testing.assert_close(torch.stack(recorder.logits), logits, atol=1e-4, rtol=1e-4)
            assert found == drafts.tolist()


def test_drafts_are_those_of_transformers_after_rounds_within_and_beyond_the_window(tmp_path, target):
    folder = write_folder(tmp_path, CONFIG, WEIGHTS)
    assert kind_of(folder) == "assistant"
    replay(load_assistant(folder, target), target)


def test_a_row_of_a_refused_proposal_would_be_noticed(tmp_path, target):
    with pytest.raises(AssertionError):
        replay(load_assistant(write_folder(tmp_path, CONFIG, WEIGHTS), target), target, stale=True)


# --- what does not fit ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "inner", "sentence"),
    [
        ({"backbone_hidden_size": 32}, {}, "with 32 channels, but this one has 24"),
        ({}, {"sliding_window": 16}, "with 16 positions per window, but this one has 8"),
        ({}, {"head_dim": 16}, r"with 16 elements per head \(sliding_attention\), but this one has 8"),
        ({}, {"num_key_value_heads": 1}, r"with 1 key and value heads \(sliding_attention\), but this one has 2"),
        ({}, {"vocab_size": 500}, "vocabulary of 500 ids, but the target has 96"),
        ({}, {"enable_moe_block": True}, "enable_moe_block to True"),
        ({}, {"num_kv_shared_layers": 1}, "all 3 layers, but shares them in 1"),
        ({}, {"layer_types": ["full_attention"]}, "each of the 3 layers in layer_types"),
        ({}, {"rope_parameters": {}}, "rope_type 'default' or 'proportional'"),
        ({"use_ordered_embeddings": True}, {}, "clustered head"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence(tmp_path, target, fields, inner, sentence):
    config = CONFIG | fields | {"text_config": CONFIG["text_config"] | inner}
    with pytest.raises(InputError, match=sentence):
        load_assistant(write_folder(tmp_path, config, WEIGHTS), target)


def test_a_target_without_windows_and_a_missing_weight_are_refused(tmp_path, target):
    plain = GPT(gemma_like(vocab_size=96, padded_vocab_size=96, sliding_window_size=None, sliding_window_indices=None))
    with pytest.raises(InputError, match="sliding_attention, but the target has none"):
        load_assistant(write_folder(tmp_path, CONFIG, WEIGHTS), plain)
    fewer = {name: weight for name, weight in WEIGHTS.items() if name != "model.norm.weight"}
    with pytest.raises(InputError, match=r"lack 'model\.norm\.weight'"):
        load_assistant(write_folder(tmp_path / "fewer", CONFIG, fewer), target)


# --- with a target ----------------------------------------------------------------------------------------------------


def for_vocabulary(size: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The recorded assistant with another vocabulary."""
    embedding = 0.3 * torch.randn(size, 16, generator=torch.Generator().manual_seed(0))
    config = CONFIG | {"text_config": CONFIG["text_config"] | {"vocab_size": size}}
    return config, WEIGHTS | {"model.embed_tokens.weight": embedding}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    config = gemma_like()
    return write_checkpoint(tmp_path_factory.mktemp("target"), config, weights=lively_weights(config))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_folder(tmp_path_factory.mktemp("assistant"), *for_vocabulary(264))


@pytest.mark.slow
def test_an_assistant_follows_the_drafter_protocol(checkpoint: Path, folder: Path) -> None:
    llm = SpecLLM.load(checkpoint, drafter="none")
    check_drafter(load_assistant(folder, llm.placed.model), llm, rounds=5, draws=512)


def test_after_rounds_drafts_are_those_of_a_fresh_pass(checkpoint: Path, folder: Path) -> None:
    """After rounds, unlike in a new pass, the cache holds rejected proposals after the text."""
    from litspec.testing import _Text

    llm = SpecLLM.load(checkpoint, drafter="none")
    assistant, model, rng = load_assistant(folder, llm.placed.model), llm.placed.model, random.Random(0)
    recorder = Recorder()
    text = _Text(llm, assistant, [rng.randrange(256) for _ in range(3 * WINDOW)], 200, recorder)
    for _ in range(8):
        proposal = text.propose(rng.randint(1, 7))
        text.commit(proposal, rng.randint(0, len(proposal.tokens)), rng.randrange(256))
        recorder.logits.clear()
        drafts, logits = text.propose(5).tokens.tolist(), torch.stack(recorder.logits)
        n = len(text.tokens) - 1
        cache = model.make_cache(256)
        _, states = model.prefill(torch.tensor([text.tokens[:n]]), cache, taps=(-1,))
        fresh = Recorder()
        lent = SimpleNamespace(model=model, config=model.config, cache=cache, device=torch.device("cpu"))
        session = assistant.start(lent, 256, fresh)
        session.commit(text.tokens, 0, torch.cat((torch.zeros(1, 24), states[0])))
        assert session.propose(text.tokens[n], n, 5).tokens.tolist() == drafts
        torch.testing.assert_close(torch.stack(fresh.logits), logits, atol=2e-4, rtol=1e-4)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_texts_are_the_same_with_and_without_it(checkpoint: Path, folder: Path, precision: str) -> None:
    plain = SpecLLM.load(checkpoint, precision=precision, accelerator="cpu", drafter="none")
    drafted = SpecLLM.load(checkpoint, precision=precision, accelerator="cpu", draft_dir=folder)
    prompts = ["It was", "a prompt that is longer than the window", "It was"]
    for settings in ({"temperature": 0.0}, {"temperature": 0.8, "top_k": 50, "sampler": "coupled", "seed": 3}):
        alone = plain.generate(prompts, max_new_tokens=30, **settings)
        texts = drafted.generate(prompts, max_new_tokens=30, speculative_k=3, **settings)
        assert [text.token_ids for text in texts] == [text.token_ids for text in alone]
        assert sum(text.stats.proposed for text in texts) > 0
