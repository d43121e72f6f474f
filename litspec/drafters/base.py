"""The protocol of a drafter: who proposes the tokens that the target then checks.

A drafter is one object for a loaded target; a session is one text. Whatever a drafter proposes, the text stays the
target's own: a bad drafter costs speed. There is one thing it must not do, which is to report another distribution than
the one it drew from; `litspec.testing.check_drafter` finds that and other broken promises.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol, runtime_checkable

import torch

from litspec.sampling import Distribution, Sampler

if TYPE_CHECKING:
    from litspec.rounds import TargetSession


class Proposal(NamedTuple):
    """What a drafter proposes for one round.

    Attributes:
        tokens: (m,) int64, 0 <= m <= k; on any device.
        q: The processed distributions that each token was drawn from, m rows over the target's padded vocabulary
            (dense, or sparse as ids and probabilities); None where nothing was drawn (an argmax, a table): each token
            then counts as proposed with probability 1.
    """

    tokens: torch.Tensor
    q: Distribution | None = None


@runtime_checkable
class DraftSession(Protocol):
    """Drafting for one text. Two open texts are two sessions, and an abandoned session harms nobody."""

    def extend(self, tokens: Sequence[int], input_pos: int, hidden: torch.Tensor | None = None) -> None:
        """Tells the committed truth: the prompt first, then what each round committed.

        Args:
            tokens: Token ids; `tokens[j]` stands at position `input_pos + j`.
            input_pos: Position of the first of them, the number of tokens told so far.
            hidden: (len(tokens), len(taps) * n_embd), only for a drafter with `taps`: row j is the target's state that
                predicted `tokens[j]`, the one at the position before it (zeros for position 0).
        """
        ...

    def propose(self, token: int, input_pos: int, k: int) -> Proposal:
        """Proposes at most k tokens to follow `token`, the last one committed, which stands at `input_pos`.

        What was proposed and not told by `extend` afterwards did not happen; undoing it is the session's own affair.
        May be called again for the same position.
        """
        ...


@runtime_checkable
class Drafter(Protocol):
    """Makes sessions.

    Attributes:
        taps: Blocks of the target (0-based) whose residual stream a session wants to see in `extend`; -1 is the state
            after the final norm. Empty for most.
        max_k: Most tokens it can propose in one round.
        step_bytes: Bytes of weights read per proposed token, for choosing k; 0 where drafting costs next to nothing.
    """

    taps: tuple[int, ...]
    max_k: int
    step_bytes: int

    def begin(self, target: TargetSession, max_length: int, sampler: Sampler) -> DraftSession:
        """Opens a session for a text of at most `max_length` tokens.

        Args:
            target: The text's target session; lends its model, configuration, K/V cache, device and stop ids.
            max_length: Prompt and completion together.
            sampler: How the text is sampled; its `draw` gives a token and the distribution to report.
        """
        ...
