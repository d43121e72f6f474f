"""The choices of the settings of training, by name. Imports nothing slow, see `litspec.types`."""

from __future__ import annotations

from typing import Literal

LossName = Literal["kl", "lk"]
DraftKind = Literal["draft_model", "dflash"]
MixedPrecision = Literal["32-true", "bf16-mixed"]
