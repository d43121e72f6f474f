"""Who proposes: a draft model, this text and earlier ones, the target's own layers, or an object of the caller's."""

from __future__ import annotations

from typing import TYPE_CHECKING, get_args

from litspec.drafters.base import Drafter, DraftSession, Proposal
from litspec.drafters.draft_model import DraftModel
from litspec.drafters.early_exit import EarlyExit
from litspec.drafters.prompt_lookup import PromptLookup
from litspec.drafters.speculative_k import FixedK, SpeculativeK, make_speculative_k
from litspec.drafters.suffix import Suffix
from litspec.errors import InputError
from litspec.types import DrafterName

if TYPE_CHECKING:
    from litspec.checkpoint import PairReport
    from litspec.rounds import Placed


__all__ = [
    "DraftModel",
    "DraftSession",
    "Drafter",
    "DrafterName",
    "EarlyExit",
    "FixedK",
    "PromptLookup",
    "Proposal",
    "SpeculativeK",
    "Suffix",
    "make_drafter",
    "make_speculative_k",
]


def make_drafter(
    drafter: DrafterName | Drafter,
    placed: Placed,
    *,
    pair: PairReport | None = None,
    exit_layer: int | None = None,
    max_ngram: int = 3,
    min_ngram: int = 1,
) -> Drafter | None:
    """The drafter that a user asked for.

    Args:
        drafter: Its name, or an object of the protocol, which is taken as it is. "auto" is the draft model where one
            was loaded, else prompt lookup.
        placed: The target, and the draft model where one was loaded.
        pair: What the two vocabularies have in common; None where they are the same.
        exit_layer: Layers that draft, for "early_exit"; None for a quarter of them.
        max_ngram: Longest run of tokens that "prompt_lookup" looks for ...
        min_ngram: ... and the shortest.

    Returns:
        None for "none".

    Raises:
        InputError: For an unknown name, an object without the protocol's attributes, a draft model that was not loaded,
            or a setting out of its range.
    """
    draft = getattr(placed, "draft_model", None)
    if not isinstance(drafter, str):
        missing = [name for name in ("taps", "max_k", "step_bytes", "begin") if not hasattr(drafter, name)]
        if missing:
            raise InputError(
                f"drafter must be one of {', '.join(get_args(DrafterName))}, or an object of the protocol in "
                f"litspec.drafters; {type(drafter).__name__} lacks {', '.join(missing)}"
            )
        return drafter
    if drafter == "auto":
        drafter = "draft_model" if draft is not None else "prompt_lookup"
    if drafter == "none":
        return None
    max_k = placed.verify_width - 1
    if drafter == "prompt_lookup":
        return PromptLookup(max_k, max_ngram=max_ngram, min_ngram=min_ngram)
    if drafter == "suffix":
        return Suffix(max_k)
    if drafter == "early_exit":
        return EarlyExit(placed.model, max_k=max_k, exit_layer=exit_layer)
    if drafter == "draft_model":
        if draft is None:
            raise InputError("drafter 'draft_model' needs a draft model, but draft_dir is not given; name its folder.")
        return DraftModel(
            draft,
            target_config=placed.model.config,
            max_k=max_k,
            vocab_size=pair.shared_vocab_size if pair is not None else None,
            excluded=pair.excluded if pair is not None else (),
            graphs=getattr(placed, "graphs", None),
        )
    raise InputError(f"drafter must be one of {', '.join(get_args(DrafterName))}, got {drafter!r}")
