"""Suffix decoding (Oliaro et al. 2024, arXiv 2411.04975): what most often followed, in this text and in earlier ones.

No model. Where prompt lookup takes the most recent place that ends in the same few tokens, this counts all places, and
it remembers what was generated before: a job of similar prompts, an agent that calls the same tools, code that is
written again with a change.
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

# A node takes some 140 bytes.
MAX_NODES = 500_000


class Path(NamedTuple):
    """What a tree says will follow.

    Attributes:
        tokens: In order.
        score: The sum of their probabilities, each given the text only: how many of them are expected to be right.
        prob: The probability of the last of them.
        match: How many of the text's last tokens speak for it.
    """

    tokens: list[int]
    score: float
    prob: float
    match: int

    @property
    def rank(self) -> tuple[float, int]:
        """What the best path has most of: of equals the one is taken that more of the text speaks for."""
        return self.score, self.match


NO_PATH = Path([], 0.0, 1.0, 0)


class SuffixTree:
    """Counts every run of up to `depth` tokens of the sequences it was told; every suffix is a way down from the root.

    A node is a run of tokens, a child is the run with one token more. It grows by one token at a time and forgets
    nothing; see `Memory`.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._children: dict[int, int] = {}  # node and token, in one number, to the child
        self._tokens = array("q", [-1])  # of each node: its last token,
        self._counts = array("q", [0])  # how often it occurred,
        self._best = array("q", [0])  # and its most frequent child, the most recent of several; 0 for none
        self._ends = [0]  # the nodes that the current sequence ends with: the empty run, the last token, the last two

    def __len__(self) -> int:
        return len(self._counts)

    def append(self, token: int) -> None:
        """The current sequence goes on."""
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
        """The current sequence has ended; the next token begins another."""
        self._ends = [0]

    def find(self, tokens: Iterable[int]) -> int | None:
        """The node of a run of tokens; None where it never occurred."""
        node = 0
        for token in tokens:
            child = self._children.get(node << 32 | token)
            if child is None:
                return None
            node = child
        return node

    def search(self, tail: Sequence[int], k: int, factor: float, offset: float, min_prob: float) -> Path:
        """The best of the paths that begin behind the last token, behind the last two, and so on.

        A path takes the most frequent child at each node. Its tokens have the product of count(child) / count(node) for
        a probability, where the place that the sequence ends with now does not count: nothing followed there yet. It
        ends where that falls below `min_prob`, or at `m * factor + offset` tokens for a match of m.

        Args:
            tail: The last tokens of the text, `depth` - 1 of them or all.
            k: Most tokens.
        """
        best = NO_PATH
        for m in range(1, min(len(tail), self.depth - 1) + 1):
            node = self.find(tail[len(tail) - m :])
            if node is None or not self._best[node]:
                break
            path = self._walk(node, NO_PATH._replace(match=m), min(k, int(m * factor + offset)), min_prob)
            if path.tokens:
                best = max(best, path, key=lambda path: path.rank)
        # Where the tree's runs end, as they do at the end of the text, the path goes on behind its longest end that
        # something followed somewhere: a text that has begun to repeat itself is drafted beyond what it repeats.
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
        """The node of the longest end of some tokens that something followed; 0 where there is none."""
        for m in range(min(len(tokens), self.depth - 1), 0, -1):
            node = self.find(tokens[len(tokens) - m :])
            if node is not None and self._best[node]:
                return node
        return 0


class Memory:
    """At most two trees: when the younger one is full, the older one is forgotten and a new one begun."""

    def __init__(self, depth: int, max_nodes: int) -> None:
        self._depth = depth
        self._max_nodes = max_nodes
        self.trees = [SuffixTree(depth)]

    def append(self, tokens: Iterable[int]) -> None:
        """The current sequence goes on."""
        tree = self.trees[0]
        for token in tokens:
            if len(tree) + self._depth > self._max_nodes:
                tree = SuffixTree(self._depth)
                self.trees = [tree, self.trees[0]]
            tree.append(token)

    def end(self) -> None:
        """The current sequence has ended."""
        self.trees[0].end()


class Suffix(Drafter):
    """Drafts from counts over this text and over the outputs of earlier ones, see `drafters.Drafter`.

    Outputs are remembered when their text has ended, and as far as they had come where it was given up. Any number of
    texts may be open at once, in as many threads. With the rejection sampler, whose text depends on what is proposed,
    earlier outputs are not looked at, so that a text depends on nothing but its seed, prompt and settings.

    Args:
        max_k: Most proposals per round.
        factor: A match of m tokens may propose `m * factor + offset`.
        offset: See `factor`.
        min_prob: The least probability that a proposed token may have, by the counts.
        max_nodes: Of each of at most two trees for a text, and of two for all earlier outputs; a node takes some 140
            bytes, and a token that repeats nothing makes `depth` of them.

    Raises:
        InputError: For a setting out of its range.
    """

    def __init__(
        self, max_k: int, *, factor: float = 2.0, offset: float = 5.0, min_prob: float = 0.1, max_nodes: int = MAX_NODES
    ) -> None:
        if factor < 0 or offset < 0 or factor + offset < 1:
            raise InputError(
                "suffix decoding needs a factor and an offset of at least 0 that make at least 1 together, got "
                f"{factor} and {offset}"
            )
        if not 0 <= min_prob <= 1:
            raise InputError(f"suffix decoding needs a min_prob in [0, 1], got {min_prob}")
        self.max_k = max_k
        # Room for a match and for what follows it.
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
        """At most k tokens to follow a text that ends in `tail`, from its own trees and, unless `alone`, from all."""
        paths = [tree.search(tail, k, *self._settings) for tree in own.trees]
        if not alone:
            with self._lock:
                paths += [tree.search(tail, k, *self._settings) for tree in self._earlier.trees]
        # The first of equals: this text, and what is more recent.
        return max(paths, key=lambda path: path.rank).tokens

    def remember(self, output: Sequence[int]) -> None:
        """Takes up the output of a text that has ended."""
        with self._lock:
            self._earlier.append(output)
            self._earlier.end()


class SuffixSession(DraftSession):
    """One text, see `drafters.DraftSession`. The tree is told committed tokens only, so there is nothing to undo."""

    def __init__(self, drafter: Suffix, stop_ids: Sequence[int] = (), alone: bool = False) -> None:
        self._drafter = drafter
        self._stop_ids = frozenset(stop_ids)
        self._alone = alone
        self._own = Memory(drafter.depth, drafter.max_nodes)
        self._tail: list[int] = []
        self._output: list[int] | None = None  # None until the prompt was told

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
        """The text has ended; later ones may learn from its output."""
        if self._output:
            self._drafter.remember(self._output)
            self._output = []
