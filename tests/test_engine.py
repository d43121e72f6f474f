"""Many texts at once: each is the same as alone."""

from __future__ import annotations

import functools
import gc
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_config, write_pair
from engines import (
    COUPLED,
    GREEDY,
    PROMPT,
    REJECTION,
    SEED,
    TARGET,
    VOCAB,
    complete,
    litgpt_model,
    place,
    request,
    tokens_of,
)
from host_reads import HostReads
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from litspec import SpecLLM
from litspec.drafters import Drafter, DraftSession, FixedK, Proposal, make_drafter
from litspec.engine.engine import Engine
from litspec.engine.sequence import Block
from litspec.errors import InputError
from litspec.model import GPT
from litspec.placement import Single
from litspec.sampling import Distribution, Sampling, make_sampler

PLACED = place()
ROOM = 60
RNG = random.Random(0)
# Prompts, budgets and seeds of some texts; two share a prompt.
TEXTS: list[dict[str, Any]] = [
    {"prompt": [RNG.randrange(VOCAB) for _ in range(size)], "new": new, "seed": 100 + size}
    for size, new in ((1, 9), (12, 20), (5, 1), (7, 14), (20, 2), (3, 11))
]
TEXTS.append({"prompt": TEXTS[1]["prompt"], "new": 6, "seed": 9})
SAMPLINGS = {"greedy": GREEDY, "coupled": COUPLED, "rejection": REJECTION}


@functools.cache
def alone(number: int, drafter: str, sampling: Sampling, k: int = 3) -> list[Block]:
    return complete(drafter, sampling, placed=PLACED, k=k, **TEXTS[number])


def play(engine: Engine, handles: Sequence[int] = ()) -> dict[int, list[Block | InputError]]:
    """Runs an engine until all texts have ended; returns the results by handle."""
    results: dict[int, list[Block | InputError]] = {handle: [] for handle in handles}
    while len(engine):
        for handle, block in engine.step().items():
            results.setdefault(handle, []).append(block)
    return results


def open_engine(drafter: str | Drafter, slots: int, placed: Single = PLACED, **kwargs: Any) -> tuple[Engine, Any]:
    made = make_drafter(drafter, placed)
    return Engine(placed, made, slots=slots, max_length=ROOM, **kwargs), made


# --- texts do not know of each other ----------------------------------------------------------------------------------


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("drafter", ["draft_model", "prompt_lookup", "early_exit", "lookup_then_model", "none"])
def test_blocks_of_texts_in_slots_are_those_of_each_alone(drafter, sampling):
    sampling = SAMPLINGS[sampling]
    for slots in (1, 2, 5):
        engine, made = open_engine(drafter, slots)
        handles = [engine.add(request(PLACED, made, sampling, k=3, **text)) for text in TEXTS]
        results = play(engine)
        for number, handle in enumerate(handles):
            assert results[handle] == alone(number, drafter, sampling), (slots, number)


@pytest.mark.parametrize("slots", [1, 3])
def test_a_text_whose_drafter_cannot_start_is_reported_by_handle_and_the_others_continue(slots):
    made = make_drafter("prompt_lookup", PLACED)
    real, starts = made.start, []

    def start(*args: Any) -> DraftSession:
        starts.append(args)
        if len(starts) == 2:
            raise InputError("no room for a draft")
        return real(*args)

    made.start = start
    engine = Engine(PLACED, made, slots=slots, max_length=ROOM)
    handles = [engine.add(request(PLACED, made, GREEDY, k=3, **text)) for text in TEXTS[:4]]
    results = play(engine)
    (error,) = results[handles[1]]
    assert isinstance(error, InputError) and "no room" in str(error)
    for number in (0, 2, 3):
        assert results[handles[number]] == alone(number, "prompt_lookup", GREEDY)


