"""`litspec bench`: its arithmetic on scripted numbers, its simulation on tiny models, its command in this process.

Nothing here asks how long anything took.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import lively_weights, tiny_config, write_checkpoint
from heads import random_dflash

from litspec import SpecLLM, benchmark
from litspec.__main__ import main
from litspec.benchmark import (
    Parts,
    Report,
    Run,
    SimulatedDrafter,
    advise,
    check_plot,
    interleaved,
    measure,
    plain_decoder,
    plot_report,
    summarize,
)
from litspec.drafters import Cost, Drafter, DraftSession, Proposal
from litspec.engine.sequence import Block
from litspec.llm import Completion
from litspec.model import packed
from litspec.report import Stats
from litspec.sampling import Sampling

CPU = torch.device("cpu")
# The first is the beginning of the second, and of the third only the first letters are.
PROMPTS = ["abc", "abcabc", "abd", "hello"]
GREEDY = dict(temperature=0.0)
COUPLED = dict(temperature=0.8, sampler="coupled", seed=3)


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny random target and a tiny random draft."""
    folder = tmp_path_factory.mktemp("pair")
    weights = lively_weights(tiny_config(), seed=1)
    return write_checkpoint(folder / "target", weights=weights), write_checkpoint(folder / "draft", seed=2)


@pytest.fixture(scope="module")
def llm(pair: tuple[Path, Path]) -> SpecLLM:
    return SpecLLM.load(*pair, accelerator="cpu")


