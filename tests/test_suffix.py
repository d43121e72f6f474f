"""Suffix decoding against a brute-force count that follows its definition, and against prompt lookup."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest
from checkpoints import lively_weights, tiny_config, write_checkpoint
from hypothesis import given
from hypothesis import strategies as st

from litspec import SpecLLM
from litspec.drafters import Drafter, PromptLookup, Suffix
from litspec.drafters.suffix import Memory, SuffixSession, SuffixTree
from litspec.errors import InputError
from litspec.sampling import Sampling, make_sampler
from litspec.testing import check_drafter

GREEDY = Sampling(temperature=0)
COUPLED = Sampling(sampler="coupled")
REJECTION = Sampling()


def begin(drafter: Drafter, sampling: Sampling = GREEDY, stop_ids: tuple[int, ...] = ()) -> SuffixSession:
    return drafter.start(SimpleNamespace(stop_ids=stop_ids), 1000, make_sampler(sampling, seed=0))


def propose(session: SuffixSession, text: Sequence[int], k: int = 7) -> list[int]:
    return session.propose(text[-1], len(text) - 1, k).tokens.tolist()


def remembering(outputs: Sequence[Sequence[int]], **settings: float) -> Suffix:
    drafter = Suffix(7, **settings)
    for output in outputs:
        tell(begin(drafter), [0], output).close()
    return drafter


def tell(session: SuffixSession, prompt: Sequence[int], output: Sequence[int]) -> SuffixSession:
    session.commit(prompt, 0)
    for i, token in enumerate(output):
        session.commit([token], len(prompt) + i)
    return session


# --- the definition ---------------------------------------------------------------------------------------------------


def count(run: Sequence[int], texts: Sequence[Sequence[int]]) -> int:
    return sum(list(text[i : i + len(run)]) == list(run) for text in texts for i in range(len(text) - len(run) + 1))


def last_place(run: Sequence[int], texts: Sequence[Sequence[int]]) -> tuple[int, int]:
    return max(
        (t, i)
        for t, text in enumerate(texts)
        for i in range(len(text) - len(run) + 1)
        if list(text[i : i + len(run)]) == list(run)
    )


def follower(run: Sequence[int], texts: Sequence[Sequence[int]], goes_on: bool) -> tuple[int, float] | None:
    """The most frequent next token of an n-gram (the most recent in a tie), and its relative frequency.

    Args:
        goes_on: Whether the last text is unfinished; then its end does not count as an occurrence.
    """
    after = {t for text in texts for t in text if count([*run, t], texts)}
    if not after:
        return None
    best = max(after, key=lambda t: (count([*run, t], texts), last_place([*run, t], texts)))
    ends = goes_on and list(texts[-1][len(texts[-1]) - len(run) :]) == list(run)
    return best, count([*run, best], texts) / (count(run, texts) - ends)


def expected(
    text: Sequence[int], texts: Sequence[Sequence[int]], k: int, depth: int, goes_on: bool
) -> tuple[list[int], float, int]:
    """The best path by the paper's formula, its score and match; then continued after its longest known suffix."""
    factor, offset, least = 2.0, 5.0, 0.1
    best: tuple[list[int], float, float, int] = ([], 0.0, 1.0, 0)

    def walk(run: list[int], tokens: list[int], score: float, prob: float, limit: int):
        while len(tokens) < limit and len(run) < depth and (found := follower(run, texts, goes_on)):
            token, share = found
            if prob * share < least:
                break
            prob *= share
            score += prob
            tokens, run = [*tokens, token], [*run, token]
        return tokens, score, prob

    for m in range(1, min(len(text), depth - 1) + 1):
        run = list(text[len(text) - m :])
        if follower(run, texts, goes_on) is None:
            break
        tokens, score, prob = walk(run, [], 0.0, 1.0, min(k, int(m * factor + offset)))
        if tokens and score >= best[1]:
            best = tokens, score, prob, m
    tokens, score, prob, m = best
    while tokens and len(tokens) < min(k, int(m * factor + offset)):
        known = [*text, *tokens]
        ends = [known[len(known) - n :] for n in range(min(len(known), depth - 1), 0, -1)]
        run = next((end for end in ends if follower(end, texts, goes_on)), None)
        if run is None:
            break
        longer = walk(run, tokens, score, prob, min(k, int(m * factor + offset)))
        if longer[0] == tokens:
            break
        tokens, score, prob = longer
    return tokens, score, m