@pytest.mark.parametrize("slots", [3, 4])
def test_greedy_texts_in_slots_are_litgpts(slots):
    model = litgpt_model(TARGET)
    engine, made = open_engine("draft_model", slots)
    handles = [engine.add(request(PLACED, made, GREEDY, k=5, **text)) for text in TEXTS]
    results = play(engine)
    for handle, text in zip(handles, TEXTS):
        tokens = list(text["prompt"])
        with torch.inference_mode():
            while len(tokens) < len(text["prompt"]) + text["new"]:
                tokens.append(int(model(torch.tensor([tokens]))[0, -1].argmax()))
        assert tokens_of(results[handle]) == tokens[len(text["prompt"]) :]


def test_each_text_has_its_own_settings_k_stops_and_least_length():
    engine, made = open_engine("draft_model", 3)
    plain = tokens_of(alone(1, "none", COUPLED))
    cases = [
        (GREEDY, {"k": 1, **TEXTS[0]}),
        (COUPLED, {"k": 7, "stops": [plain[6:8]], **TEXTS[1]}),
        (Sampling(temperature=1.5, top_p=0.7), {"k": 2, **TEXTS[3]}),
        (COUPLED, {"k": 4, "stops": [[plain[3]]], "min_new": 10, **TEXTS[1]}),
        (Sampling(top_k=5, sampler="coupled"), {"k": 0, **TEXTS[5]}),
        (Sampling(top_k=3), {"k": 5, **TEXTS[3]}),
    ]
    handles = [engine.add(request(PLACED, made, sampling, **text)) for sampling, text in cases]
    results = play(engine)
    for handle, (sampling, text) in zip(handles, cases):
        expected = complete("draft_model", sampling, engine=Engine(PLACED, made, max_length=ROOM), **text)
        assert results[handle] == expected
    first = next(i for i in range(20) if plain[i : i + 2] == plain[6:8])
    assert tokens_of(results[handles[1]]) == plain[:first]
    assert results[handles[1]][-1].finish_reason == "stop"
    assert len(tokens_of(results[handles[3]])) >= 10


def test_a_forward_that_may_have_few_rows_is_split_and_changes_no_text():
    for most_rows in (4, 9, 16):
        placed = place()
        placed.most_rows = most_rows
        engine, made = open_engine("draft_model", 5, placed)
        handles = [engine.add(request(placed, made, COUPLED, k=3, **text)) for text in TEXTS]
        results = play(engine)
        for number, handle in enumerate(handles):
            assert results[handle] == alone(number, "draft_model", COUPLED), (most_rows, number)


class Tapped(Drafter):
    """Stores the committed tokens and states."""

    taps = (-1,)

    def __init__(self) -> None:
        self.told: list[list[tuple[list[int], int, torch.Tensor]]] = []

    def start(self, *args: Any) -> DraftSession:
        told: list[tuple[list[int], int, torch.Tensor]] = []
        self.told.append(told)

        class Session(DraftSession):
            def propose(self, token: int, input_pos: int, k: int) -> Proposal:
                return Proposal(torch.tensor([(7 * token + i) % VOCAB for i in range(k)]))

            def commit(self, tokens: Sequence[int], input_pos: int, hidden: Any = None) -> None:
                told.append((list(tokens), input_pos, hidden))

        return Session()


def test_a_drafter_with_taps_sees_the_states_of_its_own_text():
    drafter = Tapped()
    engine, _ = open_engine(drafter, 3)
    handles = [engine.add(request(PLACED, drafter, GREEDY, k=3, **text)) for text in TEXTS]
    results = play(engine)
    for handle, text, told in zip(handles, TEXTS, drafter.told):
        assert [token for tokens, _, _ in told for token in tokens] == text["prompt"] + tokens_of(results[handle])
        size, expected = (
            len(text["prompt"]),
            litgpt_model(TARGET)(torch.tensor([text["prompt"]]))[0].argmax(-1).tolist(),
        )
        for tokens, input_pos, hidden in told:
            # The output head maps the state after the final norm to the token that it predicted.
            predicted = TARGET.lm_head(hidden).argmax(-1).tolist()
            if input_pos >= size:
                assert predicted == tokens
            elif input_pos > 0:
                assert predicted == expected[input_pos - 1 : input_pos - 1 + len(tokens)]
            else:
                assert predicted[1:] == expected[: len(tokens) - 1] and not hidden[0].any()
        # A prompt longer than a block and not than two is read, and told, in two parts.
        assert sum(input_pos < size for _, input_pos, _ in told) == (2 if 8 < size <= 16 else 1)


