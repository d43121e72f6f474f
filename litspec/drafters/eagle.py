"""EAGLE-3 (Li et al. 2025, arXiv 2503.01840): one decoder layer that reads states of three target blocks.

With g_p the projected states at position p, e_q the target's embedding of the token at q, and t_n the last token:

    y_p     = layer(e_(p+1), g_p)             for p < n, from the target's own states
    d_1     = argmax head(norm(y_(n-1)))
    y_n     = layer(e(d_1), y_(n-1)), ...     then from its own output, which is normed only with `norm_output`
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from litgpt.config import Config
from torch import Tensor, nn

from litspec.drafters.base import Cost, Proposal
from litspec.drafters.folders import open_published
from litspec.drafters.hf_layers import layer_config, litgpt_layer, nested, number, take
from litspec.drafters.tapped import (
    CHUNK,
    MAX_K,
    OVERHANG,
    Layers,
    Places,
    TappedDrafter,
    TappedSession,
    cache_bytes,
    draw_chain,
    embedding_of,
    head_bytes,
    head_logits,
    in_multiples,
    inputs_of,
    leading,
    linear,
    load_layers,
    norm,
    padded,
    padded_tokens,
    places_of,
)
from litspec.errors import InputError
from litspec.model import GPT, KVCache
from litspec.model.bound import bound
from litspec.model.gpt import Block
from litspec.model.kv_cache import Step
from litspec.model.norm import build_norm
from litspec.sampling import Sampler

if TYPE_CHECKING:
    from litspec.engine.target import TargetSession

Function = Callable[[Tensor], Tensor]


class EagleBlock(Block):
    """The layer: its attention reads the concatenated embedding and state."""

    def __init__(self, config: Config, *, norm_before_residual: bool = False) -> None:
        super().__init__(config, 0)
        out = self.attn.qkv.out_features
        self.attn.qkv = nn.Linear(2 * config.n_embd, out, bias=self.attn.qkv.bias is not None)
        self.norm_hidden = build_norm(config, config.n_embd)
        self.norm_before_residual = norm_before_residual
        self.bind()

    def bind(self) -> None:
        super().bind()
        if hasattr(self, "norm_hidden"):  # missing while the base class is constructed
            assert self.norm_2 is not None, "EAGLE's layer is Llama's"
            self._embedding_norm, self._state_norm = bound(self.norm_1), bound(self.norm_hidden)
            self._attention = bound(self.attn)
            self._mlp_norm, self._feed_forward = bound(self.norm_2), bound(self.mlp)

    def forward(self, x: Tensor, step: Step, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """Maps rows of embedding and state, `(N, 2 * C)`, to `(N, C)`."""
        embedding, state = x.chunk(2, dim=-1)
        normed = self._state_norm(state)
        residual = normed if self.norm_before_residual else state
        y = residual + self._attention(
            torch.cat((self._embedding_norm(embedding), normed), dim=-1), step, k_cache, v_cache
        )
        return y + self._feed_forward(self._mlp_norm(y))


class Eagle(TappedDrafter):
    """Drafts with an EAGLE-3 head, see `drafters.Drafter`. Made by `load_eagle`.

    Attributes:
        layers: The one layer.

    Args:
        layers: The one layer.
        taps: Blocks whose states it reads.
        project: Projects the concatenated states to one: `(N, len(taps) * C)` to `(N, c)`.
        norm: The norm before the output head.
        head: Maps normed states to logits of its own vocabulary; None for the target's output head.
        target_ids: The target's id for each of those logits; None if the ids are the same.
        embedding: `(V, c)`; None for the target's.
        norm_output: Whether the next step reads the normed state.
        step_bytes: Bytes of weights read per token.
    """

    def __init__(
        self,
        layers: Layers,
        *,
        taps: tuple[int, ...],
        project: Function,
        norm: Function,
        head: Function | None,
        target_ids: Tensor | None,
        embedding: Tensor | None,
        norm_output: bool,
        step_bytes: int,
    ) -> None:
        self.layers = layers
        self.taps = taps
        self.max_k = MAX_K
        self._step_bytes = step_bytes
        self.project = project
        self.norm = norm
        self.head = head
        self.target_ids = target_ids
        self.embedding = embedding
        self.norm_output = norm_output

    @property
    def name(self) -> str:
        return "eagle3"

    @property
    def block_size(self) -> int:
        return self.layers.config.block_size

    @property
    def rows(self) -> int:
        return 1

    def cost(self, k: int) -> Cost:
        return Cost(k * self._step_bytes, k)

    def memory(self, max_length: int) -> int:
        like = embedding_of(self.layers).weight
        states = CHUNK * len(self.taps) * like.size(1) * like.element_size()
        return cache_bytes(self.layers, self.limit(max_length) + OVERHANG) + states

    def make_cache(self, target: TargetSession, length: int, count: int) -> KVCache:
        return self.layers.make_cache(length, width=OVERHANG, batch_size=count)

    def start(self, target: TargetSession, max_length: int, sampler: Sampler) -> EagleSession:
        return EagleSession(self, target, max_length, sampler)

    def absorb(self, sessions: Sequence[EagleSession], sizes: Sequence[int], members: range, width: int | None) -> None:
        model, cache = sessions[0].target.model, self._cache(sessions, members)
        taken = [session.pending.take(size) for session, size in zip(sessions, sizes)]
        numbers = [session.number for session in sessions]
        rows = width or max(sizes)
        tokens = padded_tokens([own for own, _ in taken], numbers, members, rows, sessions[0].device)
        states = self.project(padded([own for _, own in taken], numbers, members, rows))
        places = places_of(cache, members, {each.number: each.filled for each in sessions}, rows)
        y = self._run(model, tokens, states, places, cache)
        for session, size in zip(sessions, sizes):
            last = (session.number - members.start) * rows + size - 1
            session.filled += size
            session.last = y[last : last + 1].clone()

    def draft(
        self,
        sessions: Sequence[EagleSession],
        tokens: Sequence[int],
        k: Sequence[int],
        members: range,
        exact: int | None,
    ) -> list[Proposal]:
        model, cache, most = sessions[0].target.model, self._cache(sessions, members), max(k)
        width = exact or 1
        state = padded([session.last for session in sessions], [session.number for session in sessions], members)
        places = places_of(cache, members, {each.number: each.filled for each in sessions}, most + width)
        inputs = inputs_of(sessions, members, [session.filled + 1 for session in sessions], most)

        logits = partial(in_multiples, partial(self._logits, model), exact)

        def step(token: Tensor, i: int) -> Tensor:
            nonlocal state
            y = self._run(model, leading(token, width), leading(state, width), places.after(i), cache)
            state = y[::width].contiguous()
            return logits(state)

        return draw_chain(sessions, members, inputs, logits(state), step, k)

    def try_rows(
        self, target: TargetSession, ids: Tensor, states: Tensor, places: Places, cache: KVCache
    ) -> list[Tensor]:
        y = self._run(target.model, ids.flatten(), self.project(states.flatten(0, 1)), places, cache)
        return [y, self._logits(target.model, y)]

    def _cache(self, sessions: Sequence[EagleSession], members: range) -> KVCache:
        return sessions[0].pool.cache.sequences(members.start, members.stop)

    def _run(self, model: GPT, tokens: Tensor, states: Tensor, places: Places, cache: KVCache) -> Tensor:
        """The layer's output `(N, c)` for rows of a state and the token after it."""
        embedded = embedding_of(model)(tokens) if self.embedding is None else F.embedding(tokens, self.embedding)
        y = self.layers.run(0, torch.cat((embedded, states), dim=-1), places, cache)
        return self.norm(y) if self.norm_output else y

    def _logits(self, model: GPT, state: Tensor) -> Tensor:
        """Logits over the target's ids, (N, V)."""
        normed = state if self.norm_output else self.norm(state)
        logits = head_logits(model, normed) if self.head is None else self.head(normed)
        vocab_size = model.config.padded_vocab_size
        if self.target_ids is not None:
            everything = logits.new_full((logits.size(0), vocab_size), float("-inf"))
            return everything.index_copy(1, self.target_ids, logits)
        return F.pad(logits, (0, vocab_size - logits.size(1)), value=float("-inf"))


