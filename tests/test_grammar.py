"""Texts that a grammar allows: whole, exact under speculation, and ended where the grammar ends."""

from __future__ import annotations

import itertools
import json
import random
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import torch
from checkpoints import byte_level_tokenizer, tiny_config, write_checkpoint
from laws import follows, total_variation

from litspec import SpecLLM
from litspec.__main__ import main
from litspec.config import GenerateConfig
from litspec.errors import InputError
from litspec.grammar import Form, Grammar, Grammars
from litspec.jobs import run_job
from litspec.logits import LogitsProcessor, LogitsRules
from litspec.sampling import Distribution, Inputs, Sampling, concatenate, make_sampler
from litspec.text import TextCodec

pytest.importorskip("llguidance", reason="grammars need the extra `structured`: pip install llguidance")

SCHEMA = {
    "type": "object",
    "properties": {
        "name_of_the_person": {"type": "string", "maxLength": 12},
        "years_of_age": {"type": "integer", "minimum": 0, "maximum": 120},
        "marital_status": {"enum": ["married", "widowed", "single"]},
        "has_a_fortune": {"type": "boolean"},
    },
    "required": ["name_of_the_person", "years_of_age", "marital_status", "has_a_fortune"],
    "additionalProperties": False,
}
LARK = 'start: "yes" | "no" "," WORD\nWORD: /[a-z]{2,9}/'
FORMS: dict[str, dict[str, Any]] = {
    "json_schema": {"json_schema": SCHEMA},
    "regex": {"regex": "(Mr|Mrs|Miss) [A-Z][a-z]{3,8} was [0-9]{2}"},
    "grammar": {"grammar": LARK},
}
PROMPTS = ["Anne Elliot was", "The letter said:"]


@pytest.fixture(scope="module")
def llm() -> SpecLLM:
    return SpecLLM.load(accelerator="cpu", precision="32-true")


# --- on = off ---------------------------------------------------------------------------------------------------------

MORE: list[dict[str, Any]] = [
    {"repetition_penalty": 0.8, "frequency_penalty": -0.3},
    {"repetition_penalty": 1.3, "bad_words": ["18", "ed", "zz"]},
    {"frequency_penalty": 0.5, "logit_bias": {"e": -3.0}, "min_p": 0.02},
    {"logprobs": 2, "presence_penalty": -0.5, "stop": ["a f"]},
]


@pytest.mark.slow
@pytest.mark.parametrize("mode", [{"temperature": 0.0}, {"sampler": "coupled", "seed": 3}], ids=["greedy", "coupled"])
@pytest.mark.parametrize("form", FORMS)
def test_no_drafter_changes_a_text(llm: SpecLLM, form: str, mode: dict[str, Any]) -> None:
    accepted = 0
    half = MORE[:2] if "seed" in mode else MORE[2:]
    for more, drafter in zip([*half, {}], ["draft_model", "prompt_lookup", "early_exit"]):
        settings = FORMS[form] | mode | more | {"max_new_tokens": 36}
        alone = [llm.with_drafter("none").generate(prompt, **settings, index=i) for i, prompt in enumerate(PROMPTS)]
        # Alone, and with others at the same time.
        other = llm.with_drafter(drafter)
        texts = other.generate(PROMPTS, **settings, speculative_k=5)
        assert [text.token_ids for text in texts] == [text.token_ids for text in alone], (more, drafter)
        assert other.generate(PROMPTS[1], index=1, **settings).token_ids == alone[1].token_ids
        accepted += sum(text.stats.accepted for text in texts)
    assert accepted > 0


# --- the texts --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("count", [30])
def test_sampled_texts_are_valid_and_end_where_their_schema_does(llm: SpecLLM, count: int) -> None:
    texts = llm.generate(PROMPTS[0], num_samples=count, json_schema=SCHEMA, temperature=1.0, seed=5, max_new_tokens=90)
    assert isinstance(texts, list)
    for text in texts:
        assert text.finish_reason == "stop", text.text
        jsonschema.validate(json.loads(text.text), SCHEMA)
        assert text.text.endswith("}")
    assert len({text.text for text in texts}) > count * 0.8
    assert sum(text.stats.accepted for text in texts) > 0