@pytest.fixture(autouse=True)
def small_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bandwidth of a copy is measured on less memory."""
    real = benchmark.copy_bandwidth
    monkeypatch.setattr(benchmark, "copy_bandwidth", lambda device: real(device, 2**16))


def run(capsys: pytest.CaptureFixture[str], *args: Any) -> tuple[int, str, str]:
    """Runs the command in this process: exit code, stdout, stderr."""
    with pytest.raises(SystemExit) as exit_:
        main(["bench", *(str(arg) for arg in args)])
    out, err = capsys.readouterr()
    return exit_.value.code, out, err


# ---- arithmetic ----


def text(
    seconds: float, tokens: int, rounds: int, proposed: int = 0, accepted: int = 0, stop: bool = False
) -> Completion:
    """A finished text with a number of tokens from rounds, and the prefill's token.

    Of its rounds some propose four tokens and the others none.
    """
    each = [min(4, max(0, proposed - 4 * i)) for i in range(rounds)]
    assert sum(each) == proposed
    blocks = [Block([], [], i, m, 0, None) for i, m in enumerate([0, *each])]
    stats = Stats(
        new_tokens=tokens + 1 - stop, rounds=rounds, proposed=proposed, accepted=accepted, decode_seconds=seconds
    )
    return Completion("", "", [], "stop" if stop else "length", stats, [], blocks)


PARTS = Parts(
    verify={1: 10.0, 2: 10.5, 4: 11.0, 8: 12.0},
    rows=(2, 4, 8),
    draft={"draft_model": 2.0, "prompt_lookup": 0.0},
    prefill=30.0,
    prompt_size=40,
    weight_bytes=500,
    copy_bandwidth=200.0,
)


def test_speedup_ideal_and_efficiency_are_those_of_the_definitions() -> None:
    runs = [Run("none", 0, 1), Run("none", 0, 2), Run("draft_model", 4, 8), Run("prompt_lookup", "auto", 8)]
    measured = [
        # Of three turns one text each; seconds per token: 11, 10, 10.
        [[text(220.0, 20, 20)], [text(200.0, 20, 20)], [text(200.0, 20, 20)]],
        # 13.2, 12.5, 12.5
        [[text(264.0, 20, 20)], [text(250.0, 20, 20)], [text(250.0, 20, 20)]],
        # 5, 5, 8
        [[text(100.0, 20, 8, 28, 12)], [text(100.0, 20, 8, 28, 12)], [text(160.0, 20, 8, 24, 12)]],
        # 12, 12, 12; half of the rounds find nothing
        [[text(240.0, 20, 16, 40, 4)]] * 3,
    ]
    summarize(runs, measured, PARTS)
    plain, wide, draft, lookup = runs

    assert (plain.speedup, plain.ideal, plain.efficiency) == (1.0, 1.0, 1.0)
    assert plain.tokens_per_second == pytest.approx(1 / 10)
    assert wide.speedup == pytest.approx(10 / 12.5)  # the median of 11 / 13.2, 10 / 12.5 and 10 / 12.5
    assert wide.ideal == pytest.approx(10 / 10.5) and wide.efficiency == pytest.approx(0.8 / (10 / 10.5))

    assert draft.acceptance_rate == pytest.approx(36 / 80)
    assert draft.tokens_per_round == pytest.approx(60 / 24)
    assert draft.proposed_per_round == pytest.approx(80 / 24)
    assert draft.tokens_per_second == pytest.approx(1 / 5)
    assert draft.speedup == pytest.approx(10 / 5)  # the median of 11 / 5, 10 / 5 and 10 / 8
    # Of its 24 rounds 20 verify four proposals, in eight rows, and 4 verify none, in two.
    verifying = (20 * 12 + 4 * 10.5) / 24
    assert draft.ideal == pytest.approx(2.5 * 10 / (80 / 24 * 2 + verifying))
    assert draft.efficiency == pytest.approx(2.0 / (25 / (80 / 12 + verifying)))

    assert lookup.acceptance_rate == pytest.approx(0.1) and lookup.tokens_per_round == pytest.approx(1.25)
    assert lookup.ideal == pytest.approx(1.25 * 10 / ((10 * 12 + 6 * 10.5) / 16))
    assert PARTS.weight_bandwidth == 50.0
    assert [PARTS.verify_for(m) for m in (0, 1, 2, 3, 4, 7)] == [10.5, 10.5, 11.0, 11.0, 12.0, 12.0]
    assert PARTS.verify_for(0, plain=True) == 10.0


def test_a_slow_text_in_each_turn_has_no_effect_and_texts_are_weighted_by_length() -> None:
    runs = [Run("none", 0, 1), Run("draft_model", 4, 8)]
    plain = [text(300.0, 30, 30), text(100.0, 10, 10)]
    draft = [text(100.0, 30, 10, 40, 20), text(50.0, 10, 5, 20, 5)]
    slow = [text(9999.0, 30, 10, 40, 20), text(9999.0, 10, 5, 20, 5)]
    # Each text is slow in one of three turns, so only one turn has no slow text.
    summarize(runs, [[plain] * 3, [draft, [slow[0], draft[1]], [draft[0], slow[1]]]], PARTS)
    assert runs[1].tokens_per_second == pytest.approx(40 / 150)
    assert runs[1].speedup == pytest.approx(400 / 150)
    assert runs[1].tokens_per_round == pytest.approx(40 / 15)


def test_a_stop_token_counts_among_the_tokens_of_rounds() -> None:
    runs = [Run("none", 0, 1), Run("draft_model", 4, 8)]
    # Twenty tokens and the stop; a text whose first token is a stop has no rounds.
    empty = text(0.001, 0, 0, stop=True)
    turns = [[[text(210.0, 21, 21, stop=True), empty]], [[text(105.0, 21, 7, 28, 14, stop=True), empty]]]
    summarize(runs, turns, PARTS)
    assert [run.tokens_per_round for run in runs] == [1.0, 3.0]
    assert [run.tokens_per_second for run in runs] == pytest.approx([0.1, 0.2])
    assert runs[0].ideal == 1.0 and runs[1].speedup == pytest.approx(2.0)


def test_advice_names_the_fastest_drafter_and_k() -> None:
    runs = [Run("none", 0, 1), Run("none", 0, 8, speedup=1.01)]
    runs += [Run("early_exit", "auto", 8, speedup=1.5), Run("draft_model", 4, 8, speedup=1.25)]
    best = "Best here: --drafter early_exit --speculative_k auto, 1.50 times plain decoding."
    assert advise(runs, PARTS) == best
    assert "--drafter early_exit --exit_layer 3 --speculative_k auto" in advise(runs, PARTS, exit_layer=3)
    assert advise(runs, PARTS, simulate_acceptance=0.8).startswith("Simulated, with 80% right proposals: Best here: ")
    runs[2].speedup = 1.2
    assert "--drafter draft_model --speculative_k 4" in advise(runs, PARTS, exit_layer=3)
    assert "exit_layer" not in advise(runs, PARTS, exit_layer=3)
    runs[3].drafter = "eagle3"  # a head is had by the flag of the draft model, whose place it takes
    assert "--drafter draft_model --speculative_k 4" in advise(runs, PARTS)


def test_advice_says_why_plain_decoding_is_faster() -> None:
    runs = [Run("none", 0, 1), Run("none", 0, 8, speedup=0.8), Run("draft_model", 1, 8, speedup=0.7)]
    runs.append(Run("draft_model", 4, 8, tokens_per_round=1.5, proposed_per_round=3.5, speedup=0.75))
    advice = advise(runs, PARTS)
    assert advice.startswith("Plain decoding is faster (--drafter none), because the best drafter ")
    # 1.5 tokens per round at 0.75 of plain decoding's speed: a round takes two plain steps.
    assert "(draft_model, k = 4) brings 1.50 tokens per round, and its round takes 2.00 plain steps" in advice
    assert advice.endswith("(its parts: 1.20 to verify, 0.70 to draft).")
    assert "\n" not in advice


# ---- turns ----


def test_functions_take_turns_and_the_last_of_a_few_runs_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    now, calls = [0.0], []
    monkeypatch.setattr(benchmark.time, "perf_counter", lambda: now[0])

    def scripted(name: str, seconds: list[float]) -> Callable[[], None]:
        def function() -> None:
            calls.append(name)
            now[0] += seconds.pop(0)

        return function

    # Two turns are warm-up; then the second of each two runs counts, since one run of 9 s is enough to warm up.
    a = [9.0] * 4 + [9.0, 1.0, 9.0, 5.0, 9.0, 2.0]
    b = [9.0] * 4 + [9.0, 4.0, 9.0, 3.0, 9.0, 8.0]
    assert interleaved({"a": scripted("a", a), "b": scripted("b", b)}, 3, CPU) == {"a": 2.0, "b": 4.0}
    assert calls == ["a", "a", "b", "b"] * 5
    quick = [0.001] * 14 + [7.0]
    assert interleaved({"quick": scripted("quick", quick)}, 1, CPU) == {"quick": 7.0}  # four runs are enough as well
    # The function in `before` is run each time, and not timed.
    calls.clear()
    draft, verification = [9.0, 1.0] * 3, [100.0] * 6
    before = {"draft": scripted("verification", verification)}
    assert interleaved({"draft": scripted("draft", draft)}, 1, CPU, before) == {"draft": 1.0}
    assert calls == ["verification", "draft"] * 6


@pytest.mark.slow
def test_runs_take_turns_text_by_text(llm: SpecLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    calls, ticks = [], []
    real = SpecLLM.generate

    def generate(self: SpecLLM, prompt: str, **settings: Any) -> Completion:
        drafter = type(self.drafter).__name__
        calls.append((prompt, settings["index"], drafter, self.verify_width, settings.get("speculative_k")))
        return real(self, prompt, **settings)

    monkeypatch.setattr(SpecLLM, "generate", generate)
    prompts = ["abc", "a longer prompt"]
    report = measure(
        llm,
        llm.with_drafter("none", verify_width=1),
        ["draft_model", "prompt_lookup"],
        prompts,
        ks=[2, "auto"],
        sampling=Sampling(0.0),
        max_new_tokens=8,
        repeats=2,
        progress=lambda done, total: ticks.append((done, total)),
    )
    ways = [("NoneType", 1, 0), ("NoneType", 8, 0), ("DraftModel", 8, 2), ("DraftModel", 8, "auto")]
    ways += [("PromptLookup", 8, 2), ("PromptLookup", 8, "auto")]
    first = [(prompt, j, "NoneType", 8, None) for j, prompt in enumerate(prompts)]
    warm_up = [(prompts[1], 1, *way) for way in ways]  # on the longest text alone
    turn = [(prompt, j, *way) for j, prompt in enumerate(prompts) for way in ways]
    assert calls == first + warm_up + turn + turn
    assert [(run.drafter, run.width, run.k) for run in report.runs] == [
        ("none", 1, 0),
        ("none", llm.runner.rows(llm.placed.rows)[0], 0),
        ("draft_model", 8, 2),
        ("draft_model", 8, "auto"),
        ("prompt_lookup", 8, 2),
        ("prompt_lookup", 8, "auto"),
    ]
    # Each run used its own drafter, with one decoder for all of them.
    assert [run.proposed_per_round for run in report.runs[:2]] == [0, 0] and report.runs[2].proposed_per_round > 1.5
    assert ticks == [(i, len(calls) + 1) for i in range(len(calls) + 2)]  # the parts are one of them


@pytest.mark.slow
def test_plain_decoding_has_weights_laid_out_for_one_row(
    capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse() -> SpecLLM:
        raise AssertionError("loaded once more")

    # Weights by columns, as small models have them for many rows, are slower for one.
    with pytest.raises(AssertionError, match="once more"):
        plain_decoder(SpecLLM.load(pair[0], accelerator="cpu"), refuse)
    monkeypatch.setattr(packed, "COLUMNS", (0, 5))
    unpacked = SpecLLM.load(pair[0], accelerator="cpu")
    plain = plain_decoder(unpacked, refuse)
    assert plain.placed.model is unpacked.placed.model and plain.verify_width == 1 and plain.drafter is None
    if not torch.backends.mkldnn.is_available():
        pytest.skip("this torch was built without oneDNN")

    # Tiny layers are laid out for several rows too, as large ones are.
    monkeypatch.setattr(packed, "GAINS", {torch.float32: (1, 3)})
    wide = SpecLLM.load(pair[0], accelerator="cpu")
    assert any(isinstance(module, packed.PackedLinear) for module in wide.placed.model.modules())
    with pytest.raises(AssertionError, match="once more"):
        plain_decoder(wide, refuse)

    seen = []
    real = benchmark.measure_parts
    monkeypatch.setattr(benchmark, "measure_parts", lambda *args, **more: seen.append(args[:2]) or real(*args, **more))
    flags = ["--checkpoint_dir", pair[0], "--accelerator", "cpu", "--drafter", "prompt_lookup", "--speculative_k", "2"]
    code, out, _ = run(capsys, *flags, "--repeats", 1, "--max_new_tokens", 8, "--output_format", "json")
    assert code == 0
    ((llm, plain),) = seen
    assert llm.verify_width == 8 and any(isinstance(m, packed.PackedLinear) for m in llm.placed.model.modules())
    assert plain.verify_width == 1 and not any(isinstance(m, packed.PackedLinear) for m in plain.placed.model.modules())
    assert json.loads(out)["parts"]["weight_bytes"] == benchmark.step_bytes(unpacked.placed.model)


# ---- simulated drafts ----


class Script(Drafter, DraftSession):
    """Proposes zeros, at most `most` per round, and records its calls."""

    def __init__(self, most: int = 7) -> None:
        self.most = most
        self.asked: list[int] = []
        self.told: list[int] = []
        self.closed = 0

    def start(self, target: Any, max_length: int, sampler: Any) -> Script:
        self.told = []
        return self

    def cost(self, k: int) -> Cost:
        return Cost(5 * k, 2)

    def commit(self, tokens: list[int], input_pos: int, hidden: Any = None) -> None:
        assert input_pos == len(self.told)
        self.told += tokens

    def propose(self, token: int, input_pos: int, k: int) -> Proposal:
        assert token == self.told[-1] and input_pos == len(self.told) - 1
        self.asked.append(k)
        return Proposal(torch.zeros(min(k, self.most), dtype=torch.int64))

    def close(self) -> None:
        self.closed += 1


def alone(llm: SpecLLM, prompts: list[str], **settings: Any) -> tuple[list[Completion], list[list[int]]]:
    """The target's own texts, and the tokens of prompts and texts."""
    texts = [llm.with_drafter("none").generate(prompt, index=i, **settings) for i, prompt in enumerate(prompts)]
    return texts, [llm.codec.encode(prompt).tolist() + text.token_ids for prompt, text in zip(prompts, texts)]


