"""Log-probabilities of the returned tokens, and of the most likely tokens at their positions.

They are computed where the tokens are chosen, and are copied to the host with them, in the one read per round.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from litspec.types import LogprobsMode


@dataclass(frozen=True)
class TokenLogprobs:
    """One token of a text, with the most likely tokens at its position.

    Attributes:
        token_id: The token.
        logprob: Its natural log-probability.
        top: The most likely tokens with their log-probabilities, in falling order; tokens of probability 0 are left
            out.
    """

    token_id: int
    logprob: float
    top: list[tuple[int, float]]

    def as_dict(self) -> dict[str, Any]:
        """A dict for JSON."""
        top = [{"token_id": id_, "logprob": logprob} for id_, logprob in self.top]
        return {"token_id": self.token_id, "logprob": self.logprob, "top_logprobs": top}


class Measured(NamedTuple):
    """Log-probabilities on the device.

    Attributes:
        own: (..., R) float32, log-probabilities of the tokens.
        top: (..., R, n) float32, log-probabilities of the n most likely tokens.
        ids: (..., R, n) int64, ids of the n most likely tokens.
    """

    own: torch.Tensor
    top: torch.Tensor
    ids: torch.Tensor


def measure(logprobs: torch.Tensor, ids: torch.Tensor | None, tokens: torch.Tensor, n: int) -> Measured:
    """Looks up the log-probabilities of tokens and of the n most likely tokens.

    Args:
        logprobs: (..., R, K) float32.
        ids: (..., R, K) int64, the token of each column; None if column j is token j.
        tokens: (..., R) int64.
        n: Number of most likely tokens. If K is smaller, the rest have -inf.
    """
    if ids is None:
        own = logprobs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    else:
        own = torch.where(ids == tokens.unsqueeze(-1), logprobs, float("-inf")).amax(-1)
    count = min(n, logprobs.size(-1))
    top, columns = logprobs.topk(count)
    found = columns if ids is None else ids.gather(-1, columns)
    return Measured(own, F.pad(top, (0, n - count), value=float("-inf")), F.pad(found, (0, n - count)))


@dataclass(frozen=True)
class Logprobs:
    """Which log-probabilities are requested.

    Attributes:
        n: Number of most likely tokens.
        mode: "raw" for the model's distribution, "processed" for the distribution that tokens are drawn from.
    """

    n: int
    mode: LogprobsMode = "raw"

    def size(self, width: int) -> int:
        """Count of numbers that `pack` returns for one text."""
        return width * (1 + 2 * self.n)

    def pack(self, measured: Measured, width: int) -> torch.Tensor:
        """Packs into the int64 numbers of an outcome: (..., size); rows are padded to `width`."""
        floats = torch.cat((measured.own.unsqueeze(-1), measured.top), -1).float().contiguous()
        rows = torch.cat((floats.view(torch.int32).long(), measured.ids), -1)
        return F.pad(rows, (0, 0, 0, width - rows.size(-2))).flatten(-2)

    def unpack(self, numbers: Sequence[int], tokens: Sequence[int]) -> list[TokenLogprobs]:
        """Inverse of `pack`, for the rows of these tokens."""
        each = 1 + 2 * self.n
        found = []
        for i, token in enumerate(tokens):
            row = numbers[i * each : (i + 1) * each]
            own, *top = struct.unpack(f"{1 + self.n}f", struct.pack(f"{1 + self.n}i", *row[: 1 + self.n]))
            likely = [(id_, value) for id_, value in zip(row[1 + self.n :], top) if value > float("-inf")]
            found.append(TokenLogprobs(token, own, likely))
        return found
