"""EAGLE-3 heads: drafts and logits are those of EAGLE's own code, and of speculators', after any rounds."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import litgpt.model
import pytest
import torch
from checkpoints import lively_weights, tiny_config, write_checkpoint
from engines import request
from heads import Told, bare_target, fixture, proposals_of, random_eagle, write_folder
from host_reads import HostReads
from torch import Tensor

from litspec import SpecLLM
from litspec.drafters import Drafter, DraftSession, Proposal
from litspec.drafters.eagle import Eagle, EagleSession, load_eagle
from litspec.engine.engine import Engine
from litspec.errors import InputError
from litspec.model import GPT
from litspec.sampling import Sampling
from litspec.testing import check_drafter

RECORDED, CONFIG = fixture("eagle3")
WEIGHTS = {name.removeprefix("weights."): w for name, w in RECORDED.items() if name.startswith("weights.")}
EMBEDDING = WEIGHTS["embed_tokens.weight"]
TOKENS, STATES = RECORDED["tokens"].tolist(), RECORDED["states"]
TARGET = bare_target(EMBEDDING)
IDS = torch.arange(48) + WEIGHTS["d2t"]


def recorded_head(folder: Path, **fields: Any) -> Eagle:
    return load_eagle(write_folder(folder, CONFIG | fields, WEIGHTS), TARGET)


# --- the reference ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("chunk", [None, 1, 4])
@pytest.mark.parametrize("pickled", [False, True])
def test_drafts_and_logits_are_those_of_eagle_s_own_code_after_scripted_rounds(tmp_path, chunk, pickled):
    head = load_eagle(write_folder(tmp_path, CONFIG, WEIGHTS, pickled=pickled), TARGET)
    assert head.taps == (1, 3, 4), "blocks 1, L / 2 - 1 and L - 4 of 8"
    text = Told(head, TARGET, TOKENS, STATES)
    for known, drafts, logits in zip(RECORDED["known"].tolist(), RECORDED["drafts"], RECORDED["logits"]):
        text.tell(known, chunk)
        for _ in range(2):  # proposing does not change the state
            found, numbers = text.propose(4)
            assert found == drafts.tolist()
            torch.testing.assert_close(numbers[:, IDS], logits, atol=1e-5, rtol=1e-5)
        others = torch.ones(97, dtype=torch.bool)
        others[IDS] = False
        assert (numbers[:, others] == float("-inf")).all(), "ids that the head does not know"


SPECULATORS, FLAGS = fixture("eagle3_speculators")


@pytest.mark.parametrize("name", list(FLAGS))
def test_logits_are_those_of_speculators_with_each_of_its_flags(tmp_path, name):
    """Its later steps are given the text's own tokens, so ours are too."""
    more = {name.removeprefix("weights."): w for name, w in SPECULATORS.items() if name.startswith("weights.")}
    weights = {name.replace("midlayer.", "layers.0."): w for name, w in (WEIGHTS | more).items()}
    fields = {"transformer_layer_config": CONFIG, "draft_vocab_size": 48, "eagle_aux_hidden_state_layer_ids": [2, 4, 5]}
    head = load_eagle(write_folder(tmp_path, fields | FLAGS[name], weights), TARGET)
    assert head.taps == (1, 3, 4)
    text = Told(head, TARGET, TOKENS, STATES)
    for row, logits in zip(SPECULATORS["rows"].tolist(), SPECULATORS[name]):
        text.tell(row + 2)
        text.recorder.follow = TOKENS[row + 2 :]
        _, numbers = text.propose(3)
        torch.testing.assert_close(numbers[:, IDS], logits, atol=1e-5, rtol=1e-5)


def test_a_prompt_longer_than_a_chunk_is_read_as_if_at_once(tmp_path):
    head = recorded_head(tmp_path, max_position_embeddings=2048)
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(97, (1300,), generator=generator).tolist()
    states = torch.randn(1299, 48, generator=generator)
    results = []
    for chunk in (None, 512, 100, 1299):
        text = Told(head, TARGET, tokens, states, length=1400)
        text.tell(1300, chunk)
        results.append(text.propose(7))
    for drafts, logits in results[1:]:
        assert drafts == results[0][0] and torch.equal(logits, results[0][1]), "cut in the same places"