def simulate(
    llm: SpecLLM, drafter: Any, acceptance: float, prompts: list[str] = PROMPTS, **settings: Any
) -> list[Completion]:
    """The same with simulated proposals; asserts that it is the same."""
    k = settings.pop("speculative_k")
    texts, ids = alone(llm, prompts, **settings)
    simulated = SimulatedDrafter(drafter, ids, acceptance, llm.placed.model.config.vocab_size)
    decoder = llm.with_drafter(simulated)
    completions = []
    for i, prompt in enumerate(prompts):
        completions.append(decoder.generate(prompt, index=i, speculative_k=k, **settings))
    assert [c.token_ids for c in completions] == [text.token_ids for text in texts]
    assert [c.finish_reason for c in completions] == [text.finish_reason for text in texts]
    return completions


def right_share(completions: list[Completion]) -> float:
    """Of the proposals before which all others of their round were right, the share of right ones."""
    rounds = [block for text in completions for block in text.blocks[1:]]
    accepted = sum(block.accepted for block in rounds)
    return accepted / (accepted + sum(block.accepted < block.proposed for block in rounds))


@pytest.mark.slow
@pytest.mark.parametrize("settings", [GREEDY, COUPLED], ids=["greedy", "coupled"])
@pytest.mark.parametrize(
    ("drafter", "k"),
    [
        ("script", 1),
        ("script", 7),
        # A drafter without cost, since the speed on this machine does not matter here.
        ("script", "auto"),
        ("draft_model", 4),
        ("early_exit", 4),
        ("prompt_lookup", 7),
    ],
)
def test_simulated_proposals_are_right_at_the_rate_asked_for(
    llm: SpecLLM, drafter: str, settings: dict[str, Any], k: Any
) -> None:
    made = Script() if drafter == "script" else llm.with_drafter(drafter).drafter
    completions = simulate(llm, made, 0.8, speculative_k=k, max_new_tokens=100, **settings)
    # Fewer proposals say less about their rate: lookup finds nothing at times, and auto may propose little.
    few = drafter == "prompt_lookup" or k == "auto"
    assert right_share(completions) == pytest.approx(0.8, abs=0.15 if few else 0.08)