# --- slots ------------------------------------------------------------------------------------------------------------


def test_a_slot_takes_the_next_text_as_soon_as_its_own_has_ended():
    engine, made = open_engine("draft_model", 2)
    handles = [engine.add(request(PLACED, made, GREEDY, k=2, **text)) for text in TEXTS]
    assert len(engine) == len(TEXTS) and engine.slots == 2
    left, begun = list(handles), set()
    while len(engine):
        results = engine.step()
        # Two texts at a time in the order of `add`; one may still be reading its prompt.
        assert results.keys() <= {*left[:2]} and begun & {*left[:2]} <= results.keys()
        assert engine.running == min(2, len(left)) - sum(b.finish_reason is not None for b in results.values())
        begun |= {*results}
        for handle, block in results.items():
            if block.finish_reason is not None:
                left.remove(handle)
        assert len(engine) == len(left)
    assert begun == {*handles}


def test_a_text_in_the_middle_may_be_cancelled_and_the_others_stay():
    for gone in range(4):
        engine, made = open_engine("draft_model", 3)
        handles = [engine.add(request(PLACED, made, REJECTION, k=3, **TEXTS[n])) for n in (1, 3, 5, 1)]
        results: dict[int, list[Any]] = {handle: [] for handle in handles}
        for _ in range(2):
            for handle, block in engine.step().items():
                results[handle].append(block)
        before = len(results[handles[gone]])
        engine.cancel(handles[gone])
        engine.cancel(handles[gone])
        engine.cancel(99)
        assert len(engine) == 3
        for handle, blocks in play(engine).items():
            results[handle] += blocks
        assert len(results[handles[gone]]) == before
        for i, number in enumerate((1, 3, 5, 1)):
            if i != gone:
                assert results[handles[i]] == alone(number, "draft_model", REJECTION)


def recorded(monkeypatch: pytest.MonkeyPatch, model: GPT) -> tuple[list[Tensor], list[Tensor]]:
    """The tokens of all calls of `prefill` and of `verify` from now on."""
    found: tuple[list[Tensor], list[Tensor]] = ([], [])
    for name, calls in zip(("prefill", "verify"), found):
        call = getattr(model, name)
        monkeypatch.setattr(
            model, name, lambda idx, *args, own=call, calls=calls, **kw: (calls.append(idx), own(idx, *args, **kw))[1]
        )
    return found


@pytest.mark.parametrize("number", [3, 4])  # read in rounds, and in a chunk
def test_a_slot_that_has_read_a_prompt_gets_the_text_with_that_prompt(monkeypatch, number):
    placed, want = place(), alone(number, "none", GREEDY)
    engine, made = open_engine("none", 3, placed)
    for each in (1, number, 5):
        engine.add(request(placed, made, GREEDY, **TEXTS[each]))
    play(engine)
    read, verified = recorded(monkeypatch, placed.model)
    handle = engine.add(request(placed, made, GREEDY, **TEXTS[number]))
    blocks = play(engine)[handle]
    assert blocks == want
    assert read == []
    # The first thing that ran was the text's first token.
    assert verified[0][0, 0] == blocks[0].tokens[0]