def test_proposing_reads_nothing_to_the_host(tmp_path):
    text = Told(recorded_head(tmp_path), TARGET, TOKENS, STATES)
    text.tell(9)
    with torch.inference_mode(), HostReads() as reads:
        text.session.propose(0, text.known - 1, 4)
        text.tell(12)
        text.session.propose(0, text.known - 1, 4)
    assert reads.seen == []


def test_a_text_of_one_token_is_drafted_for_once_it_has_a_second(tmp_path):
    head = recorded_head(tmp_path)
    text = Told(head, TARGET, TOKENS, STATES)
    text.tell(1)
    assert text.session.propose(TOKENS[0], 0, 4).tokens.tolist() == []
    text.tell(2)
    assert len(text.propose(4)[0]) == 4


def test_norm_output_and_norms_before_the_projection_change_what_they_should(tmp_path):
    plain = Told(recorded_head(tmp_path / "a"), TARGET, TOKENS, STATES)
    plain.tell(12)
    _, logits = plain.propose(2)
    normed = Told(recorded_head(tmp_path / "b", norm_output=True), TARGET, TOKENS, STATES)
    normed.tell(12)
    _, other = normed.propose(2)
    torch.testing.assert_close(other[0], logits[0])
    assert (other[1, IDS] - logits[1, IDS]).abs().max() > 0.01, "the next step reads a normed state"

    # A head whose norms were folded into states that it is told already normed.
    scales = 0.5 + torch.rand(3, 16, generator=torch.Generator().manual_seed(2))
    more = {f"fc_norm.{i}.weight": scale for i, scale in enumerate(scales)}
    head = load_eagle(write_folder(tmp_path / "c", CONFIG | {"fc_norm": True}, WEIGHTS | more), TARGET)
    parts = [torch.nn.functional.rms_norm(part, (16,), scale, 1e-6) for part, scale in zip(STATES.chunk(3, -1), scales)]
    by_head, by_hand = (
        Told(head, TARGET, TOKENS, STATES),
        Told(plain_head(tmp_path), TARGET, TOKENS, torch.cat(parts, -1)),
    )
    whole = scales.flatten()
    more = {"input_norm.weight": whole}
    head = load_eagle(write_folder(tmp_path / "e", CONFIG | {"norm_before_fc": True}, WEIGHTS | more), TARGET)
    by_one = Told(head, TARGET, TOKENS, STATES)
    one_by_hand = Told(plain_head(tmp_path), TARGET, TOKENS, torch.nn.functional.rms_norm(STATES, (48,), whole, 1e-6))
    for text, expected in ((by_head, by_hand), (by_one, one_by_hand)):
        text.tell(12)
        expected.tell(12)
        torch.testing.assert_close(text.propose(4)[1], expected.propose(4)[1], atol=1e-5, rtol=1e-5)


def plain_head(tmp_path: Path) -> Eagle:
    return recorded_head(tmp_path / "plain")


# --- rounds -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> SpecLLM:
    config = tiny_config(n_layer=6, block_size=1024)
    folder = tmp_path_factory.mktemp("target")
    return SpecLLM.load(write_checkpoint(folder, config, weights=lively_weights(config)), drafter="none")


def head_for(llm: SpecLLM, folder: Path, **fields: Any) -> Eagle:
    hf, weights = random_eagle(llm.placed.model.config, **fields)
    return load_eagle(write_folder(folder, hf, weights), llm.placed.model)


def states_of_litgpt(model: GPT, tokens: Sequence[int], taps: Sequence[int]) -> Tensor:
    """States after the blocks of LitGPT's own model, in one pass without a cache: `(T, taps * C)`."""
    reference = litgpt.model.GPT(model.config).eval()
    reference.load_state_dict(model.state_dict())
    seen: dict[int, Tensor] = {}
    for i, block in enumerate(reference.transformer.h):
        block.register_forward_hook(lambda module, inputs, output, i=i: seen.update({i: output[0]}))
    with torch.inference_mode():
        reference(torch.tensor([list(tokens)]))
    return torch.cat([seen[i] for i in taps], dim=-1)


