"""Where a text ends: stop tokens, stop sequences, stop strings.

Every matcher sees each committed token of the completion once, in order, and never the prompt: a stop that began inside
the prompt is none, one that spans two rounds is one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from litspec.errors import InputError


class Verdict(NamedTuple):
    """Counts from the first token of the completion.

    Attributes:
        safe: Tokens that are certain to stay: all but those that may yet belong to a stop.
        end: None, or the tokens up to and including the stop, which has then been found and takes back all behind
            `safe`.
    """

    safe: int
    end: int | None


class Stop(Protocol):
    def push(self, tokens: Sequence[int]) -> Verdict:
        """Takes the tokens of one round. Not called again once it has returned an `end`."""
        ...


class TextMatcher(Protocol):
    """The part of `text.Detokenizer` that stop strings need."""

    text: str

    def push(self, tokens: Sequence[int]) -> str: ...

    def flush(self) -> str: ...

    def tokens_for(self, char_count: int) -> int: ...


def stop_sequences(stop_tokens: Iterable[Any]) -> tuple[tuple[int, ...], ...]:
    """Normalises what LitGPT's generate functions take: a flat list of ids, or an iterable of id sequences.

    Raises:
        InputError: For an empty sequence, which would match everywhere.
    """
    sequences = []
    for item in stop_tokens:
        item = item.tolist() if hasattr(item, "tolist") else item
        # A tokenizer without EOS hands on None; it stops nothing.
        ids = [i for i in (item if isinstance(item, Iterable) else [item]) if i is not None]
        if not ids and item not in (None, [None], (None,)):
            raise InputError("stop_tokens holds an empty sequence; each stop must have at least one token id.")
        if ids:
            sequences.append(tuple(int(i) for i in ids))
    return tuple(dict.fromkeys(sequences))


class StopTokens:
    """Finds the first of several token sequences: the automaton of Aho and Corasick (CACM 18(6), 1975).

    Args:
        sequences: Token ids of each stop.
        ignore_first: Tokens at the beginning of the completion in which nothing is a stop.
    """

    def __init__(self, sequences: Iterable[Sequence[int]] = (), ignore_first: int = 0) -> None:
        self._next: list[dict[int, int]] = [{}]  # the trie: state -> token -> state
        self._depth = [0]  # tokens on the way to a state
        self._match = [0]  # length of the longest stop that ends in a state
        self._fail = [0]  # the longest proper suffix that is a state too
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
        """See `Stop.push`. Where several stops end at one token, the longest counts."""
        for token in tokens:
            self._seen += 1
            if self._seen <= self._ignore_first:
                continue
            self._state = self._step(self._state, token)
            if length := self._match[self._state]:
                return Verdict(self._seen - length, self._seen)
        return Verdict(self._seen - self._depth[self._state], None)


class StopStrings:
    """Finds the first of several strings in the text, across the borders of tokens and blocks.

    Attributes:
        safe_chars: Characters of the text that no stop can take back any more; once a stop has been found, where the
            text is cut.

    Args:
        strings: The stop strings.
        detokenizer: A fresh one, of its own: it is fed every token seen.
        ignore_first: Tokens at the beginning of the completion in whose text nothing is a stop.

    Raises:
        InputError: For an empty string, which would match everywhere.
    """

    def __init__(self, strings: Iterable[str], detokenizer: TextMatcher, ignore_first: int = 0) -> None:
        self._strings = tuple(dict.fromkeys(strings))
        if "" in self._strings:
            raise InputError("A stop string is empty; give at least one character.")
        self._longest = max(map(len, self._strings), default=0)
        self._detokenizer = detokenizer
        self._ignore_first = ignore_first
        self._seen = 0
        self._first_char = 0  # nothing before it is a stop
        self.safe_chars = 0
        self.found = False

    def push(self, tokens: Sequence[int]) -> Verdict:
        """See `Stop.push`: `safe` is the shortest run of tokens whose text covers `safe_chars`."""
        detokenizer = self._detokenizer
        for token in tokens:
            before = len(detokenizer.text)
            detokenizer.push([token])
            self._seen += 1
            if self._seen <= self._ignore_first:
                self._first_char = len(detokenizer.text)
            elif self._find(before):
                return Verdict(detokenizer.tokens_for(self.safe_chars), self._seen)
        text = detokenizer.text
        self.safe_chars = len(text) - self._partial(text)
        return Verdict(detokenizer.tokens_for(self.safe_chars), None)

    def finish(self) -> int | None:
        """Looks through the characters that were incomplete when the text reached its length.

        Returns:
            The number of tokens to keep where a stop was found after all, else None.
        """
        before = len(self._detokenizer.text)
        self._detokenizer.flush()
        if self._seen <= self._ignore_first or not self._find(before):
            return None
        return self._detokenizer.tokens_for(self.safe_chars)

    def _find(self, before: int) -> bool:
        """Looks for a stop that ends behind the first `before` characters."""
        text = self._detokenizer.text
        begin = max(self._first_char, before - self._longest + 1)
        found = [at for string in self._strings if (at := text.find(string, begin)) >= 0]
        if found:
            self.found, self.safe_chars = True, min(found)
        return self.found

    def _partial(self, text: str) -> int:
        """Characters at the end of the text with which some stop string begins."""
        for size in range(min(self._longest - 1, len(text) - self._first_char), 0, -1):
            if any(string.startswith(text[len(text) - size :]) for string in self._strings):
                return size
        return 0


class FirstOf:
    """Several matchers as one: the stop that is complete first ends the text."""

    def __init__(self, *stops: Stop) -> None:
        self._stops = stops
        self._seen = 0
        self._safe = 0

    def push(self, tokens: Sequence[int]) -> Verdict:
        """See `Stop.push`. Where two stops are complete with the same token, the one that began first counts."""
        for token in tokens:
            self._seen += 1
            verdicts = [stop.push([token]) for stop in self._stops]
            self._safe = min((v.safe for v in verdicts), default=self._seen)
            if ends := [v for v in verdicts if v.end is not None]:
                return Verdict(min(v.safe for v in ends), self._seen)
        return Verdict(self._safe, None)
