"""Many prompts at once through `SpecLLM`: each text is the one that its prompt gets alone."""

from __future__ import annotations

import functools
import importlib.util
import random
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import tiny_config, write_pair
from engines import GREEDY, REJECTION, complete, disturbed, gpt, place, request, tokens_of
from hypothesis import given, settings
from hypothesis import strategies as st

from litspec import SpecLLM
from litspec.config import GenerateConfig
from litspec.drafters import make_drafter
from litspec.engine.capacity import memory, slots_that_fit, slots_that_pay
from litspec.engine.engine import Engine
from litspec.engine.target import PREFILL_CHUNK
from litspec.errors import InputError
from litspec.model import GPT
from litspec.model.kv_cache import KVCache

RNG = random.Random(7)
SENTENCE = "it was a truth that no one of them could ever have been so much in want of any other person"
WORDS = SENTENCE.split()
# From one token on; the longest cross the borders between K/V buckets.
PROMPTS = [
    "I",
    "The",
    *(" ".join(RNG.choices(WORDS, k=size)) for size in (2, 3, 5, 8, 13, 21, 34, 55, 62, 90, 130, 380)),
]
PROMPTS += [" ".join(RNG.choices(WORDS, k=size)) for size in (1, 1, 7, 500, 900)]
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0},
    "coupled": {"temperature": 0.8, "top_k": 50, "sampler": "coupled"},
    "coupled, auto, top_p": {"temperature": 1.1, "top_p": 0.9, "sampler": "coupled", "speculative_k": "auto"},
    "rejection": {"temperature": 0.8, "top_k": 50},
    "rejection of all ids": {"temperature": 0.9, "speculative_k": 3, "min_new_tokens": 4},
    "rejection, auto": {"temperature": 0.7, "top_k": 20, "speculative_k": "auto"},
    "greedy, penalties": {"temperature": 0, "repetition_penalty": 1.3, "presence_penalty": 0.5, "logprobs": 2},
    "coupled, bans": {"temperature": 0.9, "sampler": "coupled", "min_p": 0.05, "bad_words": ["the", " her"]},
    "rejection, penalties": {"temperature": 0.9, "top_k": 40, "frequency_penalty": 0.4, "logit_bias": {17: 3.0}},
}


@functools.cache
def pair(precision: str) -> SpecLLM:
    return SpecLLM.load(precision=precision)


def asked(way: str) -> dict[str, Any]:
    return {"speculative_k": 4, "max_new_tokens": 12, "seed": 5, **WAYS[way]}


@functools.cache
def alone(precision: str, drafter: str, way: str, number: int) -> list[int]:
    llm = pair(precision).with_drafter(drafter)
    return llm.generate(PROMPTS[number], index=number, **asked(way)).token_ids


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@settings(max_examples=8, deadline=None)
@given(
    slots=st.integers(1, 17),
    drafter=st.sampled_from(["draft_model", "draft_model", "lookup_then_model", "early_exit", "prompt_lookup"]),
    ways=st.lists(st.sampled_from(sorted(WAYS)), min_size=1, max_size=2),
    numbers=st.permutations(range(len(PROMPTS))).map(lambda order: order[: 3 + order[0]]),
    left=st.integers(0, 30),
)
def test_a_text_does_not_depend_on_its_neighbours(
    precision: str, slots: int, drafter: str, ways: list[str], numbers: list[int], left: int
) -> None:
    """Any batch size, order and mixture of settings; the iterator may be dropped in the middle."""
    llm = pair(precision).with_drafter(drafter)
    texts = [
        ((number, ways[i % len(ways)]), PROMPTS[number], GenerateConfig(**asked(ways[i % len(ways)])), number)
        for i, number in enumerate(numbers)
    ]
    count = 0
    for (number, way), result in llm.complete(iter(texts), slots=slots):
        assert not isinstance(result, InputError)
        assert result.token_ids == alone(precision, drafter, way, number)
        count += 1
        if count > left:
            return
    assert count == len(numbers)


@pytest.mark.slow
def test_a_list_gives_its_texts_in_order_for_every_batch_size() -> None:
    llm, given = pair("32-true"), asked("coupled")
    texts = [alone("32-true", "draft_model", "coupled", number) for number in range(8)]
    for batch_size in (1, 2, 5, 8, 100, "auto"):
        found = llm.generate(PROMPTS[:8], batch_size=batch_size, **given)
        assert [completion.token_ids for completion in found] == texts
        assert [completion.prompt for completion in found] == PROMPTS[:8]
    assert llm.generate([], **given) == []