def test_after_rounds_drafts_are_those_of_a_fresh_pass_over_litgpt_s_states(llm: SpecLLM, tmp_path: Path) -> None:
    """Taps that are one block off, keys and values kept of drafts, rows that a prefix left blank: all would differ."""
    from litspec.testing import _Text

    model = llm.placed.model
    head = head_for(llm, tmp_path, draft_vocab_size=64)
    rng = random.Random(0)
    recorder = Told(head, model, [1, 2], torch.zeros(1, 3 * 32)).recorder
    text = _Text(llm, head, [rng.randrange(256) for _ in range(20)], 400, recorder)
    for _ in range(12):
        proposal = text.propose(rng.randint(1, 7))
        text.commit(proposal, rng.randint(0, len(proposal.tokens)), rng.randrange(256))
        recorder.logits.clear()
        drafts, logits = text.propose(7).tokens.tolist(), torch.stack(recorder.logits)
        fresh = Told(head, model, text.tokens, states_of_litgpt(model, text.tokens, head.taps))
        fresh.tell(len(text.tokens))
        expected, numbers = fresh.propose(7)
        assert drafts == expected
        torch.testing.assert_close(logits, numbers, atol=2e-4, rtol=1e-4)
    wrong = Told(head, model, text.tokens, states_of_litgpt(model, text.tokens, [i + 1 for i in head.taps]))
    wrong.tell(len(text.tokens))
    assert (wrong.propose(1)[1] - numbers[:1]).nan_to_num(0).abs().max() > 0.05, "a case that proves nothing"


class Watching(Drafter):
    """Stores the states that it receives."""

    def __init__(self, taps: tuple[int, ...]) -> None:
        self.taps = taps
        self.sessions: list[WatchingSession] = []

    def start(self, target: Any, max_length: int, sampler: Any) -> WatchingSession:
        self.sessions.append(WatchingSession())
        return self.sessions[-1]


class WatchingSession(DraftSession):
    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.states: list[Tensor] = []

    def commit(self, tokens: Sequence[int], input_pos: int, hidden: Tensor | None = None) -> None:
        assert hidden is not None and len(hidden) == len(tokens) and input_pos == len(self.tokens)
        self.tokens += tokens
        self.states.append(hidden.clone())

    def propose(self, token: int, input_pos: int, k: int) -> Proposal:
        return Proposal(torch.full((k,), token))


def test_texts_together_receive_the_states_of_their_own_taps_also_a_repeated_tap(llm: SpecLLM) -> None:
    placed = llm.placed
    watching = [Watching((1, 3, 3)), Watching((4, 1)), Watching((3, 1, 3))]
    engine = Engine(placed, None, slots=3, max_length=80)
    for i, drafter in enumerate(watching):
        engine.drafter = drafter
        engine.add(request(placed, drafter, Sampling(temperature=0), new=30, prompt=[7 + i, 3, 5]))
        engine.step()
    while len(engine):
        engine.step()
    for drafter in watching:
        (session,) = drafter.sessions
        found, expected = torch.cat(session.states), states_of_litgpt(placed.model, session.tokens, drafter.taps)
        assert len(found) == 33 and not found[0].any()
        torch.testing.assert_close(found[1:], expected[:-1], atol=1e-4, rtol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"draft_vocab_size": 64}, {"norm_output": True}])
def test_a_head_follows_the_drafter_protocol(llm: SpecLLM, tmp_path: Path, fields: dict[str, Any]) -> None:
    check_drafter(head_for(llm, tmp_path, **fields), llm, rounds=5, draws=1024)


@pytest.mark.slow
def test_a_head_that_keeps_the_chain_s_keys_of_accepted_tokens_is_detected(llm: SpecLLM, tmp_path: Path) -> None:
    class Stale(EagleSession):
        """Keeps the keys and values of accepted drafts."""

        drafted: Sequence[int] = ()

        def propose(self, token: int, input_pos: int, k: int) -> Proposal:
            proposal = super().propose(token, input_pos, k)
            self.drafted = proposal.tokens.tolist()
            return proposal

        def commit(self, tokens: Sequence[int], input_pos: int, hidden: Tensor | None = None) -> None:
            kept = 0
            while kept < min(len(tokens) - 1, len(self.drafted) - 1) and tokens[kept] == self.drafted[kept]:
                kept += 1
            self.filled += kept
            self._told += kept
            super().commit(tokens[kept:], input_pos + kept, hidden[kept:])

    head = head_for(llm, tmp_path)
    head.start = lambda *args: Stale(head, *args)
    with pytest.raises(AssertionError, match="Rollback"):
        check_drafter(head, llm, rounds=5, draws=0)


