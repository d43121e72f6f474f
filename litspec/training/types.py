"""The choices that the settings of training offer; in a module that imports nothing, see `litspec.types`."""

from __future__ import annotations

from typing import Literal

LossName = Literal["kl", "lk"]
DraftKind = Literal["draft_model", "dflash"]
MixedPrecision = Literal["32-true", "bf16-mixed"]