TOKENS = st.integers(0, 3)
TEXT = st.lists(TOKENS, min_size=1, max_size=12)


@given(
    earlier=st.lists(TEXT, max_size=3),
    prompt=TEXT,
    rounds=st.lists(st.lists(TOKENS, min_size=1, max_size=4), max_size=4),
    k=st.integers(0, 3),
    sampling=st.sampled_from([GREEDY, COUPLED, REJECTION]),
    stop_ids=st.sampled_from([(), (3,)]),
)
def test_finds_what_a_brute_force_count_finds(earlier, prompt, rounds, k, sampling, stop_ids):
    drafter = Suffix(3)
    for output in earlier:
        tell(begin(drafter), [1, 1], output).close()
    session = begin(drafter, sampling, stop_ids)
    text: list[int] = []
    for block in [prompt, *rounds]:
        session.commit(block, len(text))
        text += block
    tokens, score, match = expected(text, [text], k, drafter.depth, goes_on=True)
    if sampling is not REJECTION:
        other = expected(text, earlier, k, drafter.depth, goes_on=False)
        if (other[1], other[2]) > (score, match):
            tokens = other[0]
    if any(token in stop_ids for token in tokens):
        tokens = tokens[: next(j for j, token in enumerate(tokens) if token in stop_ids) + 1]
    for _ in range(2):  # proposing does not change the state
        assert propose(session, text, k) == tokens


@given(TEXT, st.integers(2, 5))
def test_a_tree_counts_every_run_up_to_its_depth_and_none_beyond(text, depth):
    tree = SuffixTree(depth)
    for token in text:
        tree.append(token)
    runs = {tuple(text[i:j]) for i in range(len(text)) for j in range(i + 1, min(i + depth, len(text)) + 1)}
    assert len(tree) == len(runs) + 1, "and the empty run"
    for run in runs:
        assert tree._counts[tree.find(run)] == count(run, [text])


def test_what_followed_most_often_is_preferred_to_what_followed_last():
    text = [1, 2, 7, 1, 2, 7, 1, 2, 8, 1, 2]
    assert propose(tell(begin(Suffix(7)), text, []), text, 1) == [7]
    assert propose(tell(begin(PromptLookup(7)), text, []), text, 1) == [8]


def test_a_text_that_repeats_itself_is_drafted_beyond_its_end():
    text = [1, 2, 3, 1, 2, 3]
    assert propose(tell(begin(Suffix(7)), text, []), text) == [1, 2, 3, 1, 2, 3, 1]


def test_a_proposal_ends_with_its_first_stop_token():
    text = [5, 6, 2, 7, 2, 8, 5]
    assert propose(tell(begin(Suffix(7), stop_ids=(2,)), text, []), text, 5) == [6, 2]


def test_where_nothing_matches_nothing_is_proposed():
    assert propose(tell(begin(Suffix(7)), [1, 2, 3], []), [1, 2, 3]) == []
    assert propose(tell(begin(Suffix(7)), [1], []), [1]) == []


# --- earlier outputs --------------------------------------------------------------------------------------------------


def test_what_earlier_texts_said_is_drafted_unless_the_text_would_depend_on_it():
    drafter = remembering([[4, 5, 6, 7, 8]])
    for sampling, found in ((GREEDY, [6, 7, 8]), (COUPLED, [6, 7, 8]), (REJECTION, [])):
        assert propose(tell(begin(drafter, sampling), [9, 4, 5], []), [9, 4, 5]) == found


def test_prompts_are_no_outputs_and_what_one_text_ended_with_does_not_lead_into_the_next():
    drafter = Suffix(7)
    tell(begin(drafter), [4, 5, 6], [1, 2]).close()
    tell(begin(drafter), [4, 5, 6], [3, 4]).close()
    assert propose(tell(begin(drafter), [4, 5], []), [4, 5]) == []
    assert propose(tell(begin(drafter), [8, 2], []), [8, 2]) == []
    assert propose(tell(begin(drafter), [8, 1], []), [8, 1]) == [2]


def test_a_text_that_was_never_closed_leaves_nothing_behind():
    drafter = remembering([[4, 5, 6]])
    before = len(drafter._earlier.trees[0])
    abandoned = tell(begin(drafter), [1, 2], [4, 5, 9, 9])
    propose(abandoned, [1, 2, 4, 5, 9, 9])
    del abandoned
    assert len(drafter._earlier.trees[0]) == before
    assert propose(tell(begin(drafter), [4, 5], []), [4, 5]) == [6]