@pytest.mark.parametrize("acceptance", [0.0, 1.0])
def test_all_or_none_of_the_simulated_proposals_are_right(llm: SpecLLM, acceptance: float) -> None:
    completions = simulate(llm, Script(), acceptance, speculative_k=7, max_new_tokens=60, **COUPLED)
    assert [completion.stats.acceptance_rate for completion in completions] == [acceptance] * len(PROMPTS)
    assert {completion.stats.rounds for completion in completions} == {math.ceil(59 / 8) if acceptance else 59}


def test_a_simulated_draft_runs_as_the_real_one_would(llm: SpecLLM) -> None:
    """It gets the same calls with the committed tokens and is closed; each of its proposals is replaced."""
    script = Script(most=3)
    (completion,) = simulate(llm, script, 0.7, ["hello"], speculative_k=5, max_new_tokens=100, **GREEDY)
    asked, left = [], 99  # tokens that rounds bring
    for block in completion.blocks[1:]:
        k = min(5, left - 1)
        asked += [k] if k else []
        assert block.proposed == min(3, k)
        left -= block.accepted + 1
    assert left == 0 and script.asked == asked
    assert script.told == llm.codec.encode("hello").tolist() + completion.token_ids
    assert script.closed == 1
    simulated = SimulatedDrafter(script, [], 0.5, 10)
    assert (simulated.max_k, simulated.cost(3), simulated.taps, simulated.name) == (7, Cost(15, 2), (), "Script")


