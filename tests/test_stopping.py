"""Where a text ends: each matcher compared with a brute-force search by definition."""

from __future__ import annotations

import codecs
import functools
import json
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import pytest
import tokenizers
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from litgpt.tokenizer import Tokenizer
from tokenizers import decoders, models

from litspec.errors import InputError
from litspec.stopping import FirstOf, StopStrings, StopTokens, Verdict, stop_sequences
from litspec.text import Detokenizer

tokens = st.integers(0, 2)
streams = st.lists(tokens, max_size=24)
stop_sets = st.lists(st.lists(tokens, min_size=1, max_size=5), max_size=4)
cuts = st.lists(st.integers(0, 24), max_size=6)
ignored = st.sampled_from([0, 0, 1, 3, 30])


def chunks(stream: Sequence[int], cuts: Sequence[int]) -> list[Sequence[int]]:
    """The stream in rounds, some of which may be empty."""
    borders = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    return [stream[begin:end] for begin, end in pairwise(borders)]


def first_sequence(stream: Sequence[int], stops: Sequence[Sequence[int]], ignore_first: int) -> Verdict | None:
    for n in range(1, len(stream) + 1):
        lengths = [len(s) for s in stops if n - len(s) >= ignore_first and stream[n - len(s) : n] == s]
        if lengths:
            return Verdict(n - max(lengths), n)
    return None


def beginning_of_a_sequence(stream: Sequence[int], stops: Sequence[Sequence[int]], ignore_first: int) -> int:
    """The longest end of the stream with which a stop begins."""
    tails = [stream[at:] for at in range(ignore_first, len(stream))]
    return max((len(t) for t in tails if any(len(t) < len(s) and s[: len(t)] == t for s in stops)), default=0)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(streams, stop_sets, cuts, ignored)
def test_stop_tokens_are_found_wherever_the_rounds_cut_the_stream(
    stream: list[int], stops: list[list[int]], cuts: list[int], ignore_first: int
) -> None:
    matcher, seen = StopTokens(stops, ignore_first), 0
    expected = first_sequence(stream, stops, ignore_first)
    for chunk in chunks(stream, cuts):
        verdict, seen = matcher.push(chunk), seen + len(chunk)
        if expected is not None and seen >= expected.end:
            assert verdict == expected
            return
        held = beginning_of_a_sequence(stream[:seen], stops, ignore_first)
        assert verdict == Verdict(seen - held, None)
    assert expected is None


def test_a_stop_that_overlaps_its_own_beginning_is_found() -> None:
    # A counter that falls back to 0 is at the second 1 when the third comes, and misses it.
    assert StopTokens([[1, 1, 2]]).push([3, 1, 1, 1, 2, 5]) == Verdict(2, 5)
    assert StopTokens([[1, 2, 1, 3]]).push([1, 2, 1, 2, 1, 3]) == Verdict(2, 6)


def test_the_stop_that_is_complete_first_counts_and_of_those_the_longest() -> None:
    assert StopTokens([[1, 2, 3, 4], [2, 3]]).push([1, 2, 3, 4]) == Verdict(1, 3)
    assert StopTokens([[2, 3], [1, 2, 3]]).push([1, 2, 3]) == Verdict(0, 3)


def test_no_stop_begins_among_the_tokens_to_ignore() -> None:
    assert StopTokens([[1, 2]], ignore_first=1).push([1, 2, 5]) == Verdict(3, None)
    assert StopTokens([[1, 2]], ignore_first=1).push([1, 1, 2]) == Verdict(1, 3)
    assert StopTokens([[7]], ignore_first=2).push([7, 7, 7]) == Verdict(2, 3)


@pytest.mark.parametrize(
    ("given_", "expected"),
    [
        ((), ()),
        ([2, 5], ((2,), (5,))),
        (([2], [5, 6]), ((2,), (5, 6))),
        (((2,), 5), ((2,), (5,))),
        (([2], [2], 2), ((2,),)),
        ([None], ()),
        (([None], [3]), ((3,),)),
        (torch.tensor([2, 5]), ((2,), (5,))),
        ([torch.tensor([2, 5]), torch.tensor(7)], ((2, 5), (7,))),
        ({4}, ((4,),)),
    ],
)
def test_stop_tokens_may_be_given_as_either_of_litgpts_generate_functions_takes_them(
    given_: object, expected: tuple
) -> None:
    assert stop_sequences(given_) == expected
    assert all(type(id_) is int for sequence in stop_sequences(given_) for id_ in sequence)