@pytest.mark.parametrize("wrong", [0, -3, 1.5, "many", None])
def test_an_invalid_batch_size_is_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match=r"batch_size must be .*auto"):
        pair("32-true").generate(["a", "b"], batch_size=wrong)


def test_an_impossible_text_is_reported_by_name_and_one_too_long_for_the_engine_waits(tmp_path: Path) -> None:
    llm = SpecLLM.load(*write_pair(tmp_path, tiny_config(block_size=256), noise=0.02))
    config = GenerateConfig(max_new_tokens=9, temperature=0, seed=1)
    texts = [("a", "x", config, 0), ("long", "y " * 400, config, 1), ("b", "z" * 60, config, 2), ("c", "w", config, 3)]
    found = dict(llm.complete(iter(texts), slots=2))
    assert isinstance(found.pop("long"), InputError)
    for name, prompt, *_ in texts:
        if name in found:
            result = found[name]
            assert not isinstance(result, InputError)
            assert result.token_ids == llm.generate(prompt, max_new_tokens=9, temperature=0).token_ids
    assert sorted(found) == ["a", "b", "c"]


# --- what runs together -----------------------------------------------------------------------------------------------


def watched(model: GPT, monkeypatch: pytest.MonkeyPatch, name: str) -> list[tuple[int, ...]]:
    """The shapes of the tokens that a model's method runs from now on."""
    shapes, method = [], getattr(model, name)
    monkeypatch.setattr(
        model, name, lambda idx, *args, **kw: (shapes.append(tuple(idx.shape)), method(idx, *args, **kw))[1]
    )
    return shapes