def test_a_prompt_that_the_target_knows_already_is_drafted_for_as_the_first_time(llm: SpecLLM, tmp_path: Path) -> None:
    head = head_for(llm, tmp_path)
    first, again, longer = proposals_of(llm, head, ["a" * 600, "a" * 600, "a" * 600 + "b"])
    assert first == again and len(first) > 1
    assert proposals_of(llm, head, ["a" * 600 + "b"]) == [longer]


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_texts_of_the_embedded_target_are_the_same_with_and_without_a_head(tmp_path: Path, precision: str) -> None:
    plain = SpecLLM.load(precision=precision, accelerator="cpu", drafter="none")
    drafted = plain.with_drafter(head_for(plain, tmp_path, draft_vocab_size=300))
    assert drafted.drafter.layers.transformer.h[0].mlp.proj.weight.dtype == plain.placed.model.lm_head.weight.dtype
    for settings in ({"temperature": 0.0}, {"temperature": 0.8, "top_k": 50, "sampler": "coupled", "seed": 3}):
        prompts = ["It was", "Captain Wentworth had no fortune."]
        alone = plain.generate(prompts, max_new_tokens=40, **settings)
        texts = drafted.generate(prompts, max_new_tokens=40, speculative_k=4, **settings)
        assert [text.token_ids for text in texts] == [text.token_ids for text in alone]
        assert sum(text.stats.proposed for text in texts) > 0


def test_after_the_head_s_context_nothing_is_drafted_and_a_note_reports_it(llm, tmp_path):
    head = head_for(llm, tmp_path, max_position_embeddings=40)
    assert len(head.notes) == 1 and "40 tokens" in head.notes[0] and "1024" in head.notes[0]
    out = llm.with_drafter(head).generate("a" * 20, max_new_tokens=60, temperature=0.0, speculative_k=4)
    assert out.token_ids == llm.generate("a" * 20, max_new_tokens=60, temperature=0.0).token_ids
    at = 20
    for block in out.blocks:
        assert block.proposed <= max(40 - at + 1, 0)
        at += len(block.tokens)
    assert out.blocks[1].proposed == 4 and out.blocks[-1].proposed == 0


# --- folders ----------------------------------------------------------------------------------------------------------


def test_ids_of_taps_are_read_in_both_conventions(llm, tmp_path):
    def taps(**fields: Any) -> tuple[int, ...]:
        return head_for(llm, tmp_path / str(len(list(tmp_path.iterdir()))), **fields).taps

    name = "eagle_aux_hidden_state_layer_ids"
    assert taps() == (1, 2, 2)
    assert taps(eagle_config={name: [1, 3, 5]}) == (1, 3, 5), "blocks"
    assert taps(eagle_config={name: [2, 4, 6]}) == (1, 3, 5), "states"
    assert taps(**{name: [2, 3, 5]}) == (1, 2, 4)


def test_names_and_nesting_of_speculators_are_read_too(tmp_path):
    weights = {name.replace("midlayer.", "layers.0."): weight for name, weight in WEIGHTS.items()}
    nested = {"draft_vocab_size": 48, "transformer_layer_config": CONFIG}
    head = load_eagle(write_folder(tmp_path, nested, weights), TARGET)
    text = Told(head, TARGET, TOKENS, STATES)
    text.tell(12)
    assert text.propose(4)[0] == RECORDED["drafts"][0].tolist()


def test_an_embedding_of_the_head_s_own_is_used_and_a_copy_of_the_target_s_is_not_kept(tmp_path):
    assert recorded_head(tmp_path / "a").embedding is None
    other = WEIGHTS | {"embed_tokens.weight": EMBEDDING.flip(0)}
    head = load_eagle(write_folder(tmp_path / "b", CONFIG, other), TARGET)
    text, flipped = Told(head, TARGET, TOKENS, STATES), bare_target(EMBEDDING.flip(0))
    text.tell(12)
    expected = Told(recorded_head(tmp_path / "c"), flipped, TOKENS, STATES)
    expected.tell(12)
    assert text.propose(4)[0] == expected.propose(4)[0] != RECORDED["drafts"][0].tolist()