class EagleSession(TappedSession):
    """One text, see `TappedSession`.

    The rows of accepted drafts are run again, on the target's states.

    Attributes:
        last: Output of the last final row, `(1, c)`.
    """

    last: Tensor


# --- Loading ----------------------------------------------------------------------------------------------------------


def load_eagle(folder: str | Path, target_model: GPT) -> Eagle:
    """Reads a published EAGLE-3 head, in SafeAILab's format or in speculators' format.

    Args:
        folder: A folder with `config.json`, and `model.safetensors` or `pytorch_model.bin`.
        target_model: The target; the head is put on its device, in its precision.

    Raises:
        InputError: The folder holds no EAGLE-3 head, is damaged, or was made for another target.
    """
    folder = Path(folder)
    published = open_published(folder)
    config = published.config | nested(published.config, "transformer_layer_config", folder)
    weights = {name.removeprefix("model."): tensor for name, tensor in published.read().items()}
    prefix = "midlayer." if any(name.startswith("midlayer.") for name in weights) else "layers.0."
    layer = {name.removeprefix(prefix): weights.pop(name) for name in list(weights) if name.startswith(prefix)}
    if further := [name for name in weights if name.startswith("layers.")]:
        raise InputError(
            f"The EAGLE-3 head in {str(folder)!r} has {min(further)!r}; only heads with one layer are supported."
        )
    if "hidden_norm.weight" not in layer:
        raise InputError(f"{str(folder)!r} holds no EAGLE-3 head: its layer has no 'hidden_norm.weight'.")

    target = target_model.config
    like = embedding_of(target_model).weight
    hidden_size = number(config, "hidden_size", folder)
    taps = _taps(config, target.n_layer, folder)
    fc = take(weights, "fc.weight", folder)
    _check_states(config, fc, len(taps), hidden_size, target, folder)
    target_ids, embedding = _vocabulary(config, weights, hidden_size, target_model, folder)

    size = max(config.get("max_position_embeddings") or 0, 1)
    size = min(size, target.block_size)
    hidden_norm = layer.pop("hidden_norm.weight")
    block = layer_config(config, layer, folder, n_layer=1, block_size=size)
    named = {f"transformer.h.0.{name}": tensor for name, tensor in litgpt_layer(layer, folder).items()}
    named["transformer.h.0.norm_hidden.weight"] = hidden_norm
    before = bool(config.get("norm_before_residual", False))
    layers, step_bytes = load_layers(
        lambda: Layers(block, [EagleBlock(block, norm_before_residual=before)]), named, folder, like
    )

    eps = block.norm_eps
    head = weights.get("lm_head.weight")
    drafter = Eagle(
        layers,
        taps=taps,
        project=_projection(config, weights, fc, len(taps), eps, folder, like),
        norm=norm(take(weights, "norm.weight", folder), eps, like),
        head=None if head is None else linear(head, like),
        target_ids=target_ids,
        embedding=embedding,
        norm_output=bool(config.get("norm_output", False)),
        step_bytes=step_bytes + (head_bytes(target_model) if head is None else head.numel() * like.element_size()),
    )
    if size < target.block_size:
        drafter.notes = [
            f"The EAGLE-3 head has a context of {size} tokens, the target {target.block_size}; after {size} tokens of "
            "a text, nothing is drafted."
        ]
    return drafter