def test_an_empty_stop_is_refused() -> None:
    with pytest.raises(InputError, match="empty sequence"):
        stop_sequences(([1], []))
    with pytest.raises(InputError, match="stop string is empty"):
        StopStrings(["a", ""], Bytes([]))


class Bytes:
    """A detokenizer by definition: whole characters only; decodes everything again each time."""

    def __init__(self, vocabulary: Sequence[bytes]) -> None:
        self._vocabulary = vocabulary
        self._tokens: list[int] = []
        self._final = False

    def _decode(self, ids: Sequence[int]) -> str:
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        return decoder.decode(b"".join(self._vocabulary[i] for i in ids), self._final)

    @property
    def text(self) -> str:
        return self._decode(self._tokens)

    def push(self, ids: Sequence[int]) -> str:
        before = len(self.text)
        self._tokens += ids
        return self.text[before:]

    def flush(self) -> str:
        before = len(self.text)
        self._final = True
        return self.text[before:]

    def tokens_for(self, char_count: int) -> int:
        return next(n for n in range(len(self._tokens) + 1) if len(self._decode(self._tokens[:n])) >= char_count)


# Pieces of the bytes of a text, as a tokenizer may cut them: between characters, within them, several at once.
VOCABULARY = [b"a", b"b", b"ab", b"ba", b"aab", "é".encode(), b"\xc3", b"\xa9", b"a\xc3", b"\xa9b", b"\xa9\xc3"]
strings = st.lists(st.text("abé", min_size=1, max_size=4), max_size=3)


@st.composite
def tokenised(draw: st.DrawFn) -> list[int]:
    """A random tokenisation of a random text."""
    rest, ids = draw(st.text("abé", max_size=20)).encode(), []
    while rest:
        ids.append(draw(st.sampled_from([i for i, piece in enumerate(VOCABULARY) if rest.startswith(piece)])))
        rest = rest[len(VOCABULARY[ids[-1]]) :]
    return ids


def first_string(texts: Sequence[str], strings: Sequence[str], ignore_first: int) -> tuple[str, int] | None:
    """The text kept and the tokens seen when the first stop was complete; `texts[n]` is the text of n tokens."""
    for n in range(ignore_first + 1, len(texts)):
        floor = len(texts[ignore_first])
        starts = [at for at in range(floor, len(texts[n])) if any(texts[n].startswith(s, at) for s in strings)]
        if starts:
            return texts[n][: min(starts)], n
    return None


def beginning_of_a_string(text: str, strings: Sequence[str], floor: int) -> int:
    tails = [text[at:] for at in range(floor, len(text))]
    return max((len(t) for t in tails if any(t != s and s.startswith(t) for s in strings)), default=0)


def check_stop_strings(
    detokenizer: Bytes | Detokenizer,
    stream: list[int],
    texts: Sequence[str],
    strings: list[str],
    cuts: list[int],
    ignore_first: int,
) -> None:
    """Compares with the definition, given the text of every prefix of the stream."""

    def covering(text: str) -> int:
        return next(n for n, longer in enumerate(texts) if longer.startswith(text))

    matcher, seen = StopStrings(strings, detokenizer, ignore_first), 0
    expected = first_string(texts, strings, ignore_first)
    for chunk in chunks(stream, cuts):
        verdict, seen = matcher.push(chunk), seen + len(chunk)
        if expected is not None and seen >= expected[1]:
            kept, end = expected
            assert matcher.found
            assert matcher.safe_chars == len(kept)
            assert verdict == Verdict(covering(kept), end)
            return
        floor = len(texts[min(ignore_first, seen)])
        kept = texts[seen][: len(texts[seen]) - beginning_of_a_string(texts[seen], strings, floor)]
        assert not matcher.found
        assert matcher.safe_chars == len(kept)
        assert verdict == Verdict(covering(kept), None)
    assert expected is None