def test_texts_of_one_length_are_corrupted_at_different_positions(llm: SpecLLM) -> None:
    texts = [list(range(100)), list(range(100)), list(range(100))]

    def proposals(*args: Any, **kwargs: Any) -> list[list[int]]:
        return [text.tolist() for text in SimulatedDrafter(*args, **kwargs)._proposals]

    patterns = [[a == b for a, b in zip(*pair)] for pair in zip(proposals(Script(), texts, 0.5, 200), texts)]
    assert len({tuple(pattern) for pattern in patterns}) == 3
    again = proposals(Script(), texts, 0.5, 200)
    assert again == proposals(Script(3), texts, 0.5, 200)  # for any drafter
    assert again != proposals(Script(), texts, 0.5, 200, seed=1)
    # The last id is corrupted into one that exists.
    assert proposals(Script(), [[199] * 50], 0.0, 200) == [[0] * 50]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [GREEDY, COUPLED], ids=["greedy", "coupled"])
def test_simulated_texts_stop_where_the_target_stops(tmp_path: Path, settings: dict[str, Any]) -> None:
    weights = lively_weights(tiny_config(), seed=3)
    endless = SpecLLM.load(write_checkpoint(tmp_path / "endless", weights=weights), accelerator="cpu")
    texts, _ = alone(endless, PROMPTS, max_new_tokens=60, **settings)
    ids = texts[0].token_ids
    stop_at = next(i for i, token in enumerate(ids) if i > 20 and token not in ids[:i])
    folder = write_checkpoint(tmp_path / "stopping", weights=weights, generation_config={"eos_token_id": ids[stop_at]})
    llm = SpecLLM.load(folder, accelerator="cpu")
    for acceptance in (0.8, 1.0):
        completions = simulate(llm, Script(), acceptance, speculative_k=4, max_new_tokens=60, **settings)
        assert completions[0].finish_reason == "stop" and len(completions[0].token_ids) == stop_at