def test_sampled_texts_match_their_regex_and_their_grammar(llm: SpecLLM) -> None:
    for name, pattern in (("regex", FORMS["regex"]["regex"]), ("grammar", "yes|no,[a-z]{2,9}")):
        texts = llm.generate(PROMPTS[0], num_samples=10, **FORMS[name], seed=2, max_new_tokens=40)
        assert isinstance(texts, list)
        for text in texts:
            assert re.fullmatch(pattern, text.text) and text.finish_reason == "stop"


def test_the_model_decides_if_a_grammar_may_end(llm: SpecLLM) -> None:
    stop = llm.codec.stop_tokens[0][0]
    for bias, expected in ((100, "a"), (-100, "aaaaaaaa")):
        out = llm.generate("abc", regex="a{1,8}", temperature=0, logit_bias={stop: bias}, max_new_tokens=20)
        assert (out.text, out.finish_reason) == (expected, "stop")
        assert stop not in out.token_ids
    # It ends where it must, also before min_new_tokens; a text that is too short is cut.
    assert llm.generate("abc", regex="ab", min_new_tokens=9, max_new_tokens=20).text == "ab"
    cut = llm.generate("abc", regex="[a-z]{80,}", max_new_tokens=4)
    assert cut.finish_reason == "length" and len(cut.token_ids) == 4