@pytest.mark.parametrize("sampling", [GREEDY, REJECTION])
def test_all_texts_are_drafted_and_verified_in_one_forward_each(sampling: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    placed = place()
    engine = Engine(placed, drafter := make_drafter("draft_model", placed), slots=6, max_length=80)
    for seed in range(6):
        engine.add(request(placed, drafter, sampling, k=3, new=40, seed=seed, prompt=[3, 1, 4, 1, 5 + seed]))
    engine.step()
    engine.step()
    verified = watched(placed.model, monkeypatch, "verify")
    drafted = watched(placed.draft_model, monkeypatch, "verify")
    engine.step()
    assert [shape[0] for shape in verified] == [6]
    assert [shape[0] for shape in drafted] == [6, 6, 6]


def test_prompts_are_read_a_chunk_at_a_time_while_texts_run(monkeypatch: pytest.MonkeyPatch) -> None:
    target = gpt(block_size=4096)
    placed = place(target, disturbed(target))
    engine = Engine(placed, drafter := make_drafter("draft_model", placed), slots=2, max_length=2000)
    rng = random.Random(0)
    long = [rng.randrange(64) for _ in range(3 * PREFILL_CHUNK + 5)]
    running = engine.add(request(placed, drafter, GREEDY, new=60, k=1))
    engine.step()
    waiting = engine.add(request(placed, drafter, GREEDY, new=7, k=2, prompt=long))
    read = watched(target, monkeypatch, "prefill")
    got: dict[int, list[int]] = {running: [], waiting: []}
    for steps in range(1, 5):
        blocks = engine.step()
        assert running in blocks and sum(size for _, size in read) <= steps * PREFILL_CHUNK
        assert (waiting in blocks) == (steps == 4)
        got[waiting] += tokens_of([block for handle, block in blocks.items() if handle == waiting])
    while len(engine):
        for handle, block in engine.step().items():
            got[handle] += block.tokens
    assert got[waiting] == tokens_of(complete("draft_model", GREEDY, placed=placed, new=7, k=2, prompt=long))


def test_a_common_prefix_of_prompts_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    target = gpt(block_size=2048)
    placed = place(target, disturbed(target))
    rng = random.Random(0)
    shared = [rng.randrange(64) for _ in range(PREFILL_CHUNK + 100)]
    prompts = [shared, shared, [*shared[:-7], 1, 2], [*shared, 9], [9, *shared]]
    expected = [
        tokens_of(complete("draft_model", REJECTION, placed=placed, new=12, seed=i, prompt=prompt))
        for i, prompt in enumerate(prompts)
    ]
    read = watched(target, monkeypatch, "prefill")
    drafter = make_drafter("draft_model", placed)
    drafts = watched(placed.draft_model, monkeypatch, "prefill")
    engine = Engine(placed, drafter, slots=5, max_length=800)
    handles = [
        engine.add(request(placed, drafter, REJECTION, new=12, seed=i, prompt=prompt))
        for i, prompt in enumerate(prompts)
    ]
    got: dict[int, list[int]] = {handle: [] for handle in handles}
    while len(engine):
        for handle, block in engine.step().items():
            got[handle] += block.tokens
    assert list(got.values()) == expected
    # The first and last prompt in full, nothing of the second, and of the others only tokens after the shared chunk.
    rows = [PREFILL_CHUNK, 100, 95, 101, PREFILL_CHUNK, 101]
    assert [size for _, size in read] == rows
    assert sum(size for _, size in drafts) == sum(rows) - 4  # the first draft reads each prompt's last token


# --- memory and how many pay ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def peak_bytes() -> Callable[[Callable[[], object]], int]:
    """The benchmark's measurement of peak additional memory."""
    script = Path(__file__).parents[1] / "scripts" / "bench_forward.py"
    spec = importlib.util.spec_from_file_location("bench_forward", script)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_forward"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.peak_bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("vocab", "slots", "room", "sampling"),
    [
        (64, 16, 1800, GREEDY),
        (512, 12, 1500, REJECTION),
        (32000, 16, 200, GREEDY),
        (32000, 4, 700, GREEDY),
        (32000, 8, 200, REJECTION),
    ],
)
def test_the_memory_of_texts_is_predicted_within_a_tenth(
    vocab: int, slots: int, room: int, sampling: Any, peak_bytes: Callable[[Callable[[], object]], int]
) -> None:
    target = gpt(n_layer=8, vocab=vocab, block_size=4096)
    placed = place(target, gpt(seed=1, n_layer=3, vocab=vocab, block_size=4096))
    drafter = make_drafter("draft_model", placed)
    assert placed.most_rows >= placed.rows[-1]  # measured before
    rng = random.Random(0)
    texts = [
        request(placed, drafter, sampling, k=7, new=10, seed=i, prompt=[rng.randrange(vocab) for _ in range(room - 20)])
        for i in range(slots)
    ]

    def generate() -> None:
        engine = Engine(placed, drafter, slots=slots, max_length=room)
        for text in texts:
            engine.add(text)
        while len(engine):
            engine.step()

    predicted = sum(memory(placed, drafter, slots, room, dense=sampling is REJECTION).values())
    assert predicted == pytest.approx(peak_bytes(generate), rel=0.1)


def test_texts_fill_the_free_memory_but_not_more(monkeypatch: pytest.MonkeyPatch) -> None:
    placed = place()
    drafter = make_drafter("draft_model", placed)
    for slots in (1, 2, 7, 100):
        need = sum(memory(placed, drafter, slots, 300).values())
        for room, fitting in ((need, slots), (need - 1, max(1, slots - 1))):
            monkeypatch.setattr("litspec.engine.capacity._free_bytes", lambda device, room=room: room)
            assert slots_that_fit(placed, drafter, 300) == fitting


def test_more_texts_are_run_together_only_while_each_becomes_cheaper(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr("litspec.engine.capacity.time.perf_counter", lambda: clock[0])

    class Trial:
        def __init__(self, *args: Any) -> None:
            self.count = args[-1]

        def verify(self, rows: int) -> None:
            clock[0] += max(0.01, self.count * 0.0025)

    monkeypatch.setattr("litspec.engine.capacity.Trial", Trial)
    assert slots_that_pay(place()) == 4  # from there on each costs the same


def test_a_cache_is_copied_up_to_a_position() -> None:
    model = gpt()
    one, other = (model.make_cache(40) for _ in range(2))
    for buffer in (*other.k, *other.v):
        buffer.normal_()
    one.copy_from(other, 17)
    for own, theirs in zip((*one.k, *one.v), (*other.k, *other.v)):
        assert torch.equal(own[:, :, :17], theirs[:, :, :17]) and not own[:, :, 17:].any()
    assert isinstance(one.sequences(0, 1), KVCache)
