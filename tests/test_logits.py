"""Bias, bans and penalties: each row of a block uses its own past, and no text depends on the drafter."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_config, write_pair
from engines import DRAFT, PROMPT, SEED, TARGET, VOCAB, choose_k, litgpt_model, place, tokens_of
from laws import follows, repeat, total_variation
from torch import Tensor
from transformers.generation.logits_process import (
    MinPLogitsWarper,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
    SequenceBiasLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from litspec import SpecLLM, reference
from litspec.__main__ import main
from litspec.config import GenerateConfig
from litspec.drafters import make_drafter
from litspec.engine.engine import Engine, Request
from litspec.engine.sequence import Block
from litspec.errors import InputError
from litspec.jobs import run_job
from litspec.logits import LogitsProcessor, LogitsRules, adjusted
from litspec.sampling import Inputs, Rejection, Sampling, concatenate, make_sampler, processed
from litspec.stopping import StopTokens

RULES: dict[str, dict[str, Any]] = {
    "logit_bias": {"logit_bias": {9: 3.0, 18: -4.0, 5: 1.5}},
    "bad_words": {"bad_words": ((18,), (9, 9), (5, 9, 3), (12, 57), (58, 11), (54, 39, 39))},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 0.9},
}
PAIRS = [RULES[a] | RULES[b] for a, b in itertools.combinations(RULES, 2)]
SAMPLINGS = {
    "greedy": Sampling(temperature=0),
    "coupled": Sampling(temperature=0.9, top_k=20, sampler="coupled", min_p=0.02),
    "rejection": Sampling(temperature=0.9, top_p=0.95, min_p=0.02),
}


def by_hand(logits: Tensor, rules: LogitsRules, prompt: Sequence[int], text: Sequence[int]) -> Tensor:
    """One row, (V,), processed by transformers; presence and frequency as OpenAI's API reference defines them."""
    before, scores = torch.tensor([[*prompt, *text]]), logits.clone().float().unsqueeze(0)
    if rules.logit_bias:
        scores = SequenceBiasLogitsProcessor({(i,): float(b) for i, b in rules.logit_bias.items()})(before, scores)
    if rules.bad_words:
        scores = NoBadWordsLogitsProcessor([list(word) for word in rules.bad_words])(before, scores)
    if rules.repetition_penalty != 1:
        scores = RepetitionPenaltyLogitsProcessor(rules.repetition_penalty)(before, scores)
    for id_, count in Counter(text).items():
        scores[0, id_] -= rules.frequency_penalty * count + rules.presence_penalty * (count > 0)
    return scores[0]


def warped(scores: Tensor, sampling: Sampling) -> Tensor:
    """The probabilities of one row, (V,), by transformers' own top-k, temperature, top-p and min-p, in this order."""
    row = scores.unsqueeze(0)
    none = torch.empty(1, 0, dtype=torch.int64)
    if sampling.top_k is not None:
        row = TopKLogitsWarper(sampling.top_k)(none, row)
    row = TemperatureLogitsWarper(sampling.temperature)(none, row) if sampling.temperature != 1 else row
    row = TopPLogitsWarper(sampling.top_p)(none, row) if sampling.top_p < 1 else row
    row = MinPLogitsWarper(sampling.min_p)(none, row) if sampling.min_p > 0 else row
    return row.softmax(-1)[0]


# --- rows of a block --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [*RULES.values(), *PAIRS], ids=lambda given: "+".join(given))
def test_each_row_of_a_block_is_processed_as_transformers_does_with_all_before_it(given: dict[str, Any]) -> None:
    rules, generator = LogitsRules(**given), torch.Generator().manual_seed(3)
    for trial in range(8):
        # At least three tokens: transformers ignores a word that is longer than the text before it.
        prompt = torch.randint(12, (trial + 3,), generator=generator).tolist()
        text = torch.randint(12, (trial,), generator=generator).tolist()
        # Words of the rules are completed within the block, across its border, and across the prompt's.
        proposed = torch.tensor([9, 9, 5, 9, 3, 18, 12, 57][: 1 + trial])
        logits = 3 * torch.randn(len(proposed) + 1, VOCAB, generator=generator)
        processor = LogitsProcessor(rules, prompt, VOCAB)
        processor.commit(text)
        found = adjusted(logits, processor.context(logits.device), proposed)
        for i, row in enumerate(found):
            torch.testing.assert_close(row, by_hand(logits[i], rules, prompt, [*text, *proposed[:i].tolist()]))
        # The same to the bit where the tokens before are committed one by one, and where a drafter draws them.
        drawn = Inputs(torch.empty(len(found), 0), None, processor.context(logits.device))
        for i in range(len(found)):
            alone = adjusted(logits[i : i + 1], processor.context(logits.device))
            assert torch.equal(alone[0], found[i])
            as_draft = drawn.row(i, [token.view(1) for token in proposed[:i]]).context
            assert torch.equal(adjusted(logits[None, i : i + 1], as_draft)[0, 0], found[i])
            if i < len(proposed):
                processor.commit([int(proposed[i])])


