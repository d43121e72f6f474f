"""The model: LitGPT's config and weights, with a forward for blocks of rows. Notation: `litspec.model.kv_cache`."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, Protocol, cast, overload

import litgpt.model
import torch
import torch.nn.functional as F
from litgpt.config import Config
from torch import Tensor, nn

from litspec.errors import InputError
from litspec.model.attention import MAX_FOLDED_ROWS, CausalSelfAttention, MultiheadLatentAttention, mask_kind
from litspec.model.bound import bound, bound_if_any
from litspec.model.kv_cache import SMALLEST_COMPILED, KVCache, Step, kv_bucket
from litspec.model.mlp import LLaMAMoE, build_mlp
from litspec.model.norm import build_norm


class Block(nn.Module):
    """One layer, with LitGPT's parameter names."""

    def __init__(self, config: Config, block_idx: int) -> None:
        super().__init__()
        attention = MultiheadLatentAttention if config.latent_attention else CausalSelfAttention

        def norm(wanted: bool) -> nn.Module:
            return build_norm(config, config.n_embd) if wanted else nn.Identity()

        self.parallel_residual = config.parallel_residual
        self.norm_1 = norm(config.norm_1)
        self.attn = attention(config, block_idx)
        self.post_attention_norm = norm(config.post_attention_norm)
        # The MLP may have the same input as the attention.
        self.shared_attention_norm = config.norm_2 and config.shared_attention_norm
        self.norm_2 = None if self.shared_attention_norm else norm(config.norm_2)
        self.mlp = build_mlp(config, block_idx)
        self.post_mlp_norm = norm(config.post_mlp_norm)
        self.bind()

    def bind(self) -> None:
        """Binds the present weights, see `litspec.model.bound`."""
        self._norm_1, self._norm_2 = bound_if_any(self.norm_1), bound_if_any(self.norm_2)
        self._post_attention_norm = bound_if_any(self.post_attention_norm)
        self._post_mlp_norm = bound_if_any(self.post_mlp_norm)
        self._attn, self._mlp = bound(self.attn), bound(self.mlp)
        self.attn.bind()
        self.mlp.bind()

    def forward(self, x: Tensor, step: Step, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        """The residual stream `(N, C)` after this layer."""
        normed = x if self._norm_1 is None else self._norm_1(x)
        y = self._attn(normed, step, k_cache, v_cache)
        attended = x + (y if self._post_attention_norm is None else self._post_attention_norm(y))
        if not self.shared_attention_norm:
            normed = x if self.parallel_residual else attended
            normed = normed if self._norm_2 is None else self._norm_2(normed)
        y = self._mlp(normed, step.exact)
        return attended + (y if self._post_mlp_norm is None else self._post_mlp_norm(y))


class Transformer(Protocol):
    """The parts of a GPT under LitGPT's names: what the attributes of its `nn.ModuleDict` are."""

    wte: nn.Embedding
    h: Sequence[Block]
    ln_f: nn.Module


class GPT(nn.Module):
    """A decoder-only transformer with LitGPT's `Config` and parameter names, for inference.

    Keys and values are in a `KVCache` that the caller holds. `prefill` reads a prompt. `verify` runs a block of rows.
    Refused rows need no rollback: positions behind the last committed one are masked until they are overwritten.
    """

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.lm_head = nn.Linear(config.n_embd, config.padded_vocab_size, bias=config.lm_head_bias)
        parts = {
            "wte": nn.Embedding(config.padded_vocab_size, config.n_embd),
            "h": nn.ModuleList(Block(config, block_idx) for block_idx in range(config.n_layer)),
            "ln_f": build_norm(config, config.n_embd),
        }
        self.transformer = cast(Transformer, nn.ModuleDict(parts))
        self.max_seq_length = config.block_size
        self._own_cache: KVCache | None = None
        self._rope: list[Tensor] = []
        self.bind()

    # ---- weights ----

    def bind(self) -> None:
        """Binds the present weights: layers hold them as functions, see `litspec.model.bound`.

        Loading or moving the module and `make_cache` call it. Call it yourself after you assign a parameter while a
        cache is in use.
        """
        for block in self.transformer.h:
            block.bind()
        self._ln_f, self._lm_head = bound(self.transformer.ln_f), bound(self.lm_head)
        self._wte = partial(F.embedding, weight=self.transformer.wte.weight)
        self._blocks = [bound(block) for block in self.transformer.h]
        attentions = [block.attn for block in self.transformer.h]
        self._attention_kinds = {(a.window, a.n_head // a.n_query_groups, a.softcap) for a in attentions}

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        result = super().load_state_dict(*args, **kwargs)
        self.bind()
        return result

    def _apply(self, *args: Any, **kwargs: Any) -> GPT:
        super()._apply(*args, **kwargs)
        self.bind()
        return self

    def fix_shapes(self) -> None:
        """Makes all shapes inside `verify` depend on its arguments' shapes alone, as one graph for all calls needs."""
        for block in self.transformer.h:
            if isinstance(block.mlp, LLaMAMoE):
                block.mlp.fixed_shapes = True

    # ---- sessions ----

    @torch.inference_mode(False)  # tensors created in inference mode cannot be written outside of it
    @torch.no_grad()
    def make_cache(
        self,
        max_seq_length: int,
        *,
        batch_size: int = 1,
        width: int = 8,
        powers_of_two: bool = False,
        n_layer: int | None = None,
    ) -> KVCache:
        """An empty cache for one session.

        Args:
            max_seq_length: most committed positions, at most the config's `block_size`.
            batch_size: sequences, B.
            width: rows of the widest block. The cache has this many extra slots for the last block.
            powers_of_two: whether sizes and buckets are powers of two, for compiled steps.
            n_layer: number of first blocks that will be run; None for all.

        Raises:
            InputError: `max_seq_length` exceeds the context length of the model.
        """
        self._check_length(max_seq_length)
        self.bind()
        size = max_seq_length + width
        size = kv_bucket(max(size, SMALLEST_COMPILED) if powers_of_two else size, powers_of_two=powers_of_two)
        k, v = [], []
        for block in self.transformer.h[:n_layer]:
            # Layers may lie on several devices, and their weights may be quantized; the embedding never is.
            like: dict[str, Any] = dict(dtype=self.transformer.wte.weight.dtype, device=next(block.parameters()).device)
            shape = block.attn.cache_shape(batch_size, size)
            k.append(torch.zeros(shape, **like))
            v.append(torch.zeros(shape, **like))
        rope = [table[:size] for table in self._rope_tables(size)]
        return KVCache(k, v, rope, max_seq_length, powers_of_two)

    @overload
    def prefill(
        self, idx: Tensor, cache: KVCache, *, start: int = ..., chunk_size: int = ..., taps: tuple[()] = ...
    ) -> Tensor: ...
    @overload
    def prefill(
        self, idx: Tensor, cache: KVCache, *, start: int = ..., chunk_size: int = ..., taps: Sequence[int]
    ) -> Tensor | tuple[Tensor, Tensor]: ...

    @torch.no_grad()
    def prefill(
        self, idx: Tensor, cache: KVCache, *, start: int = 0, chunk_size: int = 512, taps: Sequence[int] = ()
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Reads a prompt in chunks, so that memory other than K/V does not grow with its length.

        Args:
            idx: tokens `(B, T)`, at positions `start`, `start + 1`, ...
            cache: written from `start` on.
            start: position of the first token.
            chunk_size: rows per forward; another size may change the last bits.
            taps: see `verify`.

        Returns:
            Logits of the last token, `(B, 1, V)`; with taps also their states for all tokens, `(B, T, len(taps) * C)`.
        """
        tapped, T = [], idx.size(1)
        for begin in range(0, T, chunk_size):
            chunk = idx[:, begin : begin + chunk_size]
            first = start + begin
            input_pos = torch.full((idx.size(0),), first, device=idx.device)
            kv_length = cache.bucket(first + chunk.size(1))
            # Without a name, the mask of a chunk is freed before the next one is allocated.
            x, hidden = self._rows(
                chunk, self._step(cache, input_pos, chunk.size(1), kv_length, exact=False), cache, taps
            )
            tapped += hidden
        logits = self._head(x, last=1)
        return (logits, torch.cat(tapped, dim=1)) if taps else logits

    @overload
    def verify(
        self,
        idx: Tensor,
        input_pos: Tensor,
        cache: KVCache,
        *,
        kv_length: int | None = ...,
        n_layer: int | None = ...,
        last: int | None = ...,
        taps: tuple[()] = ...,
        exact: bool = ...,
    ) -> Tensor: ...
    @overload
    def verify(
        self,
        idx: Tensor,
        input_pos: Tensor,
        cache: KVCache,
        *,
        kv_length: int | None = ...,
        n_layer: int | None = ...,
        last: int | None = ...,
        taps: Sequence[int],
        exact: bool = ...,
    ) -> Tensor | tuple[Tensor, Tensor]: ...

    @torch.no_grad()
    def verify(
        self,
        idx: Tensor,
        input_pos: Tensor,
        cache: KVCache,
        *,
        kv_length: int | None = None,
        n_layer: int | None = None,
        last: int | None = None,
        taps: Sequence[int] = (),
        exact: bool = True,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Run a block of rows at the end of what is committed.

        Only the results depend on values, so that one compiled graph serves every call of the same W and `kv_length`.

        Args:
            idx: tokens `(B, W)`; W fixed over a session keeps a row's bits, missing rows are padding (id 0).
            input_pos: position of row 0 of each sequence, `(B,)` int64.
            cache: written at the rows' positions. Whatever lies behind them is masked.
            kv_length: slots to read, at least `max(input_pos) + W` and best a bucket (`cache.bucket`); None: all.
            n_layer: run only that many blocks, then the final norm and head (early exit).
            last: logits of the last so many rows only; 0 leaves out the head.
            taps: blocks (0-based) after which the residual stream is wanted; -1: after the final norm.
            exact: whether rows must keep their bits wherever they stand, see `Step`.

        Returns:
            Logits `(B, W, V)` (`(B, last, V)`); with taps also the states, `(B, W, len(taps) * C)`.
        """
        step = self._step(cache, input_pos, idx.size(1), kv_length or cache.size, exact)
        x, hidden = self._rows(idx, step, cache, taps, n_layer)
        logits = self._head(x, last)
        return (logits, hidden[0]) if taps else logits

    def _step(self, cache: KVCache, input_pos: Tensor, width: int, kv_length: int, exact: bool) -> Step:
        kinds = {mask_kind(window, copies, width, softcap) for window, copies, softcap in self._attention_kinds}
        return Step.at(cache, input_pos, width, kv_length, kinds, exact=exact)

    def _rows(
        self, idx: Tensor, step: Step, cache: KVCache, taps: Sequence[int] = (), n_layer: int | None = None
    ) -> tuple[Tensor, list[Tensor]]:
        """The residual stream `(B, W, C)` before the final norm, and what the taps saw (in a list of one, or none)."""
        x = self._wte(idx.flatten())
        if self.config.scale_embeddings:
            # Gemma was trained with the factor rounded to the dtype of its weights.
            x = x * torch.tensor(self.config.n_embd**0.5, dtype=x.dtype)
        seen = {}
        for i, (block, k_cache, v_cache) in enumerate(zip(self._blocks[:n_layer], cache.k, cache.v)):
            if x.device != k_cache.device:
                x, step = x.to(k_cache.device), step.to(k_cache.device)
            x = block(x, step, k_cache, v_cache)
            if i in taps:
                seen[i] = x
        x = x.to(idx.device)
        if -1 in taps:
            seen[-1] = self._ln_f(x)
        states = [torch.cat([seen[i].to(x.device) for i in taps], dim=-1).view(*idx.shape, -1)] if taps else []
        return x.view(*idx.shape, -1), states

    def _head(self, x: Tensor, last: int | None = None) -> Tensor:
        """Final norm and logits of the last rows of `x` `(B, W, C)`, None for all: `(B, last, V)`."""
        if last == 0:
            return x.new_empty(x.size(0), 0, self.config.padded_vocab_size)
        x = x if last is None else x[:, -last:]
        logits = self._lm_head(self._ln_f(x.flatten(0, 1)))
        cap = self.config.final_logit_softcapping
        logits = logits if cap is None else torch.tanh(logits / cap) * cap
        return logits.view(*x.shape[:2], -1)

    def _rope_tables(self, length: int) -> list[Tensor]:
        """Tables of at least `length` rows per rope base, in the dtype and on the device of the embedding."""
        like = self.transformer.wte.weight
        if self._rope:
            table = self._rope[0]
            if table.size(0) >= length and table.dtype == like.dtype and table.device == like.device:
                return self._rope
        source = SimpleNamespace(config=self.config, max_seq_length=length)
        cos, sin = litgpt.model.GPT.rope_cache(source, device=like.device)
        half = cos.size(1) // 2
        sin = torch.cat((-sin[:, :half], sin[:, half:]), dim=1)
        tables = torch.stack((cos, sin), dim=1).to(like.dtype)  # (S, 2, n), or (S, 2, n, bases)
        self._rope = [t.contiguous() for t in ([tables] if tables.dim() == 3 else tables.unbind(-1))]
        return self._rope

    # ---- LitGPT's calling convention ----

    @property
    def max_seq_length(self) -> int:
        """Committed positions of the module's own cache."""
        return self._max_seq_length

    @max_seq_length.setter
    def max_seq_length(self, value: int) -> None:
        self._check_length(value)
        self._max_seq_length = value

    def _check_length(self, length: int) -> None:
        if length > self.config.block_size:
            raise InputError(
                f"{length} positions are more than the model can attend to; its context length is "
                f"{self.config.block_size}, so ask for fewer tokens or a shorter prompt."
            )

    def set_kv_cache(self, batch_size: int = 1, max_seq_length: int | None = None, *_: object, **__: object) -> None:
        """Give the module a cache of its own, as LitGPT's loops expect; further arguments of LitGPT's are ignored."""
        self._own_cache = self.make_cache(max_seq_length or self.max_seq_length, batch_size=batch_size)

    def clear_kv_cache(self) -> None:
        """Drop the module's own cache."""
        self._own_cache = None

    def forward(self, idx: Tensor, input_pos: Tensor | None = None, input_pos_maxp1: int | None = None) -> Tensor:
        """LitGPT's calling convention, over the cache that the module keeps.

        Args:
            idx: tokens `(B, T)`.
            input_pos: their positions, `(T,)` and consecutive; None: `0 ... T - 1`, without a cache.
            input_pos_maxp1: the last position plus one, where the caller knows it: fewer keys are then read.

        Returns:
            Logits of all rows, `(B, T, V)`.

        Raises:
            TypeError: `input_pos` is given, but `set_kv_cache` was not called.
            InputError: a position lies beyond `max_seq_length`.
        """
        B, T = idx.shape
        cache = self._own_cache if input_pos is not None else self.make_cache(T, batch_size=B, width=0)
        if cache is None:
            raise TypeError("You need to call `gpt.set_kv_cache()`")
        if input_pos is None:
            input_pos, input_pos_maxp1 = torch.arange(T, device=idx.device), T
        if max(T, input_pos_maxp1 or 0) > cache.max_seq_length:
            raise InputError(
                f"Position {max(T, input_pos_maxp1 or 0) - 1} lies beyond the cache, which holds "
                f"{cache.max_seq_length} positions; set a larger `max_seq_length`."
            )
        logits = []
        for begin in range(0, T, 512):
            rows = idx[:, begin : begin + 512]
            end = None if input_pos_maxp1 is None else cache.bucket(input_pos_maxp1 - T + begin + rows.size(1))
            # This convention does not tell a prompt from a block; none of LitGPT's loops verifies that many rows.
            exact = T <= MAX_FOLDED_ROWS
            logits.append(self.verify(rows, input_pos[begin].expand(B), cache, kv_length=end, exact=exact))
        return logits[0] if len(logits) == 1 else torch.cat(logits, dim=1)