@settings(max_examples=200, deadline=None, derandomize=True)
@given(tokenised(), strings, cuts, ignored)
def test_stop_strings_are_found_however_the_text_is_cut_into_tokens(
    stream: list[int], strings: list[str], cuts: list[int], ignore_first: int
) -> None:
    whole = Bytes(VOCABULARY)
    texts = [whole._decode(stream[:n]) for n in range(len(stream) + 1)]
    check_stop_strings(Bytes(VOCABULARY), stream, texts, strings, cuts, ignore_first)


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A byte-level BPE tokenizer as LitGPT reads it, with the pieces of `VOCABULARY` in that order."""
    letters = {0xC3: "Ã", 0xA9: "©"}  # a byte-level tokenizer's characters for non-ASCII bytes
    spelled = ["".join(letters.get(byte, chr(byte)) for byte in piece) for piece in VOCABULARY]
    model = models.BPE(vocab={piece: i for i, piece in enumerate(spelled)}, merges=[])
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = decoders.ByteLevel()
    folder: Path = tmp_path_factory.mktemp("byte_level")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    return Tokenizer(folder)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(data=st.data())
def test_stop_strings_are_found_in_the_text_of_a_real_tokenizer(byte_level: Tokenizer, data: st.DataObject) -> None:
    stream = data.draw(tokenised())
    texts = [byte_level.processor.decode(stream[:n]).removesuffix("\ufffd") for n in range(len(stream) + 1)]
    check_stop_strings(Detokenizer(byte_level), stream, texts, data.draw(strings), data.draw(cuts), data.draw(ignored))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(tokenised(), st.text("abé", min_size=1, max_size=4))
def test_one_stop_string_ends_the_text_where_str_find_finds_it(stream: list[int], string: str) -> None:
    matcher = StopStrings([string], detokenizer := Bytes(VOCABULARY))
    matcher.push(stream)
    whole = Bytes(VOCABULARY)._decode(stream)
    at = whole.find(string)
    assert matcher.found == (at >= 0)
    if at >= 0:
        assert detokenizer.text[: matcher.safe_chars] == whole[:at]


class AtTheEnd(Bytes):
    """A detokenizer that releases nothing before the end, as with decoders that need all tokens at once."""

    def _decode(self, ids: Sequence[int]) -> str:
        return super()._decode(ids) if self._final else ""


@settings(max_examples=200, deadline=None, derandomize=True)
@given(tokenised(), strings, st.integers(0, 30), ignored, st.sampled_from([Bytes, AtTheEnd]))
def test_at_the_end_stop_strings_are_found_in_what_was_held_back(
    stream: list[int], strings: list[str], cut: int, ignore_first: int, kind: type[Bytes]
) -> None:
    # Cut anywhere, perhaps in the middle of a character, which is then U+FFFD.
    stream, strings = stream[:cut], [*strings, "\ufffd"]
    matcher = StopStrings(strings, detokenizer := kind(VOCABULARY), ignore_first)
    if matcher.push(stream).end is not None:
        return
    whole = kind(VOCABULARY)
    floor = len(whole._decode(stream[:ignore_first]))
    whole._final = True
    text = whole._decode(stream)
    # The text released before has no stop, so a stop must end in the new part.
    starts = [at for at in range(floor, len(text)) if any(text.startswith(s, at) for s in strings)]
    if not starts or len(stream) <= ignore_first:
        assert matcher.finish() is None
        assert not matcher.found
    else:
        whole._tokens = stream
        assert matcher.finish() == whole.tokens_for(min(starts))
        assert matcher.safe_chars == min(starts)
        assert detokenizer.text[: matcher.safe_chars] == text[: min(starts)]


def test_a_token_that_holds_the_end_of_the_text_and_the_beginning_of_a_stop_stays() -> None:
    matcher = StopStrings(["END"], Bytes([b"so ", b"far E", b"ND", b"x"]))
    assert matcher.push([0, 1]) == Verdict(2, None)  # "so far " is certain, and takes both tokens
    assert matcher.safe_chars == 7
    assert matcher.push([2]) == Verdict(2, 3)
    assert matcher.safe_chars == 7


@settings(max_examples=200, deadline=None, derandomize=True)
@given(tokenised(), strings, st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), max_size=2), cuts, ignored)
def test_of_several_matchers_the_one_complete_first_ends_the_text(
    stream: list[int], strings: list[str], sequences: list[list[int]], cuts: list[int], ignore_first: int
) -> None:
    def matchers() -> list[StopTokens | StopStrings]:
        return [StopTokens(sequences, ignore_first), StopStrings(strings, Bytes(VOCABULARY), ignore_first)]

    alone = []
    for matcher in matchers():
        verdicts = [Verdict(0, None)]
        for token in stream:
            verdicts.append(matcher.push([token]))
            if verdicts[-1].end is not None:
                break
        alone.append(verdicts)
    end = min((verdicts[-1].end for verdicts in alone if verdicts[-1].end is not None), default=None)

    both, seen = FirstOf(*matchers()), 0
    for chunk in chunks(stream, cuts):
        verdict, seen = both.push(chunk), seen + len(chunk)
        if end is not None and seen >= end:
            assert verdict == Verdict(min(v[-1].safe for v in alone if v[-1].end == end), end)
            return
        assert verdict == Verdict(min(verdicts[seen].safe for verdicts in alone), None)
    assert end is None


def test_of_two_stops_complete_with_the_same_token_the_one_that_began_first_counts() -> None:
    for string, safe in (("xab", 0), ("b", 1)):
        both = FirstOf(StopTokens([[1]]), StopStrings([string], Bytes([b"xa", b"b"])))
        assert both.push([0, 1]) == Verdict(safe, 2)


def test_no_matcher_at_all_never_ends_a_text() -> None:
    assert FirstOf().push([1, 2, 3]) == Verdict(3, None)
    assert StopTokens().push([1, 2, 3]) == Verdict(3, None)


# --- special tokens, which the text does not show

SPECIAL = ["<|s|>", "<|e|>"]
SPELLED = [*VOCABULARY, *(name.encode() for name in SPECIAL)]


@pytest.fixture(scope="module")
def with_special(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    letters = {0xC3: "Ã", 0xA9: "©"}
    spelled = ["".join(letters.get(byte, chr(byte)) for byte in piece) for piece in VOCABULARY]
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab={piece: i for i, piece in enumerate(spelled)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(SPECIAL)
    folder: Path = tmp_path_factory.mktemp("with_special")
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "GPT2Tokenizer"}))
    return Tokenizer(folder)


def naming(tokenizer: Tokenizer, strings: list[str], ignore_first: int = 0) -> StopStrings:
    special = {name: tokenizer.processor.token_to_id(name) for name in SPECIAL}
    return StopStrings(strings, Detokenizer(tokenizer), ignore_first, special=special, vocab_size=100)


@settings(max_examples=300, deadline=None, derandomize=True)
@given(data=st.data())
def test_a_stop_that_names_special_tokens_is_found_where_the_tokenizer_spells_it(
    with_special: Tokenizer, data: st.DataObject
) -> None:
    """The tokenizer's own decoding without leaving anything out shows special tokens by name: there the stop stands."""
    decode = functools.partial(with_special.processor.decode, skip_special_tokens=False)
    stream = data.draw(st.lists(st.integers(0, len(SPELLED) - 1), min_size=1, max_size=20))
    pieces = st.sampled_from([*"ab", "é", *SPECIAL, *SPECIAL])
    string = "".join(data.draw(st.lists(pieces, min_size=1, max_size=4)))
    if not any(name in string for name in SPECIAL):
        string += data.draw(st.sampled_from(SPECIAL))
    matcher, seen = naming(with_special, [string]), 0
    shown = [decode(stream[:n]) for n in range(len(stream) + 1)]
    end = next((n for n, text in enumerate(shown) if string in text), None)
    for chunk in chunks(stream, data.draw(cuts)):
        verdict, seen = matcher.push(chunk), seen + len(chunk)
        before = shown[-1].split(string)[0]
        for name in SPECIAL:
            before = before.replace(name, "")
        if end is not None and seen >= end:
            assert verdict.end == end and matcher.found and matcher.safe_chars == len(before)
            assert with_special.processor.decode(stream[: verdict.safe]).startswith(before)
            return
        assert verdict.end is None and not matcher.found
        if end is not None:
            assert matcher.safe_chars <= len(before)  # no text is released that a stop removes later
    assert end is None