def test_a_proposal_that_is_none_counts_for_nothing_and_a_drafter_may_lack_ids() -> None:
    rules = LogitsRules({2: 1.0}, ((1, 4), (4,)), 1.5, 0.5, 0.5)
    logits = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    processor = LogitsProcessor(rules, [1, 2], 6)
    whole = adjusted(logits, processor.context(logits.device), torch.tensor([1, -1, -1]))
    assert torch.equal(whole[1], adjusted(logits[:2], processor.context(logits.device), torch.tensor([1]))[1])
    narrow = adjusted(logits[:, :3], processor.context(logits.device), torch.tensor([1, 4, 5]))
    assert torch.equal(narrow, adjusted(logits, processor.context(logits.device), torch.tensor([1, 4, 5]))[:, :3])


@pytest.mark.parametrize("min_p", [0.0, 0.05, 0.3, 1.0])
def test_min_p_keeps_what_transformers_keeps(min_p: float) -> None:
    logits = 2 * torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(1))
    for top_k, top_p, temperature in ((None, 1.0, 1.0), (10, 1.0, 0.7), (None, 0.9, 1.3), (8, 0.8, 1.0)):
        sampling = Sampling(temperature, top_k, top_p, min_p=min_p)
        p = processed(logits, sampling)
        dense = p.probs if p.ids is None else torch.zeros_like(logits).scatter(1, p.ids, p.probs)
        for row, expected in zip(dense, logits):
            torch.testing.assert_close(row, warped(expected, sampling))


def test_a_drafter_whose_every_id_is_banned_proposes_what_is_refused() -> None:
    banned = LogitsRules(bad_words=((0,), (1,)))
    for sampling in SAMPLINGS.values():
        sampler = make_sampler(sampling, seed=1, processor=LogitsProcessor(banned, [3], 4))
        token, q = sampler.draw(torch.zeros(1, 2), 1)
        outcome = sampler.verify(torch.zeros(2, 4), 1, token, q)
        assert outcome.accepted == 0 and outcome.finite and int(outcome.tokens[0]) in (2, 3)


# --- the law ----------------------------------------------------------------------------------------------------------

IDS = 5
LAW_RULES = {
    "logit_bias": LogitsRules({0: 1.0, 3: -1.5}),
    "bad_words": LogitsRules(bad_words=((4,), (1, 1), (0, 2))),
    "repetition_penalty": LogitsRules(repetition_penalty=2.0),
    "presence_penalty": LogitsRules(presence_penalty=1.2),
    "frequency_penalty": LogitsRules(frequency_penalty=1.2),
    "all": LogitsRules({0: 0.7}, ((1, 1),), 1.3, 0.4, 0.6),
    "none": LogitsRules(),
}


def table(seed: int) -> Tensor:
    return 1.3 * torch.randn(IDS, IDS, generator=torch.Generator().manual_seed(seed))


def law_of(logits: Tensor, sampling: Sampling, rules: LogitsRules, first: int, count: int) -> Tensor:
    """The law of the tokens behind a prompt of two, by multiplication: a dimension for each."""
    law = torch.zeros([IDS] * count, dtype=torch.float64)
    for text in itertools.product(range(IDS), repeat=count):
        p, last = 1.0, first
        for i, token in enumerate(text):
            scores = by_hand(logits[last], rules, [3, first], text[:i])
            p *= float(warped(scores, sampling)[token])
            last = token
        law[text] = p
    return law


