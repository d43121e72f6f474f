"""The choices of settings, by name. This module imports nothing slow, so that the command can list them at once."""

from __future__ import annotations

from typing import Literal

SamplerName = Literal["rejection", "coupled"]
DrafterName = Literal["auto", "draft_model", "prompt_lookup", "lookup_then_model", "suffix", "early_exit", "none"]
BenchDrafterName = Literal["all", "draft_model", "prompt_lookup", "lookup_then_model", "suffix", "early_exit"]
PlacementName = Literal["auto", "single", "tensor_parallel", "sequential", "replicate"]
DraftPlacementName = Literal["replicated", "tensor_parallel"]
Precision = Literal["bf16-true", "16-true", "32-true"]
Quantize = Literal["bnb.nf4", "bnb.nf4-dq", "bnb.fp4", "bnb.fp4-dq", "bnb.int8"]
LogprobsMode = Literal["raw", "processed"]
FinishReason = Literal["stop", "length"]
