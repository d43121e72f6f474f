"""The interface between the training loop and a draft: loss of a batch, measurement, saving."""

from __future__ import annotations

from abc import abstractmethod
from pathlib import Path

from torch import Tensor, nn

from litspec.sampling import Sampling


class Learner(nn.Module):
    """A draft in training.

    Attributes:
        taps: Blocks of the target whose states it reads, see `FrozenTarget`.
        k: The most tokens that it is asked to propose at once.
        width: Number of its channels. The default learning rate depends on it.
    """

    taps: tuple[int, ...] = ()
    k: int
    width: int

    @abstractmethod
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean loss of a batch of `StatesOf.batch`, a scalar."""

    @abstractmethod
    def ratios(self, batch: dict[str, Tensor], sampling: Sampling) -> list[Tensor]:
        """The argument `ratios_of_texts` of `expected_rounds` for a batch."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the folder for `--draft_dir`. Each file is replaced atomically."""

    @property
    @abstractmethod
    def folder_bytes(self) -> int:
        """About how much `save` writes."""

    def random(self, batch: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
        """Adds the random choices of a step, which depend on its seed alone."""
        return batch
