"""The choices that settings offer, by name; in a module that imports nothing, so that the command can list them at once."""

from __future__ import annotations

from typing import Literal

SamplerName = Literal["rejection", "coupled"]
DrafterName = Literal["auto", "draft_model", "prompt_lookup", "early_exit", "none"]
PlacementName = Literal["auto", "single", "tensor_parallel", "sequential", "replicate"]
Precision = Literal["bf16-true", "16-true", "32-true"]
FinishReason = Literal["stop", "length"]