def test_forced_tokens_are_proposed_and_make_rounds_longer(llm: SpecLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    lookup = llm.with_drafter("prompt_lookup")
    settings: dict[str, Any] = dict(json_schema=SCHEMA, temperature=0, max_new_tokens=90, speculative_k=6)
    forced = lookup.generate(PROMPTS[0], **settings)
    monkeypatch.setattr(Grammar, "forced", lambda self, most: [])
    drafted = lookup.generate(PROMPTS[0], **settings)
    assert forced.token_ids == drafted.token_ids
    assert forced.stats.tokens_per_round > 1.5 * drafted.stats.tokens_per_round
    assert forced.stats.acceptance_rate > 0.7


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def codec(tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    folder = write_checkpoint(tmp_path_factory.mktemp("tiny") / "target")
    return TextCodec(folder, tiny_config())


def allowed(masks: torch.Tensor) -> list[set[int]]:
    bits = (masks.unsqueeze(-1) >> torch.arange(32, dtype=torch.int32)) & 1
    return [set(row.nonzero().flatten().tolist()) for row in bits.flatten(1)]


def test_masks_of_a_block_are_those_of_its_prefixes_and_refusal_leaves_no_trace(codec: TextCodec) -> None:
    """The language is finite, so what may come next can be listed."""
    language = ["abca", "abd", "acb", "bca", "bcb", "cab"]
    made = Grammars(codec, [256])
    grammar = made.make(Form("regex", "|".join(language)))
    ids = {char: codec.encode_alone(char)[0] for char in "abcdx"}

    def by_hand(text: str) -> set[int]:
        found = {ids[word[len(text)]] for word in language if word.startswith(text) and len(word) > len(text)}
        return found | ({256} if text in language else set())

    text = ""
    for committed in ("", "b", "c"):
        text += committed
        grammar.push([ids[committed]] if committed else [])
        for proposal in itertools.product("abcdx", repeat=3):
            grammar.foresee([ids[char] for char in proposal])
            found = allowed(grammar.masks(5))
            for i, row in enumerate(found):
                before = text + "".join(proposal[:i])
                fits = any(word.startswith(before) for word in language)
                if i <= 3 and fits and before not in language:
                    assert row == by_hand(before), before
                elif i > 3 or not fits:
                    assert len(row) >= 264  # rows after a rejected token may be anything
        assert allowed(grammar.masks(1)) == [by_hand(text)]
    assert grammar.push([ids["a"]]).end == 3


def test_masks_do_not_depend_on_what_was_asked_before(llm: SpecLLM) -> None:
    """`forced` and `foresee` are called only with a drafter, so masks must not depend on these calls."""
    codec, generator = llm.codec, random.Random(4)
    stop = codec.stop_tokens[0][0]
    for form in (Form("json_schema", json.dumps(SCHEMA)), Form("grammar", LARK), Form("regex", "(a|bc){3,9} end.*")):
        made = Grammars(codec, [stop])
        for _ in range(3):
            asked, text = made.make(form), []
            while True:
                fresh = made.make(form)
                fresh.push(text)
                (row,) = allowed(fresh.masks(1))
                forced = asked.forced(7)
                proposal = forced if generator.random() < 0.5 else generator.sample(sorted(row), min(3, len(row)))
                asked.foresee(proposal)
                assert allowed(asked.masks(1)) == [row], codec.decode(text)
                for i, then in enumerate(allowed(asked.masks(1 + len(proposal)))[1:], 1):
                    if proposal[i - 1] != stop and len(then) < 2048:
                        behind = made.make(form)
                        if behind.push([*text, *proposal[:i]]).end is None:
                            assert [then] == allowed(behind.masks(1))
                text.append(generator.choice(sorted(row)))
                if asked.push(text[-1:]).end is not None or len(text) > 40:
                    break


def test_a_grammar_ends_a_text_also_where_no_token_does(codec: TextCodec) -> None:
    grammar = Grammars(codec, []).make(Form("regex", "ab|abc"))
    ids = codec.encode_alone("abc")
    assert grammar.push(ids[:2]).end is None
    assert allowed(grammar.masks(1)) == [{ids[2]}]
    assert grammar.push(ids[2:]) == (3, 3)


@pytest.mark.slow
def test_rejection_has_the_law_of_the_target_restricted_by_the_grammar(codec: TextCodec) -> None:
    language = ["aab", "abc", "acc", "bab", "bba", "cab", "cca", "ccb"]
    made = Grammars(codec, [256])
    first = codec.encode_alone("a")[0]
    chars = codec.encode_alone("abc")
    assert chars == [first, first + 1, first + 2]
    generator = torch.Generator().manual_seed(8)
    target, draft = torch.full((2, 4, 264), -9.0)
    target[:, chars] = torch.randn(4, 3, generator=generator)
    draft[:, chars] = torch.randn(4, 3, generator=generator)
    sampling, device = Sampling(1.2), torch.device("cpu")

    def row(table: torch.Tensor, last: int) -> torch.Tensor:
        return table[[last - first if last >= 0 else 3]]

    texts = []
    for seed in range(900):
        grammar = made.make(Form("regex", "|".join(language)))
        processor = LogitsProcessor(LogitsRules(), [0], 264, grammar)
        sampler = make_sampler(sampling, seed=seed, processor=processor)
        text: list[int] = []
        while len(text) < 3:
            m = 2 - len(text)
            sampler.start_round(1 + len(text))
            inputs = sampler.inputs(device, 1 + len(text), max(m, 1))
            drawn: list[torch.Tensor] = []
            q: list[Distribution] = []
            for i in range(m):
                last = int(drawn[-1]) if drawn else text[-1] if text else -1
                token, distribution = sampler.draw(row(draft, last), inputs.row(i, drawn))
                assert distribution is not None
                drawn.append(token)
                q.append(distribution)
            proposal = [int(token) for token in drawn]
            # A drafter may draw tokens that the grammar forbids: its second row has no mask.
            logits = torch.cat(
                [
                    row(target, last if last < 0 or last in chars else first)
                    for last in [text[-1] if text else -1, *proposal]
                ]
            )
            grammar.foresee(proposal)
            found = sampler.verify(
                logits,
                sampler.inputs(device, 1 + len(text), m + 1),
                torch.tensor(proposal, dtype=torch.int64),
                concatenate(q) if q else None,
            )
            new = found.tokens[: int(found.accepted) + 1].tolist()
            grammar.push(new)
            text += new
        texts.append([token - first for token in text])

    law, plain = torch.zeros(3, 3, 3), torch.zeros(3, 3, 3)
    for word in itertools.product(range(3), repeat=3):
        p = free = 1.0
        for i, token in enumerate(word):
            before = "".join("abc"[j] for j in word[:i])
            logits = row(target, word[i - 1] + first if i else -1)[0, chars] / sampling.temperature
            fits = [any(other.startswith(before + char) for other in language) for char in "abc"]
            free *= float(logits.softmax(-1)[token])
            p *= float(logits.masked_fill(~torch.tensor(fits), -torch.inf).softmax(-1)[token]) if any(fits) else 0.0
        law[word], plain[word] = p, free
    assert law.sum() == pytest.approx(1)
    assert follows(torch.tensor(texts), law)
    # Not the model's law conditioned on a valid text, which would need lookahead.
    fitting = torch.where(law > 0, plain, 0.0)
    assert total_variation(law, fitting / fitting.sum()) > 0.05


def test_a_draft_whose_row_allows_nothing_is_refused() -> None:
    class Nothing(Grammar):
        def __init__(self) -> None:
            pass

        def masks(self, rows: int) -> torch.Tensor:
            return torch.full((rows, 1), 1 << 5, dtype=torch.int32)

    processor = LogitsProcessor(LogitsRules(), [0], 8, Nothing())
    for sampling in (Sampling(0), Sampling(), Sampling(sampler="coupled")):
        sampler = make_sampler(sampling, seed=1, processor=processor)
        inputs = sampler.inputs(torch.device("cpu"), 1, 2)
        token, q = sampler.draw(torch.zeros(1, 4), inputs.row(0))  # a drafter without the id 5
        found = sampler.verify(torch.zeros(2, 8), inputs, token, q)
        assert found.accepted == 0 and found.finite and int(found.tokens[0]) == 5
    assert Inputs(torch.empty(1, 0)).after(torch.tensor([1])).context is None


def test_a_sentencepiece_tokenizer_has_grammars_too(tmp_path: Path) -> None:
    from test_checkpoint import sentencepiece_model

    folder = write_checkpoint(tmp_path / "target", tiny_config(vocab_size=300, padded_vocab_size=320))
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(sentencepiece_model(300))
    llm = SpecLLM.load(folder, accelerator="cpu")
    for seed in range(4):
        out = llm.generate("abc", regex="(é|b{2}|[x-z]){3}0", max_new_tokens=60, seed=seed)
        assert out.finish_reason == "stop" and re.fullmatch("(é|bb|[x-z]){3}0", out.text), out.text


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"json_schema": {}, "regex": "a"}, "^json_schema and regex cannot be combined; give one of them"),
        ({"json_schema": '{"type": '}, "^json_schema is not JSON: "),
        ({"json_schema": "no/such.json"}, "^json_schema names the file 'no/such.json', which cannot be read: No such"),
        ({"regex": "@no/such"}, "^regex names the file 'no/such', which cannot be read: No such"),
        ({"json_schema": [3]}, "^json_schema must be a string or an object or None|^json_schema must be "),
        ({"grammar": 3}, "^grammar must be a string or None, got 3"),
    ],
    ids=str,
)
def test_an_invalid_form_is_an_error(given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        GenerateConfig(**given)


@pytest.mark.parametrize(
    ("given", "sentence"),
    [
        ({"regex": "a("}, "^regex cannot be used: .*unclosed group"),
        ({"grammar": "start: x"}, '^grammar cannot be used: .*unknown name: "x"'),
        ({"json_schema": {"type": "foo"}}, "^json_schema cannot be used: Invalid type: foo"),
        ({"response_format": {"type": "xml"}}, "^response_format must be .*got {'type': 'xml'}"),
    ],
    ids=str,
)
def test_a_form_that_cannot_be_read_is_a_sentence(llm: SpecLLM, given: dict[str, Any], sentence: str) -> None:
    with pytest.raises(InputError, match=sentence):
        llm.generate("abc", **given)


def test_what_a_file_holds_is_read_once(tmp_path: Path) -> None:
    """Settings are copied, for example with another seed; then the file's content is not read as a file name."""
    for name, content in (("regex", "@[a-z]+"), ("regex", "a|@b\n"), ("grammar", "@x: 3"), ("grammar", LARK)):
        (tmp_path / "form").write_text(content)
        config = GenerateConfig(**{name: f"@{tmp_path / 'form'}"})
        (tmp_path / "form").unlink()
        again = replace(config, seed=3)
        assert getattr(again, name) == getattr(config, name)
        if name == "regex":
            assert re.fullmatch(config.regex or "", "@b")
        else:
            assert (config.grammar or "").strip() == content
    (tmp_path / "schema.json").write_text(json.dumps(SCHEMA))
    assert replace(GenerateConfig(json_schema=str(tmp_path / "schema.json")), seed=3).json_schema == SCHEMA


def test_without_llguidance_a_sentence_says_how_to_get_it(llm: SpecLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(
        InputError, match=r'need llguidance, which is not installed; pip install "litspec\[structured\]"'
    ):
        llm.with_drafter("none").generate("abc", regex="a")
    assert llm.generate("abc", max_new_tokens=2).text


def test_an_empty_set_of_allowed_tokens_is_an_error(llm: SpecLLM) -> None:
    for words in (["yes", "y", "ye"], [[id_] for id_ in range(1, 2048)]):
        with pytest.raises(InputError, match="bans and the grammar allow no token, in the block"):
            llm.generate("abc", regex="yes", max_new_tokens=9, bad_words=words)


def test_response_format_says_the_same_as_json_schema(llm: SpecLLM) -> None:
    settings: dict[str, Any] = dict(max_new_tokens=50, temperature=0)
    wanted = {"type": "json_schema", "json_schema": {"name": "person", "schema": SCHEMA}}
    expected = llm.generate("abc", json_schema=SCHEMA, **settings).token_ids
    assert llm.generate("abc", response_format=wanted, **settings).token_ids == expected
    plain = llm.generate("abc", **settings).token_ids
    assert llm.generate("abc", response_format={"type": "text"}, **settings).token_ids == plain
    assert llm.generate("abc", response_format={"type": "json_object"}, **settings).text.startswith("{")


@pytest.mark.slow
def test_flags_files_and_lines_say_the_same_as_python(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = write_checkpoint(tmp_path / "target", tokenizer=byte_level_tokenizer())
    llm = SpecLLM.load(folder, accelerator="cpu", precision="32-true")
    settings: dict[str, Any] = dict(max_new_tokens=70, temperature=0.8, top_k=50, seed=1234)
    schema = {"type": "object", "properties": {"id": {"type": "integer", "maximum": 99}}, "required": ["id"]}
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    (tmp_path / "form.lark").write_text(LARK + "\n")

    def run(*flags: str) -> list[int]:
        shape = ["--prompt", "abc", "--max_new_tokens", "70", "--output_format", "json", "--precision", "32-true"]
        with pytest.raises(SystemExit) as exit_:
            main(["generate", "--checkpoint_dir", str(folder), "--accelerator", "cpu", *shape, *flags])
        assert not exit_.value.code
        return json.loads(capsys.readouterr().out)["token_ids"]

    by_schema = llm.generate("abc", json_schema=schema, **settings).token_ids
    assert run("--json_schema", str(tmp_path / "schema.json")) == by_schema
    assert run("--json_schema", json.dumps(schema)) == by_schema
    assert run("--regex", "[0-9]{3}") == llm.generate("abc", regex="[0-9]{3}", **settings).token_ids
    assert run("--grammar", f"@{tmp_path / 'form.lark'}") == llm.generate("abc", grammar=LARK, **settings).token_ids

    lines = [{"json_schema": schema}, {"regex": "[0-9]{3}"}, {"regex": "@a"}, {"json_schema": "x.json"}, {"regex": "("}]
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"prompt": "abc"} | line) + "\n" for line in lines))
    load = {"checkpoint_dir": str(folder), "accelerator": "cpu", "precision": "32-true"}
    given = {name: settings[name] for name in ("max_new_tokens", "temperature", "top_k")}
    assert run_job(tmp_path / "in.jsonl", tmp_path / "out.jsonl", load=load, **given) == 1
    answers = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert answers[0]["token_ids"] == by_schema and re.fullmatch("[0-9]{3}", answers[1]["text"])
    assert "regex cannot name a file here, got '@a'" in answers[2]["error"]
    assert "json_schema cannot name a file here, got 'x.json'" in answers[3]["error"]
    assert "regex cannot be used" in answers[4]["error"]
    # A line's own form replaces the job's.
    given["grammar"] = LARK
    assert run_job(tmp_path / "in.jsonl", tmp_path / "out2.jsonl", load=load, **given) == 1
    again = [json.loads(line) for line in (tmp_path / "out2.jsonl").read_text().splitlines()]
    assert again == answers
