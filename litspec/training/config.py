"""The arguments of `distill`: names, types, defaults, help and ranges, written once (see `litspec.config`)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from litspec.arguments import checked, hints_of
from litspec.errors import InputError
from litspec.training.types import DraftKind, LossName, MixedPrecision

# The arguments of load and generate (`litspec.config`) that `distill` does not have, and its own defaults of others.
NOT_OFFERED = (
    "drafter",
    "exit_layer",
    "verify_width",
    "num_nodes",
    "placement",
    "draft_precision",
    "draft_device",
    "draft_placement",
    "quantize",
    "compile",
    "min_new_tokens",
    "sampler",
    "speculative_k",
    "stop",
)
DEFAULTS = {"max_new_tokens": 128, "temperature": 0.8, "top_k": 50, "seed": 1234}


def _about(help: str, *, resumes: bool = False) -> dict[str, Any]:
    """`resumes`: whether a run can be resumed with another value of this setting."""
    return {"help": help, "resumes": resumes}


@dataclass(frozen=True, kw_only=True)
class DistillConfig:
    """Settings of training. The fields' metadata document them.

    Raises:
        InputError: A value of another type or out of its range.
    """

    kind: DraftKind = field(
        default="draft_model",
        metadata=_about(
            "What to train: draft_model, a LitGPT checkpoint, or dflash, a block drafter that reads the target's "
            "hidden states (arXiv 2602.06036), in its published format."
        ),
    )
    from_layers: int | None = field(
        default=None, metadata=_about("Start from this many of the target's own first layers, instead of draft_dir.")
    )
    draft_config: str | None = field(
        default=None,
        metadata=_about("Start from a new model of this model_config.yaml, instead of draft_dir."),
    )
    draft_layers: int = field(default=2, metadata=_about("Layers of a block drafter."))
    block_size: int = field(
        default=8, metadata=_about("Rows of a block drafter's block. It proposes block_size - 1 tokens per round.")
    )
    lora_r: int = field(
        default=0,
        metadata=_about("Rank of LoRA, for draft models: the weights are merged at the end; 0 trains all weights."),
    )
    loss: LossName = field(
        default="lk",
        metadata=_about(
            "kl is the Kullback-Leibler divergence of the draft from the target. lk moves from the divergence to the "
            "acceptance rate as the draft gets closer to the target (arXiv 2602.23881)."
        ),
    )
    texts: int = field(default=4096, metadata=_about("The most texts that the target writes, one for each prompt."))
    prompt_tokens: int | None = field(
        default=None,
        metadata=_about(
            "Split plain text into prompts of this many tokens. By default a .txt file holds one prompt per line, and "
            "any other text file is split into prompts of 32 tokens."
        ),
    )
    held_out: float = field(
        default=0.05, metadata=_about("Share of the prompts that is used for evaluation and never for training.")
    )
    measured_texts: int = field(
        default=64, metadata=_about("The most held-out texts that are measured, at each evaluation and at the end.")
    )
    measured_k: int | None = field(
        default=None,
        metadata=_about(
            "Proposals per round for which tokens per round are computed. By default 4 for draft models, and "
            "block_size - 1 for block drafters."
        ),
    )
    minutes: float = field(
        default=60.0,
        metadata=_about(
            "Minutes to train. The time in which the target writes its texts is not included.", resumes=True
        ),
    )
    steps: int | None = field(
        default=None,
        metadata=_about("Train this many steps, without a limit of time. The result then does not depend on time."),
    )
    batch_size: int = field(default=16, metadata=_about("Texts per step, on each device."))
    anchors: int = field(default=32, metadata=_about("Blocks per text and step, for block drafters."))
    learning_rate: float | None = field(
        default=None,
        metadata=_about(
            "The highest learning rate, reached after a warm-up. By default it depends on the draft's width."
        ),
    )
    evaluations: int = field(default=20, metadata=_about("How often the held-out texts are measured."))
    patience: int = field(
        default=8, metadata=_about("Stop after this many evaluations without a gain. The best state is kept.")
    )
    save_seconds: float = field(
        default=60.0,
        metadata=_about("Seconds between two saves of the state, from which an interrupted run resumes.", resumes=True),
    )
    training_precision: MixedPrecision | None = field(
        default=None,
        metadata=_about("bf16-mixed or 32-true; by default bf16-mixed on a GPU that supports it, 32-true elsewhere."),
    )

    def __post_init__(self) -> None:
        for name, hint in hints_of(DistillConfig).items():
            object.__setattr__(self, name, checked(name, getattr(self, name), hint))
        for name, least in (
            ("from_layers", 1),
            ("draft_layers", 1),
            ("block_size", 2),
            ("lora_r", 0),
            ("texts", 2),
            ("prompt_tokens", 1),
            ("measured_texts", 1),
            ("measured_k", 1),
            ("steps", 1),
            ("batch_size", 1),
            ("anchors", 1),
            ("evaluations", 1),
            ("patience", 1),
            ("save_seconds", 0),
        ):
            value = getattr(self, name)
            if value is not None and not value >= least:
                raise InputError(f"{name} must be at least {least}, got {value}")
        if not 0 < self.held_out < 1:
            raise InputError(f"held_out must be between 0 and 1, got {self.held_out}")
        for name in ("minutes", "learning_rate"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise InputError(f"{name} must be a number above 0, got {value}")
        begins = [name for name in ("from_layers", "draft_config") if getattr(self, name) is not None]
        if len(begins) == 2:
            raise InputError("from_layers and draft_config cannot be combined; give one of them.")
        if self.kind == "dflash":
            for name in (*begins, "lora_r"):
                if getattr(self, name):
                    raise InputError(f"{name} is for draft models, but kind is dflash; leave it out.")