def without(*names: str) -> dict[str, Tensor]:
    return {name: weight for name, weight in WEIGHTS.items() if name not in names}


@pytest.mark.parametrize(
    ("fields", "weights", "sentence"),
    [
        ({"target_hidden_size": 32}, WEIGHTS, "states of 32 channels, but the target's have 16"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 6, 10]}, WEIGHTS, r"blocks \[1, 5, 9\], but the target has 8 blocks"),
        ({"vocab_size": 200}, WEIGHTS, "vocabulary of 200 ids, but the target has 97"),
        ({"eagle_aux_hidden_state_layer_ids": [2, 6]}, WEIGHTS, r"\(16, 48\); 2 states .* need \(16, 32\)"),
        ({}, WEIGHTS | {"d2t": torch.full((48,), 90)}, "maps to id 137, but the target has 97"),
        ({}, WEIGHTS | {"d2t": torch.zeros(7)}, "7 entries, but the head gives 48"),
        ({}, without("d2t"), "48 of 97 logits, and there is no 'd2t'"),
        ({}, without("fc.weight"), "lack 'fc.weight'"),
        ({}, without("midlayer.hidden_norm.weight"), "no EAGLE-3 head"),
        ({}, without("midlayer.self_attn.k_proj.weight"), "lack 'self_attn.k_proj.weight'"),
        ({}, WEIGHTS | {"layers.1.mlp.up_proj.weight": torch.zeros(2)}, "only heads with one layer"),
        ({"intermediate_size": 25}, WEIGHTS, r"has shape \(24, 16\), but the config requires \(25, 16\)"),
        ({"hidden_size": "x"}, WEIGHTS, "hidden_size as a whole number, got 'x'"),
        ({"hidden_act": "gelu"}, WEIGHTS, "'gelu'"),
        ({"eagle_config": [1, 2, 3]}, WEIGHTS, r"eagle_config as an object, got \[1, 2, 3\]"),
        ({"layer_types": ["sliding_attention"], "sliding_window": 32}, WEIGHTS, r"sliding_window 32\)"),
        ({"sliding_window": 32, "model_type": "mistral"}, WEIGHTS, r"sliding_window 32\)"),
        ({"sliding_window": 32, "use_sliding_window": True, "model_type": "qwen3"}, WEIGHTS, r"sliding_window 32\)"),
        ({"rope_scaling": {"rope_type": "yarn"}}, WEIGHTS, "rope type 'yarn'"),
    ],
)
def test_what_does_not_fit_is_refused_with_a_sentence_that_names_both_numbers(tmp_path, fields, weights, sentence):
    with pytest.raises(InputError, match=sentence):
        load_eagle(write_folder(tmp_path, CONFIG | fields, weights), TARGET)


@pytest.mark.parametrize(
    "fields",
    [
        {"sliding_window": 4096, "model_type": "mistral"},
        {"sliding_window": 32, "model_type": "llama"},
        {"sliding_window": 32, "model_type": "qwen3", "use_sliding_window": False},
        {"sliding_window": 32, "layer_types": ["full_attention"]},
    ],
)
def test_a_window_that_is_never_reached_or_is_off_is_ignored(tmp_path: Path, fields: dict[str, Any]) -> None:
    text = Told(recorded_head(tmp_path, **fields), TARGET, TOKENS, STATES)
    text.tell(12)
    assert text.propose(4)[0] == RECORDED["drafts"][0].tolist()


def test_files_that_are_missing_damaged_or_would_run_code_are_refused(tmp_path):
    with pytest.raises(InputError, match=r"config\.json.* cannot be read as JSON: .*No such file"):
        load_eagle(tmp_path, TARGET)
    folder = write_folder(tmp_path / "a", CONFIG, WEIGHTS)
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(InputError, match="is damaged"):
        load_eagle(folder, TARGET)
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"no \*\.safetensors and no pytorch_model\.bin"):
        load_eagle(folder, TARGET)
    torch.save({"fc.weight": Path}, folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="would run code"):
        load_eagle(folder, TARGET)
    (folder / "config.json").write_text("[1]")
    with pytest.raises(InputError, match="holds a list"):
        load_eagle(folder, TARGET)
