"""Log-probabilities of returned tokens, equal to one forward of litgpt's model without a cache; scores; samples."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import litgpt.model
import pytest
import torch
from checkpoints import byte_level_tokenizer, lively_weights, tiny_config, write_checkpoint, write_pair
from engines import DRAFT, PROMPT, SEED, TARGET, VOCAB, choose_k, litgpt_model, place, tokens_of
from host_reads import HostReads
from test_logits import RULES, SAMPLINGS, by_hand, warped

from litspec import SpecLLM
from litspec.__main__ import main
from litspec.config import GenerateConfig
from litspec.drafters import make_drafter
from litspec.engine.engine import Engine, Request
from litspec.engine.sequence import Block
from litspec.errors import InputError
from litspec.jobs import run_job
from litspec.logits import LogitsProcessor, LogitsRules
from litspec.logprobs import Logprobs, TokenLogprobs
from litspec.sampling import Sampling, make_sampler
from litspec.stopping import StopTokens

CLOSE = dict(rel=0, abs=1e-4)


def by_litgpt(ids: Sequence[int], model: torch.nn.Module | None = None) -> torch.Tensor:
    """Log-probabilities that follow each token of a text, by one forward without a cache: (T, V)."""
    with torch.no_grad():
        return (model or litgpt_model(TARGET))(torch.tensor([list(ids)]))[0].log_softmax(-1)


def check(found: Sequence[TokenLogprobs], tokens: Sequence[int], rows: torch.Tensor, n: int) -> None:
    """Compares with log-probabilities (T, V), a row for each token."""
    assert [each.token_id for each in found] == list(tokens)
    for each, row in zip(found, rows, strict=True):
        assert each.logprob == pytest.approx(float(row[each.token_id]), **CLOSE)
        values = row.topk(n).values
        values = values[values > float("-inf")].tolist()
        assert [value for _, value in each.top] == pytest.approx(values, **CLOSE)
        assert [float(row[id_]) for id_, _ in each.top] == pytest.approx(values, **CLOSE)


def run(
    engine: Engine, wanted: Sequence[tuple[Sampling, Logprobs | None, LogitsRules]], new: int = 24
) -> list[list[Block]]:
    blocks: dict[int, list[Block]] = {}
    for sampling, logprobs, rules in wanted:
        processor = LogitsProcessor(rules, PROMPT, VOCAB) if rules else None
        sampler = make_sampler(sampling, seed=SEED, processor=processor, logprobs=logprobs)
        chosen = choose_k(4, engine.placed, engine.drafter)
        blocks[engine.add(Request(PROMPT, len(PROMPT) + new, StopTokens(), sampler, chosen))] = []
    while len(engine):
        for handle, block in engine.step().items():
            assert isinstance(block, Block)
            blocks[handle].append(block)
    return list(blocks.values())


def engine_of(drafter: str, slots: int = 1) -> Engine:
    placed = place(TARGET, DRAFT)
    return Engine(placed, make_drafter(drafter, placed), slots=slots, max_length=len(PROMPT) + 24)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", ["none", "draft_model", "early_exit"])
def test_at_every_place_of_every_block_they_are_those_of_one_uncached_forward(drafter: str, sampling: str) -> None:
    for n in (0, 3):
        (blocks,) = run(engine_of(drafter), [(SAMPLINGS[sampling], Logprobs(n), LogitsRules())])
        text = tokens_of(blocks)
        rows = by_litgpt([*PROMPT, *text])[len(PROMPT) - 1 : -1]
        check([each for block in blocks for each in block.logprobs], text, rows, n)
        assert all(len(block.logprobs) == len(block.tokens) for block in blocks)
    assert drafter == "none" or any(block.accepted for block in blocks)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_processed_ones_are_those_of_what_tokens_are_drawn_from(sampling: str) -> None:
    rules = LogitsRules(**(RULES["bad_words"] | RULES["frequency_penalty"] | RULES["logit_bias"]))
    settings = SAMPLINGS[sampling]
    (blocks,) = run(engine_of("draft_model"), [(settings, Logprobs(5, "processed"), rules)])
    text = tokens_of(blocks)
    raw = by_litgpt([*PROMPT, *text])[len(PROMPT) - 1 : -1]
    rows = []
    for i, row in enumerate(raw):
        scores = by_hand(row, rules, PROMPT, text[:i])
        rows.append(scores.log_softmax(-1) if settings.greedy else warped(scores, settings).log())
    check([each for block in blocks for each in block.logprobs], text, torch.stack(rows), 5)


def test_texts_that_want_them_and_texts_that_do_not_run_together() -> None:
    wanted = [
        (SAMPLINGS["greedy"], Logprobs(2), LogitsRules()),
        (SAMPLINGS["coupled"], None, LogitsRules()),
        (SAMPLINGS["coupled"], Logprobs(1), LogitsRules()),
        (SAMPLINGS["greedy"], None, LogitsRules()),
        (SAMPLINGS["greedy"], Logprobs(2), LogitsRules()),
    ]
    together = run(engine_of("draft_model", slots=4), wanted)
    for text, (sampling, logprobs, rules) in zip(together, wanted):
        (alone,) = run(engine_of("draft_model"), [(sampling, None, rules)])
        assert tokens_of(text) == tokens_of(alone)
        found = [each for block in text for each in block.logprobs]
        if logprobs is None:
            assert found == []
        else:
            rows = by_litgpt([*PROMPT, *tokens_of(text)])[len(PROMPT) - 1 : -1]
            check(found, tokens_of(text), rows, logprobs.n)


def test_they_come_with_the_one_read_of_a_round() -> None:
    engine = engine_of("draft_model")
    sampler = make_sampler(SAMPLINGS["greedy"], seed=SEED, logprobs=Logprobs(4))
    chosen = choose_k(4, engine.placed, engine.drafter)
    handle = engine.add(Request(PROMPT, len(PROMPT) + 24, StopTokens(), sampler, chosen))
    for _ in range(2):
        engine.step()
    with torch.inference_mode(), HostReads() as reads:
        block = engine.step()[handle]
    assert len(reads.seen) == 1
    assert isinstance(block, Block) and len(block.logprobs) == len(block.tokens) > 0


# --- the facade -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"), tiny_config(block_size=1400), noise=0.01)


@pytest.fixture(scope="module")
def llm(pair: tuple[Path, Path]) -> SpecLLM:
    return SpecLLM.load(*pair, accelerator="cpu", precision="32-true")


@pytest.fixture(scope="module")
def model(pair: tuple[Path, Path]) -> litgpt.model.GPT:
    config = tiny_config(block_size=1400)
    model = litgpt.model.GPT(config)
    model.load_state_dict(lively_weights(config))
    return model.eval()


def rows_of(model: torch.nn.Module, llm: SpecLLM, prompt: str, ids: Sequence[int]) -> torch.Tensor:
    before = llm.codec.encode(prompt).tolist()
    return by_litgpt([*before, *ids], model)[len(before) - 1 : -1]


def test_tokens_that_were_held_for_a_stop_come_with_theirs(llm: SpecLLM, model: torch.nn.Module) -> None:
    plain = llm.generate("abcabc", max_new_tokens=30, temperature=0)
    never, comes = plain.text[4:7] + "\x00\x01", plain.text[20:23]
    for stop in (never, comes, [never, comes]):
        out = llm.generate("abcabc", max_new_tokens=30, temperature=0, stop=stop, logprobs=2)
        assert out.logprobs is not None
        check(out.logprobs, out.token_ids, rows_of(model, llm, "abcabc", out.token_ids), 2)
        assert out.finish_reason == ("length" if stop == never else "stop")
    assert plain.logprobs is None


def test_json_and_job_lines_hold_them(
    llm: SpecLLM, pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings: dict[str, Any] = dict(max_new_tokens=6, temperature=0.8, top_k=50)
    out = llm.generate("abcabc", seed=1234, logprobs=1, **settings)
    expected = [each.as_dict() for each in out.logprobs or []]
    assert len(expected) == 6 and set(expected[0]) == {"token_id", "logprob", "top_logprobs"}
    folders = ["--checkpoint_dir", str(pair[0]), "--draft_dir", str(pair[1]), "--accelerator", "cpu"]
    shape = ["--prompt", "abcabc", "--max_new_tokens", "6", "--output_format", "json", "--logprobs", "1"]
    with pytest.raises(SystemExit):
        main(["generate", *folders, *shape, "--precision", "32-true"])
    assert json.loads(capsys.readouterr().out)["logprobs"] == expected
    (tmp_path / "in.jsonl").write_text('{"prompt": "abcabc", "logprobs": 1}\n{"prompt": "abc"}\n')
    load = {"checkpoint_dir": str(pair[0]), "draft_dir": str(pair[1]), "accelerator": "cpu", "precision": "32-true"}
    assert run_job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", load=load, **settings) == 0
    first, second = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert first["token_ids"] == out.token_ids and "logprobs" not in second
    for a, b in zip(first["logprobs"], expected, strict=True):
        assert a["logprob"] == pytest.approx(b["logprob"], **CLOSE)


@pytest.mark.parametrize("size", [2, 40, 513, 1300])
def test_a_score_is_that_of_one_uncached_forward(llm: SpecLLM, model: torch.nn.Module, size: int) -> None:
    text = ("The llama said: abc. " * 80)[:size]
    score = llm.score(text, logprobs=2)
    ids = llm.codec.encode_text(text).tolist()
    check(score.logprobs, ids[1:], by_litgpt(ids, model)[:-1], 2)
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(model(torch.tensor([ids]))[0, :-1], torch.tensor(ids[1:]))
    assert score.perplexity == pytest.approx(math.exp(float(loss)), rel=1e-4)
    assert score.logprob == pytest.approx(-float(loss) * (size - 1), rel=1e-4)
    assert f"perplexity={score.perplexity:.4f})" in repr(score)


def test_what_stands_behind_a_prompt_is_scored_from_its_first_token(llm: SpecLLM) -> None:
    out = llm.generate("abcabc", max_new_tokens=12, temperature=0, logprobs=0, logit_bias={"b": -1})
    text = "".join(chr(97 + i % 26) for i in range(12))
    score = llm.score(text, prompt="abcabc")
    assert len(score.token_ids) == 12
    # By the chain rule: the text of both less that of the prompt.
    whole = llm.score("abcabc" + text).logprob
    assert score.logprob == pytest.approx(whole - llm.score("abcabc").logprob, abs=1e-4)
    assert out.logprobs is not None and len(out.logprobs) == 12


def test_behind_bos_the_first_token_is_scored(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "target", tokenizer=byte_level_tokenizer(), tokenizer_config={"add_bos_token": True}
    )
    llm = SpecLLM.load(folder, accelerator="cpu")
    assert len(llm.score("abc").token_ids) == 3 and len(llm.score("a").token_ids) == 1


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        (("a",), "^The text 'a' has no token to score"),
        (("",), "^The prompt '' has no tokens"),
        ((3,), "^text must be a string, got 3"),
        (("a" * 1401,), "have 1401 tokens, but the model's block_size is 1400"),
    ],
)
def test_a_text_that_cannot_be_scored_is_a_sentence(llm: SpecLLM, given: tuple[Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        llm.score(*given)
    with pytest.raises(InputError, match=r"^logprobs must be in \[0, 100\], got 101"):
        llm.score("abc", logprobs=101)


@pytest.mark.parametrize("given", [{"logprobs": -1}, {"logprobs": 101}, {"logprobs": True}, {"logprobs_mode": "log"}])
def test_a_setting_out_of_range_is_a_sentence(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(InputError, match=f"^{name} must be "):
        GenerateConfig(**given)


# --- several samples --------------------------------------------------------------------------------------------------


def test_samples_of_a_prompt_are_the_texts_of_their_indices(llm: SpecLLM) -> None:
    settings: dict[str, Any] = dict(max_new_tokens=10, seed=5, sampler="coupled")
    three = llm.generate("abcabc", num_samples=3, index=4, **settings)
    assert isinstance(three, list)
    assert [text.token_ids for text in three] == [
        llm.generate("abcabc", index=4 + i, **settings).token_ids for i in range(3)
    ]
    assert len({tuple(text.token_ids) for text in three}) == 3
    for given, sentence in (
        (dict(num_samples=0), "^num_samples must be at least 1, got 0"),
        (
            dict(num_samples=2, stream=True),
            "^num_samples = 2 needs a single prompt and cannot be used with stream=True",
        ),
    ):
        with pytest.raises(InputError, match=sentence):
            llm.generate("abc", **given)
    with pytest.raises(InputError, match="cannot be used with a list of prompts"):
        llm.generate(["abc"], num_samples=2)
