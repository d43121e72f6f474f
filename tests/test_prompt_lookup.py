"""Prompt lookup against a brute-force search that follows its definition, and against continuations worked by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from litspec.drafters import PromptLookup
from litspec.errors import InputError


def begin(max_k: int = 8, stop_ids: tuple[int, ...] = (), **lengths: int):
    return PromptLookup(max_k, **lengths).start(SimpleNamespace(stop_ids=stop_ids), 1000, None)


def propose(text: list[int], k: int, **settings) -> list[int]:
    session = begin(**settings)
    session.commit(text, 0)
    return session.propose(text[-1], len(text) - 1, k).tokens.tolist()


def search(text: list[int], k: int, max_ngram: int, min_ngram: int, stop_ids: tuple[int, ...]) -> list[int]:
    """Searches every position of the text, for every length."""
    size = len(text)
    for n in range(max_ngram, min_ngram - 1, -1):
        for end in range(size - 1, n - 1, -1):
            if n <= size and text[end - n : end] == text[size - n :]:
                going_on = list(text)
                while len(going_on) < size + k:
                    going_on.append(going_on[end + len(going_on) - size])
                proposal = going_on[size:]
                stops = [j for j, token in enumerate(proposal) if token in stop_ids]
                return proposal[: stops[0] + 1] if stops else proposal
    return []


TOKENS = st.integers(0, 3)


@given(
    prompt=st.lists(TOKENS, min_size=1, max_size=30),
    rounds=st.lists(st.lists(TOKENS, min_size=1, max_size=8), max_size=8),
    k=st.integers(0, 8),
    lengths=st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
    stop_ids=st.sampled_from([(), (3,), (0, 2)]),
    ask_always=st.booleans(),
)
def test_finds_what_a_brute_force_search_finds(prompt, rounds, k, lengths, stop_ids, ask_always):
    least, most = lengths
    session = begin(stop_ids=stop_ids, max_ngram=most, min_ngram=least)
    text: list[int] = []
    for i, block in enumerate([prompt, *rounds]):
        session.commit(block, len(text))
        text += block
        if ask_always or i == len(rounds):
            expected = search(text, k, most, least, stop_ids)
            for _ in range(2):  # proposing does not change the state
                assert session.propose(text[-1], len(text) - 1, k).tokens.tolist() == expected


def test_the_longest_run_of_tokens_is_preferred_to_a_more_recent_shorter_one():
    assert propose([1, 2, 3, 7, 5, 3, 8, 1, 2, 3], 1) == [7]


def test_among_equally_long_runs_the_most_recent_is_taken():
    assert propose([1, 2, 7, 1, 2, 8, 1, 2], 1) == [8]


def test_one_repeated_token_is_proposed_as_often_as_fits():
    assert propose([9, 4, 4], 7) == [4] * 7


def test_a_repeated_phrase_goes_on_behind_the_end_of_the_text():
    assert propose([1, 2, 3, 1, 2, 3], 7) == [1, 2, 3, 1, 2, 3, 1]


def test_a_proposal_ends_with_its_first_stop_token():
    assert propose([5, 6, 2, 7, 2, 8, 5], 5, stop_ids=(2,)) == [6, 2]


def test_where_nothing_matches_nothing_is_proposed():
    assert propose([1, 2, 3], 5) == []
    assert propose([1, 2, 3, 1], 5, min_ngram=2) == []


def test_no_more_is_proposed_than_the_drafter_may():
    assert propose([4, 4, 4], 7, max_k=3) == [4, 4, 4]


@pytest.mark.parametrize(("max_ngram", "min_ngram"), [(0, 0), (2, 3), (3, 0)])
def test_impossible_lengths_are_refused_with_a_sentence(max_ngram, min_ngram):
    with pytest.raises(InputError, match=f"1 <= min_ngram <= max_ngram, got {min_ngram} and {max_ngram}"):
        PromptLookup(7, max_ngram=max_ngram, min_ngram=min_ngram)