@pytest.mark.slow
@pytest.mark.parametrize(("length", "rounds"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 0)])
def test_a_short_prompt_is_read_in_the_rounds_of_the_texts_that_run(monkeypatch, length, rounds):
    placed = place()
    prompt = random.Random(length).choices(range(VOCAB), k=length)
    want = complete("draft_model", COUPLED, placed=placed, prompt=prompt, new=12, k=3)
    engine, made = open_engine("draft_model", 2, placed)
    engine.add(request(placed, made, COUPLED, prompt=TEXTS[1]["prompt"], new=40, k=3))
    engine.step()
    engine.step()
    assert placed.most_rows >= 16  # measured, by forwards that are not to be counted
    read, verified = recorded(monkeypatch, placed.model)
    handle = engine.add(request(placed, made, COUPLED, prompt=prompt, new=12, k=3))
    blocks, steps = [], 0
    while not blocks:
        blocks += [block for number, block in engine.step().items() if number == handle]
        steps += 1
    assert len(verified) == steps == max(1, rounds)  # one forward for both texts in each step
    assert len(read) == (0 if rounds else 1)
    blocks += play(engine)[handle]
    assert blocks == want
    # The first token is LitGPT's argmax with the noise of its position.
    logits = litgpt_model(placed.model)(torch.tensor([prompt]))[0, -1:]
    sampler = make_sampler(COUPLED, seed=SEED)
    assert int(sampler.verify(logits, length, torch.empty(0, dtype=torch.int64)).tokens[0]) == want[0].tokens[0]


def test_a_step_is_one_round_and_k_is_chosen_once_before_each():
    class Counted(FixedK):
        def __init__(self, ks: Sequence[int]) -> None:
            super().__init__(max(ks))
            self.ks, self.seen = list(ks), []

        def choose(self) -> int:
            return self.ks.pop(0)

        def observe(self, *, proposed: int, accepted: int) -> None:
            self.seen.append(proposed)

    engine, made = open_engine(Tapped(), 2)
    texts = [request(PLACED, made, GREEDY, prompt=PROMPT, new=40) for _ in range(2)]
    choices = [Counted([2, 0, 5, 1, 7, 7]), Counted([1, 3, 0, 4, 7, 7])]
    for text, choice in zip(texts, choices):
        text.choose_k = choice
        engine.add(text)
    for round in range(5):
        assert {block.round for block in engine.step().values()} == {round}
        assert [len(choice.seen) for choice in choices] == [round, round]
    assert [choice.seen for choice in choices] == [[2, 0, 5, 1], [1, 3, 0, 4]]


@pytest.mark.parametrize("drafter", ["draft_model", "early_exit"])
@pytest.mark.parametrize("slots", [1, 4])
def test_a_round_of_all_texts_reads_once_to_the_host(slots, drafter):
    engine, made = open_engine(drafter, slots)
    for number in range(slots):
        sampling = (GREEDY, COUPLED, REJECTION, Sampling(top_k=5))[number]
        engine.add(request(PLACED, made, sampling, k=3, new=30, seed=number, stops=[[VOCAB - 1, 1]]))
    engine.step()
    engine.step()
    for _ in range(3):
        with torch.inference_mode(), HostReads() as reads:
            engine.step()
        assert len(reads.seen) == 1


# --- what cannot be ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("prompt", "new"), [([1] * 50, 11), ([1] * 61, 1), ([], 5), ([1, 2], 0)])
def test_an_impossible_text_is_refused_and_the_others_continue(prompt, new):
    engine, made = open_engine("draft_model", 2)
    handle = engine.add(request(PLACED, made, GREEDY, k=3, **TEXTS[1]))
    with pytest.raises(InputError, match="text"):
        engine.add(request(PLACED, made, GREEDY, prompt=prompt, new=new))
    assert len(engine) == 1
    assert play(engine) == {handle: alone(1, "draft_model", GREEDY)}


WRONG = {
    "a list": lambda k: [1] * k,
    "an id that is none": lambda k: Proposal(torch.tensor([VOCAB] * k)),
    "numbers that are none": lambda k: Proposal(
        torch.tensor([3] * k), Distribution(torch.full((k, VOCAB), float("nan")))
    ),
}


class Split(Drafter):
    """Breaks the protocol in the text whose prompt begins with 13, in its third round."""

    name = "Dr. Split"

    def __init__(self, wrong: Any) -> None:
        self.wrong = wrong
        self.closed = 0

    def start(self, *args: Any) -> DraftSession:
        drafter = self

        class Session(DraftSession):
            bad = False
            rounds = 0

            def commit(self, tokens: Sequence[int], input_pos: int, hidden: Any = None) -> None:
                self.bad = self.bad or (input_pos == 0 and tokens[0] == 13)

            def propose(self, token: int, input_pos: int, k: int) -> Proposal:
                self.rounds += 1
                return drafter.wrong(k) if self.bad and self.rounds == 3 else Proposal(torch.tensor([token] * k))

            def close(self) -> None:
                drafter.closed += 1

        return Session()


