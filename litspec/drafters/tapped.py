"""What drafters that read the target's states have in common: layers with keys and values of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import cast

import torch
from litgpt.config import Config
from torch import Tensor, nn

from litspec.drafters.base import Proposal
from litspec.errors import InputError
from litspec.model import GPT, KVCache
from litspec.model.gpt import Block
from litspec.model.norm import RMSNormFunction
from litspec.sampling import Distribution, Sampler, concatenate

# Rows that layers run at once while a prompt is read; whatever parts it comes in, it is cut in the same places.
CHUNK = 512
# A head proposes as many tokens as are asked for, but its later ones are seldom right.
MAX_K = 15


class Layers(GPT):
    """Decoder layers alone: a GPT whose embedding and head are not used.

    Args:
        config: Of the layers, with a vocabulary of one.
        blocks: The layers, where they are not those of the config.
    """

    def __init__(self, config: Config, blocks: list[nn.Module] | None = None) -> None:
        super().__init__(config)
        if blocks is not None:
            self.transformer.h = cast(Sequence[Block], nn.ModuleList(blocks))
            self.bind()

    def run(self, layer: int, x: Tensor, input_pos: int, cache: KVCache) -> Tensor:
        """Rows `x` through one layer, whose keys and values are written at `input_pos` and behind it: `(N, C)`."""
        size = x.size(0)
        step = self._step(
            cache, cache.slots[input_pos : input_pos + 1], size, cache.bucket(input_pos + size), exact=False
        )
        return self._blocks[layer](x, step, cache.k[layer], cache.v[layer])


def load_layers(
    make: Callable[[], Layers], weights: Mapping[str, Tensor], folder: Path, like: Tensor
) -> tuple[Layers, int]:
    """Builds layers and gives them their weights, without a second copy of them.

    Args:
        make: Builds them; called on the meta device.
        weights: By the layers' names, `transformer.h.0.` and so on.
        folder: For messages.
        like: A tensor of the device and type to use.

    Returns:
        The layers, and the bytes of their weights.

    Raises:
        InputError: For a weight that is missing or has another shape.
    """
    with torch.device("meta"):
        layers = make().eval().requires_grad_(False)
    state, size = {}, 0
    for name, old in layers.state_dict().items():
        if not name.startswith("transformer.h."):
            state[name] = torch.zeros(old.shape, dtype=like.dtype, device=like.device)
            continue
        if name not in weights:
            raise InputError(f"The weights in {str(folder)!r} lack one that becomes {name!r} in LitGPT's names.")
        new = weights[name]
        if new.shape != old.shape:
            raise InputError(
                f"A weight in {str(folder)!r} does not fit its config.json: what becomes {name!r} in LitGPT's names "
                f"has shape {tuple(new.shape)}, the config makes it {tuple(old.shape)}."
            )
        state[name] = new.to(like.device, like.dtype)
        size += state[name].numel() * state[name].element_size()
    layers.load_state_dict(state, assign=True)
    return layers.requires_grad_(False), size


def linear(weight: Tensor, like: Tensor) -> Callable[[Tensor], Tensor]:
    """A layer without bias as a function of rows."""
    return partial(torch.mm, mat2=weight.to(like.device, like.dtype).t())


def norm(weight: Tensor, eps: float, like: Tensor) -> RMSNormFunction:
    """A norm as a function of rows."""
    return RMSNormFunction(weight.to(like.device, like.dtype), eps)


def embedding_of(model: GPT) -> nn.Embedding:
    """A model's embedding, raw: without a factor that the model itself may put on it."""
    return model.transformer.wte


def head_bytes(model: GPT) -> int:
    """Bytes of a model's head."""
    return sum(p.numel() * p.element_size() for p in model.lm_head.parameters())


def head_logits(model: GPT, x: Tensor) -> Tensor:
    """A model's head on rows that were normed already: `(N, V)`."""
    logits: Tensor = model.lm_head(x)
    cap = model.config.final_logit_softcapping
    return logits if cap is None else torch.tanh(logits / cap) * cap


def joined(drawn: Sequence[tuple[Tensor, Distribution | None]]) -> Proposal:
    """One proposal of tokens that were drawn one by one, each with its distribution; at least one."""
    q = [each for _, each in drawn if each is not None]
    return Proposal(torch.cat([token for token, _ in drawn]), concatenate(q) if q else None)


def draw_chain(
    sampler: Sampler, logits: Tensor, step: Callable[[Tensor, int], Tensor], position: int, k: int
) -> Proposal:
    """Draws tokens one after the other.

    Args:
        sampler: The text's.
        logits: Of the first token, `(1, V)`.
        step: Given a token `(1,)` and its position, the logits of the next.
        position: Of the first token.
        k: How many, at least 1.
    """
    inputs = sampler.inputs(logits.device, position, k)
    drawn = [sampler.draw(logits, inputs.row(0))]
    for i in range(1, k):
        drawn.append(sampler.draw(step(drawn[-1][0], position + i - 1), inputs.row(i, [token for token, _ in drawn])))
    return joined(drawn)


class Pending:
    """Tokens and states that a session was told and has not run yet.

    Row p pairs the state at position p with the token behind it, so the text's first token makes no row.

    Attributes:
        tokens: One for each row.
    """

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self._hidden: list[Tensor] = []

    def add(self, tokens: list[int], input_pos: int, hidden: Tensor | None) -> None:
        """Takes up what `DraftSession.commit` was told; `keep` follows once full chunks were taken."""
        if hidden is None:
            raise ValueError("a drafter with taps must be told the target's states")
        skip = 1 if input_pos == 0 else 0
        self.tokens += tokens[skip:]
        if len(tokens) > skip:
            self._hidden.append(hidden[skip : len(tokens)])

    def take(self, size: int) -> tuple[list[int], Tensor]:
        """The first rows: their tokens, and their states `(size, taps * C)`."""
        hidden = self._hidden[0] if len(self._hidden) == 1 else torch.cat(self._hidden)
        tokens, self.tokens = self.tokens[:size], self.tokens[size:]
        self._hidden = [hidden[size:]] if self.tokens else []
        return tokens, hidden[:size]

    def keep(self) -> None:
        """Copies what is left of the states that came last: their tensor may be written over, and is larger."""
        if self._hidden:
            self._hidden[-1] = self._hidden[-1].clone()
