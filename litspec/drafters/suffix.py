"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): proposes the most frequent continuation of the last tokens.

It needs no second model. Prompt lookup uses the most recent occurrence of the last tokens; this counts all occurrences,
also in earlier outputs. It works well for many similar prompts, agents that repeat tool calls, and repeated edits of
the same code.
"""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from litspec.drafters.base import Drafter, DraftSession, Proposal
from litspec.errors import InputError
from litspec.sampling import Rejection, Sampler

if TYPE_CHECKING:
    from litspec.engine.target import TargetSession

# A node takes about 140 bytes.
MAX_NODES = 500_000


class Path(NamedTuple):
    """A continuation found in a tree.

    Attributes:
        tokens: Its tokens, in order.
        score: Sum of the tokens' probabilities, each given the text only: the expected number of right tokens.
        prob: The probability of the last token.
        match: Length of the match: how many of the text's last tokens precede the path in the tree.
    """

    tokens: list[int]
    score: float
    prob: float
    match: int

    @property
    def rank(self) -> tuple[float, int]:
        """Sort key of paths: the score, then the length of the match."""
        return self.score, self.match


NO_PATH = Path([], 0.0, 1.0, 0)


class SuffixTree:
    """Counts every n-gram of up to `depth` tokens in its sequences.

    A node is an n-gram; its children are the n-grams with one more token at the end. The tree grows by one token at a
    time and never shrinks; see `Memory`.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._children: dict[int, int] = {}  # (node << 32 | token) -> child
        # For each node:
        self._tokens = array("q", [-1])  # its last token
        self._counts = array("q", [0])  # how often it occurred
        self._best = array("q", [0])  # its most frequent child, the most recent in a tie; 0 for none
        self._ends = [0]  # nodes of the current sequence's suffixes: the empty one, the last token, the last two, ...

    def __len__(self) -> int:
        return len(self._counts)

    def append(self, token: int) -> None:
        """Appends a token to the current sequence."""
        children, counts, best = self._children, self._counts, self._best
        ends = [0]
        counts[0] += 1
        for node in self._ends:
            key = node << 32 | token
            child = children.get(key)
            if child is None:
                child = children[key] = len(counts)
                self._tokens.append(token)
                counts.append(1)
                best.append(0)
            else:
                counts[child] += 1
            if not best[node] or counts[child] >= counts[best[node]]:
                best[node] = child
            ends.append(child)
        del ends[self.depth :]
        self._ends = ends

    def end(self) -> None:
        """Ends the current sequence; the next token begins a new one."""
        self._ends = [0]

    def find(self, tokens: Iterable[int]) -> int | None:
        """The node of an n-gram; None if it never occurred."""
        node = 0
        for token in tokens:
            child = self._children.get(node << 32 | token)
            if child is None:
                return None
            node = child
        return node

    def search(self, tail: Sequence[int], k: int, factor: float, offset: float, min_prob: float) -> Path:
        """The best of the paths that begin after the last token, after the last two, and so on.

        A path takes the most frequent child at each node. The probability of a token is the product of count(child) /
        count(node) along the path; the occurrence at the end of the sequence is not counted, since it has no next token
        yet. The path ends when the probability falls below `min_prob`, or at `m * factor + offset` tokens for a match
        of m.

        Args:
            tail: The last `depth` - 1 tokens of the text, or the whole text if it is shorter.
            k: Most tokens of the path.
        """
        best = NO_PATH
        for m in range(1, min(len(tail), self.depth - 1) + 1):
            node = self.find(tail[len(tail) - m :])
            if node is None or not self._best[node]:
                break
            path = self._walk(node, NO_PATH._replace(match=m), min(k, int(m * factor + offset)), min_prob)
            if path.tokens:
                best = max(best, path, key=lambda path: path.rank)
        # At the end of the text, or at full depth, the path continues after its longest suffix that has children. So a
        # repetition can be drafted for longer than its first occurrence.
        limit = min(k, int(best.match * factor + offset))
        while 0 < len(best.tokens) < limit and (node := self._last_open([*tail, *best.tokens])):
            longer = self._walk(node, best, limit, min_prob)
            if longer is best:
                break
            best = longer
        return best

    def _walk(self, node: int, path: Path, limit: int, min_prob: float) -> Path:
        tokens, score, prob, match = path
        found: list[int] = []
        while len(tokens) + len(found) < limit and (child := self._best[node]):
            next_prob = prob * self._counts[child] / (self._counts[node] - (node in self._ends))
            if next_prob < min_prob:
                break
            prob = next_prob
            score += prob
            found.append(self._tokens[child])
            node = child
        return Path([*tokens, *found], score, prob, match) if found else path

    def _last_open(self, tokens: Sequence[int]) -> int:
        """The node of the longest suffix of some tokens that has children; 0 if there is none."""
        for m in range(min(len(tokens), self.depth - 1), 0, -1):
            node = self.find(tokens[len(tokens) - m :])
            if node is not None and self._best[node]:
                return node
        return 0