@pytest.mark.parametrize("name", LAW_RULES)
def test_rejection_has_the_law_of_the_processed_target(name: str) -> None:
    rules, sampling, count, first = LAW_RULES[name], Sampling(1.1, min_p=0.08), 3, 1
    target, draft = table(1), table(2)
    processor = LogitsProcessor(rules, [3, first], IDS)
    sampler, context = Rejection(sampling), processor.context(torch.device("cpu"))

    def one(zero: Tensor) -> Tensor:
        noise = torch.rand(count, 3) + zero
        last, drawn, rows = torch.tensor([first]), [], []
        inputs = Inputs(noise, None, context)
        for i in range(count - 1):
            token, q = sampler.draw(draft.index_select(0, last) + zero, inputs.row(i, drawn))
            drawn.append(token)
            rows.append(q)
            last = token
        tokens = torch.cat(drawn)
        p = target.index_select(0, torch.cat((torch.tensor([first]), tokens))) + zero
        found = sampler.verify(p, inputs, tokens, concatenate(rows))
        # Rejected tokens are replaced by plain steps; steps after the end of the text are ignored.
        text = torch.where(torch.arange(count) <= found.accepted, found.tokens, -1)
        for i in range(1, count):
            before = text[:i]
            plain = sampler.verify(
                target.index_select(0, before[-1:]) + zero,
                Inputs(torch.rand(1, 3) + zero, None, context.after(before)),
                tokens[:0],
            )
            text = torch.where((torch.arange(count) == i) & (text < 0), plain.tokens, text)
        return text

    torch.manual_seed(4)
    texts = repeat(one, 40_000)
    law = law_of(target, sampling, rules, first, count)
    assert follows(texts, law)
    other = LogitsRules() if name != "none" else LAW_RULES["all"]
    assert total_variation(law, law_of(target, sampling, other, first, count)) > 0.05, (
        "what changes nothing proves nothing"
    )


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["rejection", "coupled"])
def test_texts_of_several_rounds_have_the_law_too(sampler: str) -> None:
    rules, sampling = LAW_RULES["all"], Sampling(1.1, sampler=sampler, min_p=0.05)
    target, draft = table(1), table(2)
    texts = [
        reference.generate(
            lambda tokens: target[tokens],
            lambda tokens: draft[tokens],
            [3, 1],
            max_new_tokens=3,
            k=1 + seed % 2,
            sampler=make_sampler(sampling, seed=seed, processor=LogitsProcessor(rules, [3, 1], IDS)),
        )
        for seed in range(700)
    ]
    assert follows(torch.tensor(texts), law_of(target, sampling, rules, 1, 3))


# --- the engine -------------------------------------------------------------------------------------------------------


def complete(
    drafter: str, sampling: Sampling, rules: LogitsRules, k: int | str = 4, new: int = 24
) -> tuple[list[Block], LogitsProcessor]:
    placed = place(TARGET, DRAFT)
    chosen = make_drafter(drafter, placed)
    processor = LogitsProcessor(rules, PROMPT, VOCAB)
    sampler = make_sampler(sampling, seed=SEED, processor=processor)
    request = Request(PROMPT, len(PROMPT) + new, StopTokens(), sampler, choose_k(k, placed, chosen))
    engine = Engine(placed, chosen, max_length=request.max_length)
    handle, blocks = engine.add(request), []
    while len(engine):
        block = engine.step()[handle]
        assert isinstance(block, Block)
        blocks.append(block)
    return blocks, processor


@pytest.mark.parametrize("given", [*RULES.values(), *PAIRS], ids=lambda given: "+".join(given))
def test_no_drafter_changes_a_text(given: dict[str, Any]) -> None:
    for sampling in ("greedy", "coupled"):
        check_on_is_off(given, sampling)


def check_on_is_off(given: dict[str, Any], sampling: str) -> None:
    rules = LogitsRules(**given)
    alone = tokens_of(complete("none", SAMPLINGS[sampling], rules)[0])
    assert alone != tokens_of(complete("none", SAMPLINGS[sampling], LogitsRules())[0]), "a rule that changes nothing"
    accepted = 0
    for drafter, k in (("draft_model", 7), ("early_exit", 2), ("prompt_lookup", "auto")):
        blocks, _ = complete(drafter, SAMPLINGS[sampling], rules, k)
        assert tokens_of(blocks) == alone, (drafter, k)
        accepted += sum(block.accepted for block in blocks)
    assert accepted > 0


def test_a_greedy_text_is_that_of_litgpts_model_and_transformers_processors() -> None:
    model = litgpt_model(TARGET)
    for given in [*RULES.values(), PAIRS[2], PAIRS[6]]:
        rules, text = LogitsRules(**given), []
        for _ in range(24):
            logits = model(torch.tensor([[*PROMPT, *text]]))[0, -1]
            text.append(int(by_hand(logits, rules, PROMPT, text).argmax()))
        assert tokens_of(complete("draft_model", SAMPLINGS["greedy"], rules, new=24)[0]) == text