def test_a_text_is_remembered_once_however_often_it_is_closed():
    drafter = Suffix(7)
    session = tell(begin(drafter), [0], [4, 5])
    session.close()
    session.close()
    assert drafter._earlier.trees[0]._counts[0] == 2


def test_many_threads_may_draft_and_end_texts_concurrently():
    drafter = Suffix(7)
    outputs = [[(i * 7 + j * j) % 50 for j in range(60)] for i in range(8)]
    wrong: list[list[int]] = []

    def work(output: list[int]) -> None:
        for _ in range(10):
            session = begin(drafter)
            session.commit([0], 0)
            for j, token in enumerate(output):
                session.commit([token], j + 1)
                proposed = propose(session, [0, *output[: j + 1]])
                wrong.extend([proposed] if any(not 0 <= token < 50 for token in proposed) else [])
            session.close()

    threads = [threading.Thread(target=work, args=(output,)) for output in outputs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    tree = drafter._earlier.trees[0]
    assert not wrong and tree._counts[0] == 10 * sum(map(len, outputs))
    for run in (outputs[0][:3], outputs[5][20:26], [outputs[3][7]]):
        assert tree._counts[tree.find(run)] == 10 * count(run, outputs)


def test_memory_is_bounded_and_what_is_recent_is_kept():
    drafter = Suffix(7, max_nodes=2_000)
    for i in range(200):
        tell(begin(drafter), [0], [1_000 * i + j for j in range(40)]).close()
        trees = drafter._earlier.trees
        assert len(trees) <= 2 and all(len(tree) <= 2_000 for tree in trees)
    assert propose(tell(begin(drafter), [0, 199_010], []), [0, 199_010], 3) == [199_011, 199_012, 199_013]
    assert propose(tell(begin(drafter), [0, 10], []), [0, 10], 3) == []


def test_a_long_text_is_bounded_too_and_goes_on_being_drafted():
    memory = Memory(16, 1_000)
    memory.append(range(5_000))
    memory.append([4_998])
    assert len(memory.trees) == 2 and all(len(tree) <= 1_000 for tree in memory.trees)
    found = [tree.search([4_998], 3, 2, 5, 0.1).tokens for tree in memory.trees]
    assert [4_999, 4_998, 4_999] in found


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"factor": -1.0}, "got -1.0 and 5.0"),
        ({"factor": 0.0, "offset": 0.5}, "got 0.0 and 0.5"),
        ({"min_prob": 1.5}, "got 1.5"),
        ({"max_nodes": 10}, "at least 32, got 10"),
    ],
)
def test_impossible_settings_are_refused_with_a_sentence(settings, sentence):
    with pytest.raises(InputError, match=sentence):
        Suffix(7, **settings)


# --- what it brings ---------------------------------------------------------------------------------------------------


def tokens_per_round(drafter: Drafter, texts: Sequence[tuple[str, str]], k: int = 7) -> list[float]:
    """Simulates consecutive texts of a target with known output, with bytes as tokens."""
    result = []
    for prompt, output in texts:
        tokens, n = list((prompt + output).encode()), len(prompt.encode())
        session = begin(drafter)
        session.commit(tokens[:n], 0)
        session.commit(tokens[n : n + 1], n)
        n += 1
        first, rounds = n, 0
        while n < len(tokens):
            proposal = propose(session, tokens[:n], min(k, len(tokens) - n - 1))
            right = 0
            while right < len(proposal) and proposal[right] == tokens[n + right]:
                right += 1
            session.commit(tokens[n : n + right + 1], n)
            n += right + 1
            rounds += 1
        session.close()
        result.append((len(tokens) - first) / rounds)
    return result


PARAGRAPH = "Sir Walter Elliot, of Kellynch Hall, was a man who never took up any book but the Baronetage. "
REPETITIVE = [
    ("Say it again: " + PARAGRAPH, PARAGRAPH * 2),
    ("Mend the names: " + PARAGRAPH, PARAGRAPH.replace("Sir Walter", "Mr. Darcy").replace("book", "paper")),
    ("Count: one two three", " one two three" * 20),
    ("No:", " no" * 40),
    (
        "Ladies:",
        "".join(f"\n- {n} is a lady of the family, and {n} is good." for n in ("Anne", "Mary", "Jane", "Emma")),
    ),
    (
        "class Store:\n",
        "".join(f"    def {n}(self, x):\n        return self.{n}_of + x\n\n" for n in ("foo", "bar", "baz", "qux")),
    ),
]