class Memory:
    """At most two trees: when the newer one is full, the older one is dropped and a new one is begun."""

    def __init__(self, depth: int, max_nodes: int) -> None:
        self._depth = depth
        self._max_nodes = max_nodes
        self.trees = [SuffixTree(depth)]

    def append(self, tokens: Iterable[int]) -> None:
        """Appends tokens to the current sequence."""
        tree = self.trees[0]
        for token in tokens:
            if len(tree) + self._depth > self._max_nodes:
                tree = SuffixTree(self._depth)
                self.trees = [tree, self.trees[0]]
            tree.append(token)

    def end(self) -> None:
        """Ends the current sequence."""
        self.trees[0].end()


class Suffix(Drafter):
    """Drafts from counts of n-grams in this text and in the outputs of earlier texts, see `drafters.Drafter`.

    Outputs are stored when their text has ended or was cancelled. Several texts may be open at the same time, also in
    different threads. With the rejection sampler a text depends on the proposals, so earlier outputs are not used: a
    text depends only on its seed, prompt and settings.

    Args:
        max_k: Most proposals per round.
        factor: A match of m tokens may propose `m * factor + offset` tokens.
        offset: See `factor`.
        min_prob: Lowest probability of a proposed token, from the counts.
        max_nodes: Most nodes per tree. There are up to two trees per text and two for all earlier outputs. A node takes
            about 140 bytes; a token after which nothing repeats adds `depth` nodes.

    Raises:
        InputError: A setting is out of range.
    """

    def __init__(
        self, max_k: int, *, factor: float = 2.0, offset: float = 5.0, min_prob: float = 0.1, max_nodes: int = MAX_NODES
    ) -> None:
        if factor < 0 or offset < 0 or factor + offset < 1:
            raise InputError(
                "suffix decoding needs a factor and an offset of at least 0 with a sum of at least 1, got "
                f"{factor} and {offset}"
            )
        if not 0 <= min_prob <= 1:
            raise InputError(f"suffix decoding needs a min_prob in [0, 1], got {min_prob}")
        self.max_k = max_k
        # Long enough for a match and its continuation.
        self.depth = max(16, 2 * max_k + 2)
        if max_nodes < 2 * self.depth:
            raise InputError(f"suffix decoding needs max_nodes of at least {2 * self.depth}, got {max_nodes}")
        self.max_nodes = max_nodes
        self._settings = factor, offset, min_prob
        self._earlier = Memory(self.depth, max_nodes)
        self._lock = threading.Lock()

    @property
    def name(self) -> str:
        return "suffix"

    def start(self, target: TargetSession, max_length: int, sampler: Sampler) -> SuffixSession:
        return SuffixSession(self, target.stop_ids, alone=isinstance(sampler, Rejection))

    def search(self, own: Memory, tail: Sequence[int], k: int, alone: bool) -> list[int]:
        """At most k tokens after `tail`, from the text's own trees and, unless `alone`, from earlier outputs."""
        paths = [tree.search(tail, k, *self._settings) for tree in own.trees]
        if not alone:
            with self._lock:
                paths += [tree.search(tail, k, *self._settings) for tree in self._earlier.trees]
        # In a tie the first one: this text before others, newer trees before older.
        return max(paths, key=lambda path: path.rank).tokens

    def remember(self, output: Sequence[int]) -> None:
        """Adds the output of a text that has ended."""
        with self._lock:
            self._earlier.append(output)
            self._earlier.end()


class SuffixSession(DraftSession):
    """One text, see `drafters.DraftSession`. The tree receives only committed tokens, so there is nothing to undo."""

    def __init__(self, drafter: Suffix, stop_ids: Sequence[int] = (), alone: bool = False) -> None:
        self._drafter = drafter
        self._stop_ids = frozenset(stop_ids)
        self._alone = alone
        self._own = Memory(drafter.depth, drafter.max_nodes)
        self._tail: list[int] = []
        self._output: list[int] | None = None  # None until the prompt is committed

    def commit(self, tokens: Sequence[int], input_pos: int, hidden: torch.Tensor | None = None) -> None:
        self._own.append(tokens)
        self._tail = [*self._tail, *tokens][1 - self._drafter.depth :]
        if self._output is None:
            self._output = []
        else:
            self._output += tokens

    def propose(self, token: int, input_pos: int, k: int) -> Proposal:
        k = min(k, self._drafter.max_k)
        tokens = self._drafter.search(self._own, self._tail, k, self._alone) if k > 0 else []
        first = next((j for j, proposed in enumerate(tokens) if proposed in self._stop_ids), len(tokens))
        return Proposal(torch.tensor(tokens[: first + 1], dtype=torch.int64))

    def close(self) -> None:
        """Adds the output to the earlier outputs, for later texts."""
        if self._output:
            self._drafter.remember(self._output)
            self._output = []