def test_rejected_proposals_do_not_change_the_state() -> None:
    rules = LogitsRules({9: 1.0}, ((9, 9), (5, 9, 3)), 1.3, 0.4, 0.6)
    for sampling in SAMPLINGS.values():
        blocks, processor = complete("draft_model", sampling, rules, 7)
        assert sum(block.proposed - block.accepted for block in blocks) > 0
        fresh = LogitsProcessor(rules, PROMPT, VOCAB)
        fresh.commit(tokens_of(blocks))
        for seen, expected in zip(processor.context(torch.device("cpu")), fresh.context(torch.device("cpu"))):
            assert seen is expected is None or torch.equal(seen, expected)


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_text_does_not_depend_on_the_rules_of_others(sampling: str) -> None:
    """Texts of one kind are sampled together, texts of other kinds separately."""
    given = [LogitsRules(**(RULES["logit_bias"] | RULES["bad_words"] | {"presence_penalty": p})) for p in (0.1, 0.9)]
    given += [LogitsRules(**RULES["frequency_penalty"]), LogitsRules()]
    placed = place(TARGET, DRAFT)
    chosen = make_drafter("draft_model", placed)
    engine = Engine(placed, chosen, slots=3, max_length=len(PROMPT) + 24)
    texts: dict[int, list[int]] = {}
    for rules in given:
        sampler = make_sampler(SAMPLINGS[sampling], seed=SEED, processor=LogitsProcessor(rules, PROMPT, VOCAB))
        request = Request(PROMPT, len(PROMPT) + 24, StopTokens(), sampler, choose_k(4, placed, chosen))
        texts[engine.add(request)] = []
    while len(engine):
        for handle, block in engine.step().items():
            assert isinstance(block, Block)
            texts[handle] += block.tokens
    alone = [tokens_of(complete("draft_model", SAMPLINGS[sampling], rules, new=24)[0]) for rules in given]
    assert list(texts.values()) == alone
    assert len({tuple(text) for text in alone}) == 4


def test_rejection_accepts_everything_from_a_draft_that_is_the_target() -> None:
    """Everything is accepted only if draft and target process logits in the same way."""
    rules = LogitsRules({9: 1.0, 21: -2.0}, ((9, 9), (5, 9, 3)), 1.5, 0.5, 0.6)
    placed = place(TARGET, TARGET)
    chosen = make_drafter("draft_model", placed)
    sampler = make_sampler(SAMPLINGS["rejection"], seed=3, processor=LogitsProcessor(rules, PROMPT, VOCAB))
    request = Request(PROMPT, len(PROMPT) + 40, StopTokens(), sampler, choose_k(4, placed, chosen))
    engine = Engine(placed, chosen, max_length=request.max_length)
    handle, blocks = engine.add(request), []
    while len(engine):
        blocks.append(engine.step()[handle])
    assert [block.accepted for block in blocks[1:]] == [block.proposed for block in blocks[1:]]


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"), tiny_config(), noise=0.01)


