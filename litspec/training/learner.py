"""What the loop trains: a module that gives the loss of a batch, and how it is measured and saved."""

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
        width: Its channels, by which the learning rate goes.
    """

    taps: tuple[int, ...] = ()
    k: int
    width: int

    @abstractmethod
    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        """The mean loss of a batch of `StatesOf.batch`, a scalar."""

    @abstractmethod
    def ratios(self, batch: dict[str, Tensor], sampling: Sampling) -> list[Tensor]:
        """For each text of a batch what `expected_rounds` wants."""

    @abstractmethod
    def save(self, folder: Path) -> None:
        """Writes the folder that `--draft_dir` takes; at every moment it holds this or what it held before."""

    @property
    @abstractmethod
    def folder_bytes(self) -> int:
        """About how much `save` writes."""

    def random(self, batch: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
        """Adds what a step draws at random, from its own seed alone."""
        return batch