def test_nothing_can_be_measured_where_every_text_ends_at_once(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    weights = lively_weights(tiny_config(), seed=3)
    plain = SpecLLM.load(write_checkpoint(tmp_path / "endless", weights=weights), accelerator="cpu")
    first = plain.generate("abc", max_new_tokens=1, temperature=0.0).token_ids
    folder = write_checkpoint(tmp_path / "mute", weights=weights, generation_config={"eos_token_id": first})
    (tmp_path / "prompts.txt").write_text("abc\n\nabc\n")
    code, out, err = run(capsys, "--checkpoint_dir", folder, "--prompts_file", tmp_path / "prompts.txt")
    assert code == 2 and out == "" and "2 prompts" in err and "first token" in err


# ---- the command ----


def flags_of(pair: tuple[Path, Path], *more: Any) -> list[Any]:
    flags = ["--checkpoint_dir", pair[0], "--draft_dir", pair[1], "--accelerator", "cpu", "--repeats", 2]
    return [*flags, "--max_new_tokens", 24, "--speculative_k", "1,3,auto,3", *more]


@pytest.mark.slow
def test_heads_are_measured_beside_the_draft_model_and_advised_by_their_folder(
    capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path], tmp_path: Path
) -> None:
    first, second = (random_dflash(tiny_config(), tmp_path / name, seed=i) for i, name in enumerate("ab"))
    flags = flags_of(pair, "--heads", f"{first}, {second}", "--speculative_k", 2, "--output_format", "json")
    code, out, err = run(capsys, *flags)
    assert code == 0, err
    report = json.loads(out)
    names = [run["drafter"] for run in report["runs"]]
    assert names == ["none", "none", "draft_model", "prompt_lookup", "early_exit", "dflash (a)", "dflash (b)"]
    assert all(run["proposed_per_round"] > 0 for run in report["runs"] if "dflash" in run["drafter"])
    assert {"dflash (a)", "dflash (b)"} <= set(report["parts"]["draft"])
    # Folders of the same name are told apart by their whole paths.
    others = [random_dflash(tiny_config(), tmp_path / name / "head", seed=i) for i, name in enumerate("cd")]
    flags += ["--drafter", "prompt_lookup", "--heads", ",".join(map(str, others))]
    code, out, err = run(capsys, *flags)
    names = [run["drafter"] for run in json.loads(out)["runs"]]
    assert names[-2:] == [f"dflash ({folder})" for folder in others]


def test_the_advice_names_the_folder_of_a_head() -> None:
    runs = [Run("none", 0, 1), Run("none", 0, 8), Run("draft_model", 4, 8, speedup=2.0), Run("dflash (a)", 4, 8)]
    runs[-1].speedup = 3.0
    assert "--draft_dir x/a --speculative_k 4, 3.00" in advise(runs, PARTS, folders={"dflash (a)": "x/a"})