def test_a_stop_at_the_end_of_held_bytes_is_found_at_once(with_special: Tokenizer) -> None:
    matcher = naming(with_special, ["<|e|>"])
    half = next(i for i, piece in enumerate(VOCABULARY) if piece.endswith(b"\xc3"))
    end = with_special.processor.token_to_id("<|e|>")
    assert matcher.push([half]).end is None
    assert matcher.push([end]) == Verdict(1, 2)


def test_a_special_token_among_the_tokens_to_ignore_is_no_stop(with_special: Tokenizer) -> None:
    end = with_special.processor.token_to_id("<|e|>")
    matcher = naming(with_special, ["<|e|>"], ignore_first=2)
    assert matcher.push([end, end]).end is None
    assert matcher.push([end]).end == 3


def test_a_special_token_that_the_model_cannot_produce_is_refused(with_special: Tokenizer) -> None:
    with pytest.raises(InputError, match=r"contains the special token '<\|e\|>' with the id 12, .* 12\)"):
        StopStrings(["a<|e|>"], Detokenizer(with_special), special={"<|e|>": 12}, vocab_size=12)


def test_the_name_of_a_special_token_spelled_in_letters_is_a_stop_too(with_special: Tokenizer) -> None:
    matcher = StopStrings(["ab"], Detokenizer(with_special), special={"ab": 50}, vocab_size=100)
    spelled = [VOCABULARY.index(b"a"), VOCABULARY.index(b"b")]
    assert matcher.push(spelled) == Verdict(0, 2)