@pytest.fixture(scope="module")
def llm(pair: tuple[Path, Path]) -> SpecLLM:
    return SpecLLM.load(*pair, accelerator="cpu")


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"min_p": 1.5}, r"^min_p must be in \[0, 1\], got 1.5"),
        ({"min_p": float("nan")}, "^min_p must be .* got nan"),
        ({"repetition_penalty": 0.0}, "^repetition_penalty must be above 0 .* got 0.0"),
        ({"repetition_penalty": float("inf")}, "^repetition_penalty must be .* got inf"),
        ({"presence_penalty": -2.1}, r"^presence_penalty must be in \[-2, 2\] .* got -2.1"),
        ({"frequency_penalty": 3}, r"^frequency_penalty must be in \[-2, 2\] .* got 3.0"),
        ({"logit_bias": {"a": 101}}, r"^logit_bias must be in \[-100, 100\], got 101 for 'a'"),
        ({"logit_bias": {"": 1}}, "^logit_bias names an empty string"),
        ({"logit_bias": {1.5: 1}}, "^logit_bias must be an object of tokens and numbers or None, got"),
        ({"logit_bias": [1]}, "^logit_bias must be"),
        ({"bad_words": [""]}, "^bad_words holds an empty word"),
        ({"bad_words": [[]]}, "^bad_words holds an empty word"),
        ({"bad_words": [3]}, "^bad_words must be .* got"),
    ],
    ids=str,
)
def test_a_setting_out_of_range_is_a_sentence(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        GenerateConfig(**given)


def test_tokens_are_named_by_id_by_digits_and_by_their_text(llm: SpecLLM) -> None:
    at = llm.codec.tokenizer.token_to_id("a")
    texts = [
        llm.generate("abc", max_new_tokens=5, temperature=0, logit_bias={token: 100}).token_ids
        for token in (at, str(at), "a")
    ]
    assert texts == [[at] * 5] * 3
    eos = llm.generate("abc", max_new_tokens=5, temperature=0, logit_bias={"<|end|>": 100})
    assert eos.finish_reason == "stop" and eos.text == ""
    with pytest.raises(InputError, match="'ab' is not a single token but 2 tokens"):
        llm.generate("abc", logit_bias={"ab": 1})
    with pytest.raises(InputError, match=r"logit_bias has the id 264, but the model's ids are in \[0, 264\)"):
        llm.generate("abc", logit_bias={264: 1})
    with pytest.raises(InputError, match=r"bad_words has \[1, 300\]"):
        llm.generate("abc", bad_words=[[1, 300]])
    with pytest.raises(InputError, match="bad_words bans all tokens"):
        llm.generate("abc", bad_words=[[i] for i in range(264)])


def test_bad_words_never_come_where_they_came_before(llm: SpecLLM) -> None:
    for settings in (dict(temperature=0.0), dict(temperature=1.0, top_k=30, seed=4)):
        text = llm.generate("abcabcabc", max_new_tokens=60, **settings)
        words = [text.token_ids[3:5], [text.token_ids[20]], text.token_ids[30:33]]
        without = llm.generate("abcabcabc", max_new_tokens=60, bad_words=words, **settings).token_ids
        for word in words:
            runs = [without[i : i + len(word)] for i in range(len(without))]
            assert word not in runs
    # A string is banned at the beginning of a text and behind a space.
    assert llm.codec.spellings("ab") == [[llm.codec.tokenizer.token_to_id(c) for c in word] for word in ("ab", "Ġab")]


def test_settings_that_change_nothing_give_the_same_bits(llm: SpecLLM) -> None:
    neutral = dict(repetition_penalty=1.0, presence_penalty=0.0, frequency_penalty=0.0, min_p=0.0)
    neutral |= dict(logit_bias={}, bad_words=[])
    for settings in (dict(temperature=0.0), dict(seed=3), dict(seed=3, sampler="coupled")):
        plain = llm.generate("abcabc", max_new_tokens=20, **settings)
        assert llm.generate("abcabc", max_new_tokens=20, **settings, **neutral).token_ids == plain.token_ids


@pytest.mark.slow
def test_flags_files_and_lines_say_the_same_as_python(
    llm: SpecLLM, pair: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given: dict[str, Any] = dict(
        logit_bias={"a": -3, "17": 4.5}, bad_words=["b", "ca"], repetition_penalty=1.3, presence_penalty=0.5
    )
    given |= dict(frequency_penalty=0.25, min_p=0.01)
    expected = llm.generate("abcabc", max_new_tokens=12, temperature=0.8, top_k=50, seed=1234, **given)

    def run(*args: str) -> list[int]:
        folders = ["--checkpoint_dir", str(pair[0]), "--draft_dir", str(pair[1]), "--accelerator", "cpu"]
        shape = ["--prompt", "abcabc", "--max_new_tokens", "12", "--output_format", "json"]
        with pytest.raises(SystemExit) as exit_:
            main(["generate", *folders, *shape, *args])
        assert not exit_.value.code
        return json.loads(capsys.readouterr().out)["token_ids"]

    flags = [f"--{name}={json.dumps(value)}" for name, value in given.items() if name != "bad_words"]
    assert run(*flags, "--bad_words", "b", "--bad_words", "ca") == expected.token_ids
    (tmp_path / "run.yaml").write_text(json.dumps(given))
    assert run("--config", str(tmp_path / "run.yaml")) == expected.token_ids

    (tmp_path / "in.jsonl").write_text(
        json.dumps({"prompt": "abcabc"} | given) + "\n" + json.dumps({"prompt": "abc", "logit_bias": [3]}) + "\n"
    )
    load = {"checkpoint_dir": str(pair[0]), "draft_dir": str(pair[1]), "accelerator": "cpu"}
    settings: dict[str, Any] = dict(max_new_tokens=12, temperature=0.8, top_k=50)
    assert run_job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", load=load, **settings) == 1
    first, second = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert first["token_ids"] == expected.token_ids
    assert "logit_bias must be an object of tokens and numbers or null, got [3]" in second["error"]


def test_a_flag_that_is_no_json_is_a_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    for given, sentence in (('{"a": ', "logit_bias is not JSON"), ("a", "logit_bias must be an object of tokens and")):
        with pytest.raises(SystemExit) as exit_:
            main(["generate", "--logit_bias", given])
        assert exit_.value.code == 2 and sentence in capsys.readouterr().err