def _taps(config: Mapping[str, Any], n_layer: int, folder: Path) -> tuple[int, ...]:
    """The blocks whose states the head reads, 0-based."""
    name = "eagle_aux_hidden_state_layer_ids"
    ids = nested(config, "eagle_config", folder).get(name) or config.get(name) or [2, n_layer // 2, n_layer - 3]
    if not isinstance(ids, list) or not all(isinstance(i, int) for i in ids):
        raise InputError(f"config.json in {str(folder)!r} must give {name} as a list of whole numbers, got {ids!r}.")
    # There are two conventions. If the first id is 1, ids are block indices. Otherwise they index the hidden states: 0
    # is the embedding, i the output of block i - 1.
    taps = tuple(ids) if ids[0] == 1 else tuple(i - 1 for i in ids)
    if wrong := [i for i in taps if not 0 <= i < n_layer]:
        raise InputError(
            f"The EAGLE-3 head in {str(folder)!r} reads the states after the target's blocks {list(taps)}, but the "
            f"target has {n_layer} blocks and no block {wrong[0]}; give the target that the head was made for."
        )
    return taps


def _check_states(
    config: Mapping[str, Any], fc: Tensor, taps: int, hidden_size: int, target: Config, folder: Path
) -> None:
    width = config.get("target_hidden_size") or hidden_size
    if width != target.n_embd:
        raise InputError(
            f"The EAGLE-3 head in {str(folder)!r} reads states of {width} channels, but the target's have "
            f"{target.n_embd}; give the target that the head was made for."
        )
    if tuple(fc.shape) != (hidden_size, taps * target.n_embd):
        raise InputError(
            f"The EAGLE-3 head in {str(folder)!r} has a projection 'fc.weight' of shape {tuple(fc.shape)}; {taps} "
            f"states of the target's {target.n_embd} channels need {(hidden_size, taps * target.n_embd)}."
        )


def _vocabulary(
    config: Mapping[str, Any], weights: dict[str, Tensor], hidden_size: int, target_model: GPT, folder: Path
) -> tuple[Tensor | None, Tensor | None]:
    """The target's id of each logit, and the head's own embedding. Each is None if it is the same as the target's."""
    target = target_model.config
    like = embedding_of(target_model).weight
    vocab_size = number(config, "vocab_size", folder)
    if not target.vocab_size <= vocab_size <= target.padded_vocab_size:
        raise InputError(
            f"The EAGLE-3 head in {str(folder)!r} was made for a vocabulary of {vocab_size} ids, but the target has "
            f"{target.vocab_size} ({target.padded_vocab_size} with padding); give the target that it was made for."
        )
    embedding = weights.get("embed_tokens.weight")
    if embedding is not None and embedding.size(1) == like.size(1):
        # Most files hold a copy of the target's embedding.
        rows = min(embedding.size(0), like.size(0))
        if torch.equal(embedding[:rows].to(like.device, like.dtype), like[:rows]):
            embedding = None
    if embedding is None and hidden_size != target.n_embd:
        raise InputError(
            f"The EAGLE-3 head in {str(folder)!r} has {hidden_size} channels and no embedding of its own, but the "
            f"target's embedding has {target.n_embd}."
        )
    if embedding is not None:
        embedding = embedding.to(like.device, like.dtype)

    head = weights.get("lm_head.weight")
    rows = target.padded_vocab_size if head is None else head.size(0)
    offsets = weights.get("d2t")
    if offsets is None or rows == vocab_size:
        if head is not None and rows > target.padded_vocab_size:
            raise InputError(
                f"The head in {str(folder)!r} gives {rows} logits, but the target has {target.padded_vocab_size} ids."
            )
        if head is not None and rows < vocab_size:
            raise InputError(f"The head in {str(folder)!r} gives {rows} of {vocab_size} logits, and there is no 'd2t'.")
        return None, embedding
    if offsets.numel() != rows:
        raise InputError(f"'d2t' in {str(folder)!r} has {offsets.numel()} entries, but the head gives {rows} logits.")
    ids = torch.arange(rows) + offsets.cpu().to(torch.int64)
    if not 0 <= int(ids.min()) <= int(ids.max()) < target.padded_vocab_size:
        raise InputError(
            f"'d2t' in {str(folder)!r} maps to id {int(ids.max())}, but the target has {target.padded_vocab_size} ids."
        )
    return ids.to(like.device), embedding


def _projection(
    config: Mapping[str, Any],
    weights: dict[str, Tensor],
    fc: Tensor,
    taps: int,
    eps: float,
    folder: Path,
    like: Tensor,
) -> Function:
    """The projection of the target's states, with the norms that some heads apply before it."""
    project = linear(fc, like)
    if config.get("fc_norm", False):
        norms = [norm(take(weights, f"fc_norm.{i}.weight", folder), eps, like) for i in range(taps)]

        def normed(hidden: Tensor) -> Tensor:
            parts = hidden.chunk(taps, dim=-1)
            return project(torch.cat([each(part) for each, part in zip(norms, parts)], dim=-1))

        return normed
    if config.get("norm_before_fc", False):
        before = norm(take(weights, "input_norm.weight", folder), eps, like)
        return lambda hidden: project(before(hidden))
    return project