@pytest.mark.slow
@pytest.mark.parametrize("place_of_the_bad", [0, 1, 2])
@pytest.mark.parametrize("wrong", WRONG)
def test_a_drafter_that_breaks_the_protocol_in_one_text_does_not_affect_the_others(wrong, place_of_the_bad):
    drafter = Split(WRONG[wrong])
    engine, _ = open_engine(drafter, 3)
    bad = {"prompt": [13, 5, 2], "new": 20, "seed": 4}
    texts = [TEXTS[1], TEXTS[3], TEXTS[1]]
    texts.insert(place_of_the_bad, bad)
    handles = [engine.add(request(PLACED, drafter, REJECTION, k=3, **text)) for text in texts]
    results = play(engine)
    for handle, text in zip(handles, texts):
        if text is bad:
            *blocks, error = results[handle]
            assert len(blocks) == 3 and isinstance(error, InputError)
            assert ("Dr. Split" if wrong != "numbers that are none" else "of the drafter") in str(error)
        else:
            other = Split(None)
            assert results[handle] == complete(other, REJECTION, placed=PLACED, k=3, **text)
    assert drafter.closed == 4


# --- any order --------------------------------------------------------------------------------------------------------

actions = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, len(TEXTS) - 1), st.sampled_from(["greedy", "coupled", "rejection"])),
        st.tuples(st.just("step"), st.integers(1, 3), st.none()),
        st.tuples(st.just("cancel"), st.integers(0, 5), st.none()),
    ),
    min_size=3,
    max_size=12,
)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(st.integers(1, 4), actions)
def test_in_any_order_of_texts_steps_and_cancels_each_text_is_what_it_is_alone(slots, actions):
    engine, made = open_engine("draft_model", slots)
    texts: dict[int, tuple[int, Sampling]] = {}
    results: dict[int, list[Any]] = {}
    cancelled = set()

    def step() -> None:
        for handle, block in engine.step().items():
            assert handle not in cancelled
            results[handle].append(block)

    for action, number, name in actions:
        if action == "add":
            sampling = SAMPLINGS[name]
            handle = engine.add(request(PLACED, made, sampling, k=3, **TEXTS[number]))
            texts[handle], results[handle] = (number, sampling), []
        elif action == "step":
            for _ in range(number):
                step()
        elif number < len(texts):
            handle = list(texts)[number]
            engine.cancel(handle)
            cancelled.add(handle)
    while len(engine):
        step()
    for handle, (number, sampling) in texts.items():
        expected = alone(number, "draft_model", sampling)
        got = results[handle]
        assert got == (expected[: len(got)] if handle in cancelled else expected)


# --- streams ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> SpecLLM:
    folder: Path = tmp_path_factory.mktemp("pair")
    return SpecLLM.load(*write_pair(folder, tiny_config(), noise=0.02))


@pytest.mark.slow
@pytest.mark.parametrize("end", ["closed", "forgotten", "read"])
def test_a_stream_returns_its_engine_in_every_way_of_ending(llm, end, monkeypatch):
    made = []
    init = Engine.__init__
    monkeypatch.setattr(Engine, "__init__", lambda self, *args, **kw: (made.append(1), init(self, *args, **kw))[1])
    kept = dict(max_new_tokens=30, temperature=0, speculative_k=3)
    expected = llm.generate("abcabc", **kept).text
    engine = llm._idle
    made.clear()
    stream = llm.generate("abcabc", stream=True, **kept)
    pieces = [next(stream)]
    assert llm._idle is None and len(engine) == 1
    if end == "closed":
        stream.close()
        assert list(stream) == []
    elif end == "forgotten":
        del stream
        gc.collect()
    else:
        assert "".join(pieces + list(stream)) == expected
    assert llm._idle is engine and len(engine) == 0
    assert llm.generate("abcabc", **kept).text == expected
    assert llm._idle is engine and made == []
