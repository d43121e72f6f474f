"""Where a text ends: stop tokens, stop sequences, stop strings.

Every matcher receives each committed token of the completion once, in order, and never the prompt. So a stop that
begins inside the prompt does not count, and one that spans two rounds does.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from litspec.errors import InputError


class Verdict(NamedTuple):
    """Result of a matcher, as counts from the first token of the completion.

    Attributes:
        safe: Number of tokens that cannot become part of a stop.
        end: Number of tokens up to and including the stop, if one was found; then tokens after `safe` are removed. Else
            None.
    """

    safe: int
    end: int | None


class Stop(Protocol):
    def push(self, tokens: Sequence[int]) -> Verdict:
        """Takes the tokens of one round. Not called again after it has returned an `end`."""
        ...


class TextMatcher(Protocol):
    """The part of `text.Detokenizer` that stop strings need."""

    @property
    def text(self) -> str: ...

    @property
    def held(self) -> str: ...

    def push(self, tokens: Sequence[int]) -> str: ...

    def flush(self) -> str: ...

    def tokens_for(self, char_count: int) -> int: ...


def stop_sequences(stop_tokens: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    """Normalises the `stop_tokens` of LitGPT's generate functions: a flat list of ids, or an iterable of id sequences.

    Raises:
        InputError: A sequence is empty and would match everywhere.
    """
    sequences = []
    for item in stop_tokens:
        item = item.tolist() if hasattr(item, "tolist") else item
        # A tokenizer without EOS gives None, which is ignored.
        ids = [i for i in (item if isinstance(item, Iterable) else [item]) if i is not None]
        if not ids and item not in (None, [None], (None,)):
            raise InputError("stop_tokens holds an empty sequence; each stop must have at least one token id.")
        if ids:
            sequences.append(tuple(int(i) for i in ids))
    return tuple(dict.fromkeys(sequences))


class StopTokens:
    """Finds the first of several token sequences with the automaton of Aho and Corasick (CACM 18(6), 1975).

    Args:
        sequences: Token ids of each stop.
        ignore_first: Number of tokens at the beginning of the completion in which stops are ignored.
    """

    def __init__(self, sequences: Iterable[Sequence[int]] = (), ignore_first: int = 0) -> None:
        self._next: list[dict[int, int]] = [{}]  # the trie: state -> token -> state
        self._depth = [0]  # number of tokens from the root to a state
        self._match = [0]  # length of the longest stop that ends in a state
        self._fail = [0]  # the state of the longest proper suffix
        for sequence in sequences:
            state = 0
            for token in sequence:
                if token not in self._next[state]:
                    self._next[state][token] = len(self._next)
                    self._next.append({})
                    self._depth.append(self._depth[state] + 1)
                    self._match.append(0)
                    self._fail.append(0)
                state = self._next[state][token]
            self._match[state] = len(sequence)
        queue = deque(self._next[0].values())
        while queue:
            parent = queue.popleft()
            for token, state in self._next[parent].items():
                self._fail[state] = self._step(self._fail[parent], token)
                self._match[state] = self._match[state] or self._match[self._fail[state]]
                queue.append(state)
        self._state = 0
        self._seen = 0
        self._ignore_first = ignore_first

    def _step(self, state: int, token: int) -> int:
        while state and token not in self._next[state]:
            state = self._fail[state]
        return self._next[state].get(token, 0)

    def push(self, tokens: Sequence[int]) -> Verdict:
        """See `Stop.push`. If several stops end at one token, the longest counts."""
        for token in tokens:
            self._seen += 1
            if self._seen <= self._ignore_first:
                continue
            self._state = self._step(self._state, token)
            if length := self._match[self._state]:
                return Verdict(self._seen - length, self._seen)
        return Verdict(self._seen - self._depth[self._state], None)


class _Needles:
    """Searches for strings in a growing text.

    Args:
        strings: The strings to search for.
    """

    def __init__(self, strings: Iterable[str]) -> None:
        self.strings = tuple(dict.fromkeys(strings))
        self.longest = max(map(len, self.strings), default=0)
        self.first = 0  # strings that begin before this position are ignored

    def find(self, text: str, before: int) -> int | None:
        """Begin of the first string that ends after the first `before` characters; None if there is none."""
        begin = max(self.first, before - self.longest + 1)
        return min((at for string in self.strings if (at := text.find(string, begin)) >= 0), default=None)

    def partial(self, text: str) -> int:
        """Length of the longest end of the text that is the beginning of some string."""
        for size in range(min(self.longest - 1, len(text) - self.first), 0, -1):
            if any(string.startswith(text[len(text) - size :]) for string in self.strings):
                return size
        return 0


class _MarkedText:
    """The text with marks for special tokens that occur in stop strings, since the text itself does not show them.

    A mark is an unpaired surrogate, which no text contains.

    Args:
        names: Special tokens that occur in stop strings, with their ids.
    """

    def __init__(self, names: Mapping[str, int]) -> None:
        marks = {name: chr(0xD800 + i) for i, name in enumerate(names)}
        self.mark_of = {id_: marks[name] for name, id_ in names.items()}
        self._marks = marks
        self._names = re.compile("|".join(re.escape(name) for name in sorted(names, key=len, reverse=True)))
        self.text = ""
        self._places: list[int] = []  # positions of the marks in `text`
        self._coming: list[tuple[int, str]] = []  # marks to insert: position in the unmarked text, and mark

    def translate(self, string: str) -> str:
        """A stop string with its special tokens replaced by marks."""
        return self._names.sub(lambda name: self._marks[name[0]], string)

    def grow(self, text: str) -> None:
        """Adds the new part of the text; `text` is the whole unmarked text."""
        size = len(self.text) - len(self._places)
        while self._coming and self._coming[0][0] <= len(text):
            place, mark = self._coming.pop(0)
            self.text += text[size:place]
            self._places.append(len(self.text))
            self.text += mark
            size = max(size, place)
        self.text += text[size:]

    def mark(self, id_: int, place: int) -> None:
        """Adds a special token after the first `place` characters of the unmarked text."""
        self._coming.append((place, self.mark_of[id_]))

    def visible(self, place: int) -> int:
        """Number of characters of the unmarked text before a position of the marked text."""
        return place - bisect_left(self._places, place)


class StopStrings:
    """Finds the first of several strings in the text, across the boundaries of tokens and blocks.

    A string may contain special tokens ("<|im_end|>", "<|im_start|>user"), which the text does not show. They are
    recognized by their ids.

    Attributes:
        safe_chars: Number of characters that no stop can remove any more. After a stop was found, the length of the
            text.

    Args:
        strings: The stop strings.
        detokenizer: A new detokenizer, which is not used elsewhere.
        ignore_first: Number of tokens at the beginning of the completion in which stops are ignored.
        special: The special tokens that the text does not show, with their ids.
        vocab_size: The model produces ids below it; None if unknown.

    Raises:
        InputError: A string is empty and would match everywhere, or can never occur.
    """

    def __init__(
        self,
        strings: Iterable[str],
        detokenizer: TextMatcher,
        ignore_first: int = 0,
        *,
        special: Mapping[str, int] | None = None,
        vocab_size: int | None = None,
    ) -> None:
        self._plain = _Needles(strings)
        if "" in self._plain.strings:
            raise InputError("A stop string is empty; give at least one character.")
        named: dict[str, int] = {}
        for name, id_ in (special or {}).items():
            for string in self._plain.strings:
                if not name or name not in string:
                    continue
                if vocab_size is not None and id_ >= vocab_size:
                    raise InputError(
                        f"The stop string {string!r} contains the special token {name!r} with the id {id_}, which the "
                        f"model cannot produce: its ids are in [0, {vocab_size})."
                    )
                named[name] = id_
        self._marked = _MarkedText(named) if named else None
        self._needles = _Needles(())
        if self._marked is not None:
            translated = [self._marked.translate(string) for string in self._plain.strings]
            self._needles = _Needles(new for new, old in zip(translated, self._plain.strings) if new != old)
        self._detokenizer = detokenizer
        self._ignore_first = ignore_first
        self._seen = 0
        self.safe_chars = 0
        self.found = False

    def push(self, tokens: Sequence[int]) -> Verdict:
        """See `Stop.push`. `safe` is the smallest number of tokens whose text covers `safe_chars`."""
        detokenizer, marked = self._detokenizer, self._marked
        for token in tokens:
            before = len(detokenizer.text)
            marked_before = len(marked.text) if marked is not None else 0
            detokenizer.push([token])
            self._seen += 1
            if marked is not None:
                if token in marked.mark_of:
                    marked.mark(token, len(detokenizer.text) + len(detokenizer.held))
                marked.grow(detokenizer.text)
            if self._seen <= self._ignore_first:
                self._plain.first = len(detokenizer.text)
                self._needles.first = len(marked.text) if marked is not None else 0
            elif self._find(before, marked_before) or self._ends_here(token):
                return Verdict(detokenizer.tokens_for(self.safe_chars), self._seen)
        text = detokenizer.text
        self.safe_chars = len(text) - self._plain.partial(text)
        if marked is not None and (size := self._needles.partial(marked.text)):
            self.safe_chars = min(self.safe_chars, marked.visible(len(marked.text) - size))
        return Verdict(detokenizer.tokens_for(self.safe_chars), None)

    def finish(self) -> int | None:
        """Searches the characters that were still held back when the text reached its length limit.

        Returns:
            The number of tokens to keep if a stop was found, else None.
        """
        if self._seen <= self._ignore_first or not self._flush():
            return None
        return self._detokenizer.tokens_for(self.safe_chars)

    def _find(self, before: int, marked_before: int) -> bool:
        """Searches for a stop that ends in the new part of the text."""
        places = [self._plain.find(self._detokenizer.text, before)]
        if self._marked is not None:
            place = self._needles.find(self._marked.text, marked_before)
            places.append(None if place is None else self._marked.visible(place))
        if found := [place for place in places if place is not None]:
            self.found, self.safe_chars = True, min(found)
        return self.found

    def _ends_here(self, token: int) -> bool:
        """Whether a stop ends with this special token while text before it is still held back."""
        marked = self._marked
        if marked is None or token not in marked.mark_of or not (held := self._detokenizer.held):
            return False
        if self._needles.find(marked.text + held + marked.mark_of[token], len(marked.text) + len(held)) is None:
            return False
        return self._flush()

    def _flush(self) -> bool:
        """Ends the text and searches the part that was held back."""
        before = len(self._detokenizer.text)
        marked_before = len(self._marked.text) if self._marked is not None else 0
        self._detokenizer.flush()
        if self._marked is not None:
            self._marked.grow(self._detokenizer.text)
        return self._find(before, marked_before)


class FirstOf:
    """Combines several matchers: the stop that is complete first ends the text."""

    def __init__(self, *stops: Stop) -> None:
        self._stops = stops
        self._seen = 0
        self._safe = 0

    def push(self, tokens: Sequence[int]) -> Verdict:
        """See `Stop.push`. If two stops are complete with the same token, the one that began first counts."""
        for token in tokens:
            self._seen += 1
            verdicts = [stop.push([token]) for stop in self._stops]
            self._safe = min((v.safe for v in verdicts), default=self._seen)
            if ends := [v for v in verdicts if v.end is not None]:
                return Verdict(min(v.safe for v in ends), self._seen)
        return Verdict(self._safe, None)
