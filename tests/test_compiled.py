"""Compiled steps: the same text with every drafter; graphs are built before the first token and serve all texts.

Graphs take seconds each, so the pair is tiny, four rows are verified, and most tests share what was built.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import lively_weights, tiny_config, write_checkpoint, write_pair
from torch._dynamo.utils import counters

from litspec import SpecLLM
from litspec.__main__ import main
from litspec.drafters import AdaptiveK, Drafter, DraftSession, FixedK, Proposal
from litspec.drafters.speculative_k import Acceptance, RoundCosts
from litspec.engine import runner
from litspec.engine.engine import Engine
from litspec.engine.runner import CompiledRunner, Runner
from litspec.errors import InputError
from litspec.sampling import Distribution, Sampling, make_sampler

WIDTH = 4
PROMPTS = ["abcabcabc", "The llama said: the llama said"]
MODES = {
    "greedy": dict(temperature=0.0),
    "coupled": dict(temperature=1.0, top_k=20, sampler="coupled"),
    "rejection": dict(temperature=1.0, top_k=20),
}


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"), tiny_config(), noise=0.01)


@pytest.fixture(scope="module")
def llm(pair: tuple[Path, Path]) -> SpecLLM:
    return SpecLLM.load(*pair, verify_width=WIDTH, compile=True, precision="32-true")


def graphs(llm: SpecLLM) -> tuple[int, int]:
    """How many steps are compiled, as litspec counts and as torch does."""
    return len(llm.runner), counters["stats"]["unique_graphs"]


def decode(llm: SpecLLM, mode: str, **settings: Any) -> list[list[int]]:
    settings = MODES[mode] | dict(max_new_tokens=40, seed=1, speculative_k=3, batch_size=1) | settings
    return [out.token_ids for out in llm.generate(PROMPTS, **settings)]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_a_compiled_text_is_the_same_with_every_drafter_and_every_k(llm: SpecLLM, mode: str) -> None:
    alone = decode(llm.with_drafter("none"), mode)
    assert len({len(set(text)) for text in alone} - {1, 2}) > 0  # texts with variety
    outs = llm.generate(PROMPTS, **MODES[mode], max_new_tokens=40, seed=1, speculative_k=3, batch_size=1)
    assert [out.token_ids for out in outs] == alone
    assert sum(out.stats.accepted for out in outs) > 0
    for drafter, k in (("draft_model", 1), ("draft_model", "auto"), ("prompt_lookup", 3), ("early_exit", 3)):
        assert decode(llm.with_drafter(drafter, exit_layer=1), mode, speculative_k=k) == alone, (drafter, k)


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_graphs_are_built_before_the_first_token_and_serve_every_text(
    llm: SpecLLM, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, ready = Engine.prepare, []

    def prepare(self: Engine) -> None:
        real(self)
        ready.append(graphs(llm))

    monkeypatch.setattr(Engine, "prepare", prepare)
    decode(llm, mode)
    built = graphs(llm)
    # All before the first token of the first text, none while it was written, none for the second.
    assert set(ready) == {built} and len(ready) > 2
    assert llm.compile_seconds > 0
    # Other texts, lengths, seeds, stops and k: the same graphs, and the texts differ, so nothing of one was built in.
    texts = {str(decode(llm, mode, seed=seed)) for seed in (1, 2, 3)}
    decode(llm, mode, max_new_tokens=7, min_new_tokens=5, stop="q")
    llm.generate("y" * 100, **MODES[mode], max_new_tokens=100, speculative_k=3)
    assert graphs(llm) == built
    assert len(texts) == (1 if mode == "greedy" else 3)


@pytest.mark.slow
@pytest.mark.parametrize("k", [3, "auto"])
def test_a_seed_gives_one_text_with_the_rejection_sampler(pair: tuple[Path, Path], llm: SpecLLM, k: Any) -> None:
    # The first text builds its steps, which must not change the sampler's random numbers.
    fresh = SpecLLM.load(*pair, verify_width=WIDTH, compile=True, precision="32-true")
    settings = dict(seed=5, speculative_k=k)
    first = decode(fresh, "rejection", **settings)
    assert decode(fresh, "rejection", **settings) == decode(fresh, "rejection", **settings) == first
    # After other texts, and after steps for other settings have been built.
    before = len(fresh.runner)
    fresh.generate("something else", **MODES["coupled"], max_new_tokens=9, speculative_k=2)
    assert len(fresh.runner) > before
    assert decode(fresh, "rejection", **settings) == first != decode(fresh, "rejection", speculative_k=k, seed=6)
    assert decode(llm, "rejection", **settings) == first


@pytest.mark.slow
def test_a_compiled_text_is_that_of_uncompiled_steps(llm: SpecLLM, pair: tuple[Path, Path]) -> None:
    # Bits differ between the modes, by 1e-6 here; the greedy choices of these texts are further apart.
    plain = SpecLLM.load(*pair, verify_width=WIDTH, precision="32-true")
    assert decode(plain, "greedy") == decode(llm, "greedy")
    assert decode(plain.compiled(), "greedy", max_new_tokens=10) == decode(plain, "greedy", max_new_tokens=10)
    assert plain.compile_seconds == 0


@pytest.mark.slow
def test_a_longer_text_builds_what_it_needs_at_its_beginning(pair: tuple[Path, Path], tmp_path: Path) -> None:
    config = tiny_config(block_size=1200)
    target = write_checkpoint(tmp_path / "target", config, weights=lively_weights(config))
    llm = SpecLLM.load(target, drafter="prompt_lookup", verify_width=2, compile=True)
    uncompiled = SpecLLM.load(target, drafter="none", verify_width=2)
    settings = dict(temperature=0.0, max_new_tokens=100)
    short = llm.generate("abcabc", **settings)
    assert len(llm.runner) == 1  # 512 slots
    out = llm.generate("abcabc" * 100, **settings)
    assert len(llm.runner) == 3  # 512 and 1024, of a longer cache
    assert out.token_ids == uncompiled.generate("abcabc" * 100, **settings).token_ids
    assert llm.generate("abcabc", **settings).token_ids == short.token_ids


@pytest.mark.slow
def test_a_graph_bans_stop_tokens_until_min_new_tokens(llm: SpecLLM) -> None:
    vocab, eos = 264, llm.codec.stop_tokens[0][0]
    logits = torch.zeros(WIDTH, vocab)
    logits[:, eos] = 9
    for sampling in (Sampling(0), Sampling(1.0, 5), Sampling(1.0, 5, sampler="coupled")):
        sampler = make_sampler(sampling, seed=1, banned=[eos], banned_until=12)
        tokens = torch.full((WIDTH - 1,), eos)
        for position in (5, sampler.inputs(logits.device, 5, WIDTH)):
            assert sampler.verify(logits, position, tokens).accepted == 0
        # The third row is at position 12.
        kept = sampler.ban(logits, sampler.inputs(logits.device, 10, WIDTH)).isfinite()[:, eos]
        assert kept.tolist() == [False, False, True, True]


@pytest.mark.slow
@pytest.mark.parametrize("top_k", [None, 6])
@pytest.mark.parametrize("drawn", [False, True])
@pytest.mark.parametrize("m", [0, 1, 3])
def test_a_padded_proposal_is_verified_like_the_proposal_alone(top_k: int | None, drawn: bool, m: int) -> None:
    vocab, columns = 20, top_k or 20
    accepted = set()
    for seed in range(300):
        generator = torch.Generator().manual_seed(seed)
        logits, draft_logits = torch.randn(2, WIDTH, vocab, generator=generator)
        sampler = make_sampler(Sampling(0.7, top_k), seed=seed)
        draws = [sampler.draw(draft_logits[i : i + 1], i) for i in range(m)]
        tokens = torch.cat([token for token, _ in draws]) if m else torch.empty(0, dtype=torch.int64)
        q = padded_q = None
        if drawn:
            parts = [torch.cat([getattr(q, name) for _, q in draws]) if m and getattr(draws[0][1], name) is not None
                     else None for name in ("probs", "ids")]  # fmt: skip
            q = Distribution(*parts) if m else None
            rows = (0, 0, 0, WIDTH - 1 - m)
            probs = parts[0] if m else torch.empty(0, columns)
            ids = parts[1] if m else (torch.empty(0, columns, dtype=torch.int64) if top_k else None)
            pad = torch.nn.functional.pad
            padded_q = Distribution(pad(probs, rows), None if ids is None else pad(ids, rows))
        alone = sampler.verify(logits[: m + 1], 0, tokens, q)
        padded = torch.cat((tokens, torch.full((WIDTH - 1 - m,), -1)))
        whole = sampler.verify(logits, 0, padded, padded_q)
        n = int(alone.accepted)
        accepted.add(n)
        assert int(whole.accepted) == n
        assert whole.tokens[: n + 1].tolist() == alone.tokens[: n + 1].tolist()
    assert accepted >= ({0, m} if drawn else {0})


class Reporting(Drafter):
    """Draws from its own table, which is sometimes right, and reports the distribution.

    Args:
        form: Of what it reports: "sparse" (ten ids), "dense", "short" (dense, over the first ids only), or "none" (the
            most likely token, and nothing reported).
        taps: Blocks whose states it receives; its proposals depend on them.
    """

    max_k = WIDTH - 1

    def __init__(self, form: str, taps: tuple[int, ...] = ()) -> None:
        self.form, self.taps = form, taps
        self.told: list[torch.Tensor] = []
        self.table = 2 * torch.randn(64, 240 if form == "short" else 264, generator=torch.Generator().manual_seed(3))

    def start(self, target: Any, max_length: int, sampler: Any) -> DraftSession:
        return ReportingSession(self)


class ReportingSession(DraftSession):
    def __init__(self, drafter: Reporting) -> None:
        self.drafter, self.state = drafter, 0

    def commit(self, tokens: Sequence[int], input_pos: int, hidden: torch.Tensor | None = None) -> None:
        assert (hidden is None) is (not self.drafter.taps)
        if hidden is not None:
            self.drafter.told.append(hidden.clone())
            self.state = int(hidden[-1].argmax())

    def propose(self, token: int, input_pos: int, k: int) -> Proposal:
        probs = self.drafter.table[[(token + self.state + i) % 64 for i in range(k)]].softmax(1)
        if self.drafter.form == "none":
            return Proposal(probs.argmax(1))
        kept, ids = probs.topk(10) if self.drafter.form == "sparse" else (probs, None)
        kept = kept / kept.sum(1, keepdim=True)
        columns = torch.multinomial(kept, 1, generator=torch.Generator().manual_seed(input_pos))
        tokens = columns if ids is None else ids.gather(1, columns)
        return Proposal(tokens.view(-1), Distribution(kept, ids))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "taps"), [("sparse", ()), ("dense", ()), ("short", ()), ("none", (1, -1)), ("sparse", (0,))]
)
def test_a_custom_drafter_may_report_q_and_receive_states(
    llm: SpecLLM, pair: tuple[Path, Path], form: str, taps: tuple[int, ...]
) -> None:
    plain = SpecLLM.load(*pair, drafter="none", verify_width=WIDTH, precision="32-true")
    for mode, settings in (*((mode, {}) for mode in MODES), ("rejection", dict(top_k=None))):
        ours, theirs = Reporting(form, taps), Reporting(form, taps)
        own = llm.with_drafter(ours)
        texts = decode(own, mode, **settings)
        built = graphs(llm)
        # Greedy and coupled texts are the same with every drafter; with rejection, the same as with uncompiled steps.
        if mode != "rejection":
            assert texts == decode(llm.with_drafter("none"), mode), mode
        assert texts == decode(plain.with_drafter(theirs), mode, **settings), mode
        if taps:
            told, expected = torch.cat(ours.told), torch.cat(theirs.told)
            assert told.shape == expected.shape == (told.size(0), 32 * len(taps)) and told.size(0) > 2 * 40
            assert torch.allclose(told, expected, rtol=1e-4, atol=1e-4)
        assert len({str(decode(own, mode, **settings, seed=seed)) for seed in (1, 2)}) == (1 if mode == "greedy" else 2)
        decode(own, mode, **settings, max_new_tokens=9, speculative_k=2)
        out = own.generate("y" * 100, **MODES[mode] | settings | {"seed": 4}, max_new_tokens=100, speculative_k=3)
        assert out.stats.proposed > 0 and (len(llm.runner), graphs(llm)) == (built[0], built), mode


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["greedy", "coupled"])
def test_a_compiled_batch_has_one_graph_for_any_number_of_texts(llm: SpecLLM, mode: str) -> None:
    plain = decode(llm.with_drafter("none"), mode, batch_size=3)
    assert decode(llm, mode, batch_size=3) == plain
    built = graphs(llm)
    more = [*PROMPTS, "x", "yz", *PROMPTS, "o" * 70]
    outs = llm.generate(more, **MODES[mode], max_new_tokens=40, seed=1, speculative_k=3, batch_size=3)
    assert [out.token_ids for out in outs][: len(plain)] == plain and sum(out.stats.accepted for out in outs) > 0
    assert graphs(llm) == built


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["greedy", "coupled", "rejection of all ids"])
def test_for_every_form_of_q_the_steps_are_built_before_the_first_token(
    llm: SpecLLM, mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Samplers that do not use q ignore it; the rejection sampler over all ids converts every form to dense."""
    settings = dict(top_k=None) if mode.startswith("rejection") else {}
    real, ready = Engine.prepare, []
    monkeypatch.setattr(Engine, "prepare", lambda self: (real(self), ready.append(graphs(llm)))[0])
    for form in ("none", "sparse", "dense", "short"):
        decode(llm.with_drafter(Reporting(form)), mode.split()[0], **settings)
        assert set(ready) == {graphs(llm)}, form
        ready.clear()