def numbers(value: Any) -> list[float]:
    """All numbers in a JSON value."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        return [number for item in value for number in numbers(item)]
    return [value] if isinstance(value, (int, float)) else []


@pytest.mark.slow
def test_json_is_complete_finite_and_agrees_with_itself(
    capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path]
) -> None:
    code, out, _ = run(capsys, *flags_of(pair, "--output_format", "json", "--verify_width", 6))
    assert code == 0 and out.count("\n") == 1
    report = json.loads(out, parse_constant=lambda name: pytest.fail(f"{name} in the JSON"))
    assert all(math.isfinite(number) for number in numbers(report))
    parts, runs = report["parts"], report["runs"]
    drafters = ["draft_model", "prompt_lookup", "early_exit"]
    rows = parts["rows"]
    assert rows[-1] == 6 and {int(width) for width in parts["verify"]} == {1, *rows}
    assert list(parts["draft"]) == drafters
    assert min(numbers(parts)) > 0
    assert parts["weight_bandwidth"] == pytest.approx(parts["weight_bytes"] / parts["verify"]["1"])
    expected = [("none", 0, 1), ("none", 0, rows[0])] + [(name, k, 6) for name in drafters for k in (1, 3, "auto")]
    assert [(run["drafter"], run["k"], run["width"]) for run in runs] == expected
    for run_ in runs:
        drafting = run_["proposed_per_round"] * parts["draft"].get(run_["drafter"], 0)
        if run_["drafter"] == "none":
            verifying = [parts["verify"][str(run_["width"])]]
        else:  # a round takes one of these
            verifying = [parts["verify"][str(width)] for width in rows]
        gain = run_["tokens_per_round"] * parts["verify"]["1"]
        lowest, highest = gain / (drafting + max(verifying)), gain / (drafting + min(verifying))
        assert lowest * (1 - 1e-9) <= run_["ideal"] <= highest * (1 + 1e-9)
        assert run_["efficiency"] == pytest.approx(run_["speedup"] / run_["ideal"])
        assert run_["tokens_per_second"] > 0 and run_["tokens_per_round"] >= 1
    assert runs[0]["speedup"] == 1
    settings = report["settings"]
    assert settings["prompts"] == 3 and settings["repeats"] == 2 and settings["verify_width"] == 6
    assert settings["target"] == settings["draft"] == "tiny-llama-test" and settings["temperature"] == 0
    assert settings["dtype"] == "float32" and settings["device"] == "cpu" and settings["torch"] == torch.__version__
    best = max(runs[2:], key=lambda run_: run_["speedup"])
    assert f"{best['drafter']}" in report["advice"] and f"{best['k']}" in report["advice"]


@pytest.mark.slow
@pytest.mark.parametrize("settings", [[], ["--temperature", 0.8, "--sampler", "coupled"]], ids=["greedy", "coupled"])
def test_a_simulated_run_of_the_command(
    capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path], settings: list[Any]
) -> None:
    more = ["--simulate_acceptance", 1, "--drafter", "draft_model", "--output_format", "json"]
    code, out, _ = run(capsys, *flags_of(pair, *more, *settings))
    assert code == 0
    report = json.loads(out)
    assert report["advice"].startswith("Simulated, with 100% right proposals: ")
    assert report["settings"]["simulate_acceptance"] == 1
    for run_ in report["runs"][2:]:
        # Each text finds its own tokens. On a busy machine `auto` may find that proposals do not pay.
        assert run_["acceptance_rate"] == 1 or (run_["k"] == "auto" and run_["proposed_per_round"] == 0)
    # 23 tokens after the prefill's: five rounds of four, and one that may propose two.
    assert report["runs"][3]["tokens_per_round"] == pytest.approx(23 / 6)


@pytest.mark.slow
def test_text_fits_and_ends_with_the_advice_and_the_plot_is_a_picture(
    capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path], tmp_path: Path
) -> None:
    code, out, _ = run(capsys, *flags_of(pair, "--plot", tmp_path / "bench.png", "--temperature", 1.0))
    assert code == 0
    *lines, advice = out.splitlines()
    assert advice.startswith(("Best here: --drafter ", "Plain decoding is faster"))
    tables = [line for line in lines if not line.startswith("A plain step reads")]
    assert max(map(len, tables)) <= 80
    assert sum(line.startswith(("draft_model ", "prompt_lookup ", "early_exit ")) for line in lines) == 9
    assert "Drafter:" not in out
    picture = (tmp_path / "bench.png").read_bytes()
    assert picture.startswith(b"\x89PNG\r\n\x1a\n") and len(picture) > 10_000


@pytest.mark.slow
@pytest.mark.parametrize("output_format", ["text", "json"])
def test_the_rows_of_a_head_have_its_own_name(
    capsys: pytest.CaptureFixture[str],
    pair: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    output_format: str,
) -> None:
    plotted: list[str] = []
    monkeypatch.setattr(benchmark, "plot_report", lambda report, path: plotted.extend(r.drafter for r in report.runs))
    head = random_dflash(tiny_config(), tmp_path / "head")
    flags = flags_of((pair[0], head), "--quick", "--speculative_k", 2, "--output_format", output_format)
    code, out, _ = run(capsys, *flags, "--plot", tmp_path / "bench.png")
    assert code == 0 and "draft_model" not in out.replace("--drafter draft_model", "")
    names = ["none", "none", "dflash", "prompt_lookup", "early_exit"]
    assert plotted == names
    if output_format == "json":
        assert [run_["drafter"] for run_ in json.loads(out)["runs"]] == names
        assert list(json.loads(out)["parts"]["draft"]) == names[2:]
    else:
        assert sum(line.startswith("dflash ") for line in out.splitlines()) == 1
        assert "draft step, dflash" in out


def report_of(*runs: Run) -> Report:
    return Report(PARTS, [Run("none", 0, 1), Run("none", 0, 8), *runs], "", {"simulate_acceptance": 0.8, "target": "x"})


@pytest.mark.parametrize("name", ["picture.svg", "picture.PDF"])
def test_plots_of_other_kinds(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    check_plot(str(path))
    assert not path.exists()
    plot_report(report_of(Run("draft_model", "auto", 8, speedup=0.01, ideal=3.0)), str(path))
    assert path.read_bytes()[:4] == (b"<?xm" if name.endswith("svg") else b"%PDF")


def test_checking_a_plot_leaves_the_file_that_is_there(tmp_path: Path) -> None:
    path = tmp_path / "old.png"
    path.write_bytes(b"an older picture")
    check_plot(str(path))
    assert path.read_bytes() == b"an older picture"


def test_bad_input_is_found_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any, **more: Any) -> SpecLLM:
        raise AssertionError("loaded")

    monkeypatch.setattr(SpecLLM, "load", load)
    (tmp_path / "empty.txt").write_text("\n \n")
    cases = [
        (["--speculative_k", "1,two"], ["speculative_k", "'1,two'"]),
        (["--speculative_k", "1,,2"], ["speculative_k", "'1,,2'"]),
        (["--speculative_k", ""], ["speculative_k", "''"]),
        (["--speculative_k", "0,1"], ["speculative_k", "'0,1'"]),
        (["--speculative_k", "1,8"], ["speculative_k", "'1,8'", "verify_width = 8"]),
        (["--speculative_k", "4", "--verify_width", 4], ["speculative_k", "'4'", "verify_width = 4"]),
        (["--verify_width", 1, "--speculative_k", "auto"], ["verify_width", "at least 2", "got 1"]),
        (["--repeats", 0], ["repeats", "at least 1", "got 0"]),
        (["--max_new_tokens", 7], ["max_new_tokens", "at least 8", "got 7"]),
        (["--simulate_acceptance", 1.5], ["simulate_acceptance", "[0, 1]", "1.5"]),
        (["--simulate_acceptance", "nan"], ["simulate_acceptance", "[0, 1]", "nan"]),
        (["--simulate_acceptance", 0.8, "--temperature", 0.8], ["simulate_acceptance", "--sampler coupled", "0.8"]),
        (["--temperature", -1], ["temperature", "-1"]),
        (["--prompts_file", tmp_path / "nowhere.txt"], ["prompts_file", "nowhere.txt"]),
        (["--prompts_file", tmp_path / "empty.txt"], ["prompts_file", "empty.txt", "no prompt"]),
        (["--heads", f"{tmp_path / 'nowhere'},"], ["heads", "nowhere", "draft_dir"]),
        (["--plot", tmp_path / "nowhere" / "bench.png"], ["plot", "nowhere"]),
        (["--plot", tmp_path], ["plot", str(tmp_path)]),
        (["--plot", tmp_path / "bench.docx"], ["plot", "bench.docx", ".png"]),
        (["--plot", tmp_path / "bench"], ["plot", "bench", ".png"]),
    ]
    for flags, named in cases:
        code, out, err = run(capsys, *flags)
        assert code == 2 and out == "", (flags, err)
        assert "Traceback" not in err and err.count("litspec:") == 1, (flags, err)
        for word in named:
            assert word in err, (flags, err)


def test_a_missing_matplotlib_is_found_before_anything_is_loaded(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*args: Any, **more: Any) -> SpecLLM:
        raise AssertionError("loaded")

    monkeypatch.setattr(SpecLLM, "load", load)
    for name in [name for name in sys.modules if name.split(".")[0] == "matplotlib"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    code, out, err = run(capsys, "--plot", tmp_path / "bench.png")
    assert code == 2 and out == "" and "pip install" in err and "litspec[bench]" in err


def test_what_the_pair_lacks_is_named(capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path]) -> None:
    target = ["--checkpoint_dir", pair[0], "--accelerator", "cpu"]
    for flags, named in [
        (["--drafter", "draft_model"], ["draft_dir"]),
        (["--drafter", "early_exit", "--exit_layer", 9], ["exit_layer", "9"]),
        (["--max_new_tokens", 300], ["300", "256"]),
    ]:
        code, out, err = run(capsys, *target, *flags)
        assert code == 2 and out == "" and "Traceback" not in err
        for word in named:
            assert word in err, (flags, err)


@pytest.mark.slow
def test_results_are_printed_even_if_the_plot_fails(
    capsys: pytest.CaptureFixture[str], pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from matplotlib.figure import Figure

    def savefig(self: Figure, *args: Any, **more: Any) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(Figure, "savefig", savefig)
    flags = flags_of(pair, "--plot", tmp_path / "bench.png", "--output_format", "json", "--drafter", "prompt_lookup")
    code, out, err = run(capsys, *flags)
    assert code == 2 and "No space left" in err and json.loads(out)["runs"]
