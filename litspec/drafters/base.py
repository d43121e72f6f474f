"""The drafter protocol. A drafter proposes tokens, which the target verifies.

There is one drafter per loaded target and one session per text. A bad proposal costs speed; the text stays the same.
A drafter must report the distribution that it drew from, or the text no longer has the target's distribution.
`litspec.testing.check_drafter` checks this and the rest of the protocol.

A drafter of your own is a subclass of `Drafter` with `start`, and a subclass of `DraftSession` with `propose`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch

from litspec.sampling import Distribution, Sampler

if TYPE_CHECKING:
    from litspec.engine.target import TargetSession


class Proposal(NamedTuple):
    """What a drafter proposes for one round.

    Attributes:
        tokens: (m,) integers, 0 <= m <= k; on any device. Entries of -1 at the end are padding.
        q: The processed distributions that each token was drawn from, m rows over the target's padded vocabulary
            (dense, or sparse as ids and probabilities). None for deterministic proposals (an argmax, a table): each
            token then has probability 1.
    """

    tokens: torch.Tensor
    q: Distribution | None = None


class Cost(NamedTuple):
    """The cost of a proposal, used to choose k.

    Attributes:
        weight_bytes: Bytes of weights that are read.
        layers: Layers that are run in sequence.
    """

    weight_bytes: int
    layers: int


class DraftSession(ABC):
    """Drafts for one text. Each open text has its own session."""

    @abstractmethod
    def propose(self, token: int, input_pos: int, k: int) -> Proposal:
        """Proposes at most k tokens to follow `token`, the last committed token, at position `input_pos`.

        Proposed tokens are not part of the text until `commit` gives them. May be called again for the same position.
        """

    def commit(self, tokens: Sequence[int], input_pos: int, hidden: torch.Tensor | None = None) -> None:
        """Receives committed tokens: the prompt first, then the tokens of each round.

        Args:
            tokens: Token ids; `tokens[j]` is at position `input_pos + j`.
            input_pos: Position of the first token; equals the number of tokens committed so far.
            hidden: (len(tokens), len(taps) * n_embd), only for a drafter with `taps`: row j is the target's state that
                predicted `tokens[j]`, one position before it (zeros for position 0).
        """

    def resume(self, prompt: Sequence[int], most: int) -> int:
        """Reuses the drafter's state of an earlier text with the same prefix. Called before anything is committed.

        Called only for a drafter with `taps`. It needs states, and the target must read a token again to give its
        state. Every other drafter receives the whole prompt.

        Args:
            prompt: The whole prompt.
            most: Tokens of its prefix that the target need not read again; whole chunks of the prefill.

        Returns:
            How many tokens count as committed: whole chunks, at most `most`. The rest of the prompt is committed later.
            By default 0: the target reads the whole prompt.
        """
        return 0

    def prepare(self, sizes: Sequence[int]) -> None:
        """Compiles the steps that proposals will need. Called before the prompt is read, if steps are compiled.

        Args:
            sizes: Proposal lengths. Every later k is a sum of them, or slightly less than one.
        """

    def close(self) -> None:
        """Called when the text has ended or was cancelled."""


class Drafter(ABC):
    """Proposes tokens for a loaded target. Makes one session per text.

    Attributes:
        taps: Blocks of the target (0-based) whose residual stream is passed to `commit`; -1 is the state
            after the final norm. Empty for most drafters.
        max_k: Most tokens it can propose in one round.
        name: Shown to users.
        notes: Sentences shown to users when it is loaded.
    """

    taps: tuple[int, ...] = ()
    max_k: int = 7
    notes: Sequence[str] = ()

    @property
    def name(self) -> str:
        return type(self).__name__

    @abstractmethod
    def start(self, target: TargetSession, max_length: int, sampler: Sampler) -> DraftSession:
        """Opens a session for a text of at most `max_length` tokens.

        Args:
            target: The text's target session, with its model, configuration, K/V cache, device and stop ids.
            max_length: Most tokens of prompt and completion together.
            sampler: The text's sampler; its `draw` gives a token and the distribution to report. To apply penalties and
                bans, pass the tokens drawn before in the same proposal to `Inputs.row`.
        """

    def reserve(self, target: TargetSession) -> None:
        """Allocates memory for the texts of an engine, before the first text.

        Args:
            target: Any target session of the engine.
        """

    def propose_batch(
        self, sessions: Sequence[DraftSession], tokens: Sequence[int], input_pos: Sequence[int], k: Sequence[int]
    ) -> Sequence[Proposal]:
        """The proposals for several texts. The arguments are those of `DraftSession.propose`, one entry per text.

        By default each session proposes separately. A drafter that can run its model for all texts at once overrides
        this. It must propose the same as `propose` for each text.
        """
        return [session.propose(*asked) for session, *asked in zip(sessions, tokens, input_pos, k, strict=True)]

    def cost(self, k: int) -> Cost:
        """The cost of a proposal of k tokens; 0 by default."""
        return Cost(0, 0)

    def memory(self, max_length: int) -> int:
        """Bytes that a session keeps for a text of up to `max_length` tokens; 0 by default."""
        return 0