def test_settings_that_cannot_be_compiled_are_refused(pair: tuple[Path, Path]) -> None:
    for flags, said in (
        (dict(placement="sequential"), "'single' or 'replicate'.*'sequential'"),
        (dict(placement="tensor_parallel", devices=2, accelerator="cpu"), "with placement 'tensor_parallel'"),
        (dict(draft_device="cpu"), "one device.*'cpu'"),
    ):
        with pytest.raises(InputError, match=said):
            SpecLLM.load(*pair, compile=True, **flags)


def test_a_missing_compiler_is_reported_and_nothing_is_loaded(
    pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from torch._inductor import cpp_builder

    def none_found() -> str:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none_found)
    with pytest.raises(SystemExit) as exit_:
        main(["generate", "--checkpoint_dir", str(pair[0]), "--compile", "true"])
    assert exit_.value.code == 2
    err = capsys.readouterr().err
    assert "needs a C++ compiler" in err and "Traceback" not in err


def test_a_failing_compiler_ends_in_a_sentence() -> None:
    compiled = CompiledRunner(torch.device("cpu"))
    with pytest.raises(InputError, match=r"compile failed \(.*load without compile"):
        compiled.run("name", lambda x: print(x.tolist()), torch.zeros(2))  # no graph can hold this
    assert len(compiled) == 0 and "name" not in compiled