def test_on_repetitive_texts_no_round_average_is_below_that_of_prompt_lookup():
    for text in REPETITIVE:
        (suffix,), (lookup,) = tokens_per_round(Suffix(7), [text]), tokens_per_round(PromptLookup(7), [text])
        assert suffix >= lookup, text[0]


def test_a_series_of_similar_prompts_is_drafted_better_than_by_prompt_lookup():
    series = [
        (
            f"Write to {name}.",
            f"Dear {name}, I thank you for your letter of {day}, which I had yesterday. Yours ever, A.",
        )
        for name, day in (("Anne", "Monday"), ("Mary", "Friday"), ("Jane", "Sunday"), ("Emma", "Tuesday"))
    ]
    suffix, lookup = tokens_per_round(Suffix(7), series), tokens_per_round(PromptLookup(7), series)
    assert all(s > 2 * p for s, p in zip(suffix[1:], lookup[1:]))
    alone = [tokens_per_round(Suffix(7), [text])[0] for text in series]
    assert all(s > 2 * a for s, a in zip(suffix[1:], alone[1:]))


# --- with a model -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> SpecLLM:
    folder: Path = tmp_path_factory.mktemp("target")
    config = tiny_config()
    return SpecLLM.load(write_checkpoint(folder, config, weights=lively_weights(config)), drafter="suffix")


def test_it_is_chosen_by_name_and_follows_the_drafter_protocol(llm: SpecLLM) -> None:
    assert isinstance(llm.drafter, Suffix) and llm.drafter.max_k == llm.verify_width - 1
    check_drafter(llm.drafter, llm, rounds=4, draws=0)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
def test_texts_of_the_embedded_target_are_the_same_with_and_without_it(precision: str) -> None:
    plain = SpecLLM.load(precision=precision, accelerator="cpu", drafter="none")
    suffix = plain.with_drafter("suffix")
    prompts = ["one two three one two three one two", "It was", "It was", "\n\nChapter 12\n\n"]
    for settings in ({"temperature": 0.0}, {"temperature": 0.8, "top_k": 50, "sampler": "coupled", "seed": 3}):
        alone = plain.generate(prompts, max_new_tokens=60, **settings)
        drafted = suffix.generate(prompts, max_new_tokens=60, speculative_k=7, **settings)
        assert [text.token_ids for text in drafted] == [text.token_ids for text in alone]
        assert sum(text.stats.accepted for text in drafted) > 0


def test_the_same_greedy_prompt_again_is_drafted_from_its_first_answer(llm: SpecLLM) -> None:
    suffix = llm.with_drafter("suffix")
    first, again = (suffix.generate("hello", max_new_tokens=60, temperature=0.0, speculative_k=7) for _ in range(2))
    assert again.token_ids == first.token_ids
    assert again.stats.rounds < first.stats.rounds and again.stats.acceptance_rate > 0.8


def test_a_rejection_text_does_not_depend_on_the_texts_before_it(llm: SpecLLM) -> None:
    settings = {"max_new_tokens": 60, "seed": 4, "temperature": 0.7, "speculative_k": 7}
    fresh = llm.with_drafter("suffix").generate("hello", **settings)
    used = llm.with_drafter("suffix")
    used.generate(["hello", "hello there"], max_new_tokens=60, temperature=0.0)
    used.generate("hello", **settings | {"seed": 5})
    after = used.generate("hello", **settings)
    assert after.token_ids == fresh.token_ids
    assert [block.proposed for block in after.blocks] == [block.proposed for block in fresh.blocks]


def test_of_a_stream_that_is_closed_early_what_the_target_had_said_is_remembered(llm: SpecLLM) -> None:
    suffix = llm.with_drafter("suffix")
    text = suffix.generate("hello", max_new_tokens=60, temperature=0.0).token_ids
    suffix = llm.with_drafter("suffix")
    stream = suffix.generate("hello", max_new_tokens=60, temperature=0.0, stream=True)
    next(stream)
    assert len(suffix.drafter._earlier.trees[0]) == 1
    stream.close()
    count = suffix.drafter._earlier.trees[0]._counts[0]
    assert 0 < count < 60
    assert suffix.drafter._earlier.trees[0].find(text[: min(count, 15)]) is not None
