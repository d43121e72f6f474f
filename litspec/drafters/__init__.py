"""Drafters: a draft model, lookup in this text or earlier ones, the target's own layers, or a custom object."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from litspec.config import check_drafter_choice
from litspec.drafters.base import Cost, Drafter, DraftSession, Proposal
from litspec.drafters.composite import LookupThenModel
from litspec.drafters.draft_model import DraftModel
from litspec.drafters.early_exit import EarlyExit
from litspec.drafters.prompt_lookup import PromptLookup
from litspec.drafters.speculative_k import AdaptiveK, FixedK, SpeculativeK
from litspec.drafters.suffix import Suffix
from litspec.errors import InputError
from litspec.types import DrafterName

if TYPE_CHECKING:
    from litspec.checkpoint import PairReport
    from litspec.engine.target import Placed


__all__ = [
    "AdaptiveK",
    "Cost",
    "DraftModel",
    "DraftSession",
    "Drafter",
    "DrafterName",
    "EarlyExit",
    "FixedK",
    "LookupThenModel",
    "PromptLookup",
    "Proposal",
    "SpeculativeK",
    "Suffix",
    "make_drafter",
]

# Shortest repeated n-gram for which prompt lookup is used instead of the draft model.
SURE_NGRAM = 3


def make_drafter(
    drafter: DrafterName | Drafter,
    placed: Placed,
    *,
    pair: PairReport | None = None,
    published: Drafter | None = None,
    exit_layer: int | None = None,
    max_ngram: int = 3,
    min_ngram: int = 1,
) -> Drafter | None:
    """Makes the drafter that a user asked for.

    Args:
        drafter: Its name, or a `Drafter`, which is returned unchanged. "auto" is the draft model or the drafter
            published for the target if one was loaded, else prompt lookup.
        placed: The target, and the draft model if one was loaded.
        pair: Comparison of the two vocabularies; None if they are equal.
        published: The drafter in draft_dir if that is not a draft model, see `drafters.folders`.
        exit_layer: Layers that draft, for "early_exit"; None for a quarter of them.
        max_ngram: Longest n-gram that "prompt_lookup" looks for, in tokens.
        min_ngram: Shortest n-gram that "prompt_lookup" looks for, in tokens.

    Returns:
        None for "none".

    Raises:
        InputError: The name is unknown, the object is not a `Drafter`, no draft model was loaded, or a setting is out
            of range.
    """
    check_drafter_choice(drafter)
    if not isinstance(drafter, str):
        return drafter
    if published is not None and drafter in ("auto", "draft_model"):
        return published
    max_k = placed.verify_width - 1

    def prompt_lookup() -> Drafter:
        return PromptLookup(max_k, max_ngram=max_ngram, min_ngram=min_ngram)

    def suffix() -> Drafter:
        return Suffix(max_k)

    def early_exit() -> Drafter:
        return EarlyExit(placed.model, max_k=max_k, exit_layer=exit_layer)

    def draft_model() -> Drafter:
        if placed.draft_model is None:
            raise InputError(f"drafter {drafter!r} needs a draft model, but draft_dir is not given; name its folder.")
        return DraftModel(
            placed.draft_model,
            target_config=placed.model.config,
            max_k=max_k,
            vocab_size=pair.shared_vocab_size if pair is not None else None,
            excluded=pair.excluded if pair is not None else (),
        )

    def lookup_then_model() -> Drafter:
        model = draft_model()
        return LookupThenModel(PromptLookup(max_k, max_ngram=SURE_NGRAM + 1, min_ngram=SURE_NGRAM), model)

    def none() -> None:
        return None

    makers: dict[str, Callable[[], Drafter | None]] = {
        "auto": prompt_lookup if placed.draft_model is None else draft_model,
        "draft_model": draft_model,
        "prompt_lookup": prompt_lookup,
        "lookup_then_model": lookup_then_model,
        "suffix": suffix,
        "early_exit": early_exit,
        "none": none,
    }
    return makers[drafter]()