def test_any_k_is_split_into_pieces() -> None:
    binary, split = (4, 2, 1), CompiledRunner(torch.device("cpu")).split
    assert [split(k, binary) for k in range(8)] == [[], [1], [2], [2, 1], [4], [4, 1], [4, 2], [4, 2, 1]]
    assert split(15, binary) == [4, 4, 4, 2, 1] and split(7, (7, *binary)) == [7] and split(6, (7, *binary)) == [4, 2]
    assert split(3, (5,)) == [5] and split(5, (3,)) == [3, 3] and split(0, (5,)) == []
    assert FixedK(5).pieces == (5,) and FixedK(0).pieces == ()
    adaptive = [AdaptiveK(RoundCosts((0.0,) * (most + 1), (1.0,) * (most + 1)), Acceptance(most)) for most in (1, 3, 7)]
    for most, choice in zip((1, 3, 7), adaptive):  # for every k, no draft is wasted
        assert all(sum(split(k, choice.pieces)) == k for k in range(1, most + 1)), most
    # Without graphs any k is one step.
    assert Runner().split(7, binary) == [7] and Runner().pieces((7, 4), 1) == (7, 4)


@pytest.mark.slow
def test_long_draft_steps_share_no_graph(
    llm: SpecLLM, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    binary, compiled = (7, 4, 2, 1), CompiledRunner(torch.device("cpu"))
    fitting = compiled.pieces
    # At most 16 layers, in equal parts, so that no draft is wasted.
    assert fitting((7,), 1) == fitting((7,), 2) == (7,) and fitting((7,), 3) == fitting((7,), 30) == (1,)
    assert fitting((6,), 4) == (3,) and fitting(binary, 4) == (4, 2, 1) and fitting(binary, 16) == (1,)
    for n_layer in range(1, 40):
        for k in range(1, 16):
            sizes = compiled.split(k, fitting((k,), n_layer))
            assert sum(sizes) == k and (max(sizes) == 1 or max(sizes) * n_layer <= 16)
    alone = decode(llm.with_drafter("none"), "greedy")
    monkeypatch.setattr(runner, "LAYERS_PER_GRAPH", 2)
    other = SpecLLM.load(*pair, verify_width=WIDTH, compile=True, precision="32-true")
    outs = other.generate(PROMPTS, **MODES["greedy"], max_new_tokens=40, seed=1, speculative_k=3)
    assert [out.token_ids for out in outs] == alone
    # One graph to verify and one that drafts a single token, which serves three times a round.
    assert len(other.runner) == 2 and max(out.stats.proposed / out.stats.rounds for out in outs) > 2


@pytest.mark.slow
def test_the_command_says_that_it_compiles(pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--checkpoint_dir", pair[0], "--drafter", "none", "--verify_width", 2, "--prompt", "abc"]
    with pytest.raises(SystemExit) as exit_:
        main(["generate", *map(str, flags), "--compile", "true", "--max_new_tokens", "5"])
    err = capsys.readouterr().err
    assert exit_.value.code in (0, None)
    assert err.count("Compiling; this takes a while") == 1 and "Compiling took" in err


@pytest.mark.slow
def test_verify_passes_with_compiled_steps(
    pair: tuple[Path, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("litspec.commands.verify.CONTEXTS", 3)
    monkeypatch.setattr("litspec.commands.verify.TABLE_DRAWS", 5_000)
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    compiled = []
    real = CompiledRunner.run
    monkeypatch.setattr(
        CompiledRunner, "run", lambda self, key, *args: (compiled.append(key), real(self, key, *args))[1]
    )
    flags = ["--checkpoint_dir", pair[0], "--draft_dir", pair[1], "--verify_width", 3, "--max_new_tokens", 24]
    flags += ["--prompts_file", tmp_path / "prompts.txt", "--output_format", "json", "--top_k", 20]
    with pytest.raises(SystemExit) as exit_:
        main(["verify", *map(str, flags), "--compile"])
    report = json.loads(capsys.readouterr().out)
    assert exit_.value.code in (0, None) and report["passed"]
    assert [check["detail"][:3] for check in report["checks"][:8]] == ["2/2"] * 8
    assert len(report["checks"]) == 10 and "3 contexts" in report["checks"][9]["detail"]
    # Graphs: three to verify, four for the draft model (one more for a single token), two for early exit.
    assert len(set(compiled)) == 3 + 4 + 2 and len(compiled) > 100


RULES: dict[str, Any] = dict(
    logit_bias={"a": 1.5, "b": -2},
    bad_words=["c", [3, 4], [5, 6, 7]],
    repetition_penalty=1.2,
    presence_penalty=0.3,
    frequency_penalty=0.2,
)


@pytest.mark.slow
def test_bias_bans_penalties_and_grammars_are_inputs_of_a_graph(llm: SpecLLM) -> None:
    mode, rules = "coupled", dict(RULES)
    if find_spec("llguidance") is not None:
        rules["regex"] = "([a-g ]{3} *)+[0-9]"
    alone = decode(llm.with_drafter("none"), mode, **rules)
    built = graphs(llm)
    assert decode(llm, mode, **rules) == alone
    drafting = graphs(llm)
    # Other values and other words of the same number need no other graph.
    others = rules | dict(logit_bias={"d": 2}, bad_words=["a", [8, 4], [5, 6, 8]], repetition_penalty=1.5)
    assert decode(llm, mode, **others) != alone
    assert graphs(llm) == drafting and drafting > built


@pytest.mark.slow
def test_log_probabilities_are_those_of_uncompiled_steps(llm: SpecLLM, pair: tuple[Path, Path]) -> None:
    settings: dict[str, Any] = dict(max_new_tokens=12, temperature=0, logprobs=2, speculative_k=3)
    out = llm.with_drafter("prompt_lookup").generate("abcabc", **settings)
    plain = SpecLLM.load(*pair, verify_width=WIDTH, precision="32-true").generate("abcabc", **settings)
    assert out.token_ids == plain.token_ids
    for a, b in zip(out.logprobs or [], plain.logprobs or [], strict=True):
        assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        assert [value for _, value in a.top] == pytest.approx([value for _, value in b.top], abs=1e-4)
    assert len(out.logprobs or []) == 12
