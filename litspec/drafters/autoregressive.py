"""What drafters that run a model token by token have in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from litspec.compiled import Graphs, split
from litspec.drafters.base import Proposal
from litspec.model import GPT, KVCache
from litspec.sampling import Distribution, Inputs, Position, Rejection, Sampler, concatenate

# A graph takes time to build for each layer in it. Where one draft step has many layers, little can be gained by
# several steps in a graph: the way back to Python between them, some 50 microseconds, is short beside a step.
LAYERS_PER_GRAPH = 16


def step_bytes(model: GPT, n_layer: int | None = None) -> int:
    """Bytes of weights that one row reads on its way through the first `n_layer` blocks (None: all) and the head."""
    modules = [*model.transformer.h[:n_layer], model.transformer.ln_f, model.lm_head]
    return sum(p.numel() * p.element_size() for module in modules for p in module.parameters())


def draft_tokens(
    sampler: Sampler,
    logits: torch.Tensor,
    step: Callable[[torch.Tensor, Position], torch.Tensor],
    input_pos: Position,
    k: int,
    inputs: Inputs | None = None,
) -> Proposal:
    """Draws k tokens, each from the logits that followed the one before; k - 1 steps, and nothing read to the host.

    Args:
        sampler: On the logits' device.
        logits: (1, V), those of the first token.
        step: `step(token, input_pos)` runs one token, (1,), and returns the logits that follow it, (1, V).
        input_pos: Where the first token stands.
        k: At least 1.
        inputs: The sampler's, in a compiled graph.

    Returns:
        The tokens, (k,), and the distributions they were drawn from, None where nothing was drawn.
    """
    drawn: list[tuple[torch.Tensor, Distribution | None]] = []
    for i in range(k):
        if drawn:
            logits = step(drawn[-1][0], input_pos + (i - 1))
        drawn.append(sampler.draw(logits, input_pos + i, None if inputs is None else inputs.draw(i)))
    rows = [q for _, q in drawn if q is not None]
    return Proposal(torch.cat([token for token, _ in drawn]), concatenate(rows) if rows else None)


def _joined(found: Sequence[Proposal]) -> Proposal:
    q = [proposal.q for proposal in found if proposal.q is not None]
    return Proposal(torch.cat([proposal.tokens for proposal in found]), concatenate(q) if q else None)


def fitting(pieces: Sequence[int], n_layer: int) -> tuple[int, ...]:
    """The largest equal parts of each piece whose graphs, at `n_layer` layers a step, fit `LAYERS_PER_GRAPH`."""
    most = max(1, LAYERS_PER_GRAPH // n_layer)
    parts = {max(n for n in range(1, piece + 1) if piece % n == 0 and n <= most) for piece in pieces}
    return tuple(sorted(parts, reverse=True))


class CompiledDraft:
    """Drafts of one text, several tokens a graph where steps are short.

    Args:
        graphs: Where graphs are kept.
        model: Whose steps they are ...
        sampler: The text's, on the model's device.
        n_layer: ... of its first layers; None: of all.
        allowed: Makes the logits of one row, (1, V), those of the ids that may be proposed, (1, v).
        vocab_size: v.
        name: Of all that `allowed` depends on.
    """

    def __init__(
        self,
        graphs: Graphs,
        model: GPT,
        sampler: Sampler,
        *,
        vocab_size: int,
        n_layer: int | None = None,
        allowed: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
        name: Hashable = None,
    ) -> None:
        self._graphs = graphs
        self._model = model
        self._sampler = sampler
        self._columns = min(sampler.sampling.top_k or vocab_size, vocab_size)
        self._vocab_size = vocab_size
        self._n_layer = n_layer
        self._allowed = allowed
        self._layers = len(model.transformer.h[:n_layer])
        self._pieces = fitting((4, 2, 1), self._layers)
        self._name = ("draft", model, n_layer, vocab_size, name, sampler.kind)

    def propose(self, rows: torch.Tensor, input_pos: int, k: int, cache: KVCache) -> Proposal:
        """Drafts k tokens.

        Args:
            rows: The last committed tokens, (1,) or (2,), to be run first.
            input_pos: Position of the first of them.
            k: At least 1.
            cache: The model's.
        """
        found: list[Proposal] = []
        for n in split(k, self._pieces):
            end = input_pos + rows.size(0) + n - 1
            found.append(self._run(rows, input_pos, n, cache, cache.bucket(end)))
            input_pos += n
            rows = torch.cat((rows, found[-1].tokens))[-rows.size(0) :]
        tokens, q = found[0] if len(found) == 1 else _joined(found)
        # The last piece may have been larger than what was left to draft.
        return Proposal(tokens[:k], None if q is None else q.first(k))

    def warm_up(self, n_rows: int, cache: KVCache, pieces: Sequence[int], max_length: int) -> bool:
        """Builds what proposals in a text of `max_length` will need; tells whether anything was built.

        That writes to the last slots of the cache, where a prompt may have stood.
        """
        before = len(self._graphs)
        rows = torch.zeros(n_rows, dtype=torch.int64, device=cache.slots.device)
        self._pieces = fitting(pieces, self._layers)
        for n in self._pieces:
            for kv_length in cache.buckets(max_length + max(self._pieces)):
                if self._key(n_rows, n, cache, kv_length) not in self._graphs:
                    self._run(rows, cache.size - n_rows - n, n, cache, kv_length)
        return len(self._graphs) > before

    def q_like(self) -> Distribution | None:
        """No rows of the form that a proposal's distributions have."""
        if not isinstance(self._sampler, Rejection):
            return None
        probs = torch.empty(0, self._columns, device=self._model.lm_head.weight.device)
        return Distribution(probs, probs.long() if self._columns < self._vocab_size else None)

    def _key(self, n_rows: int, n: int, cache: KVCache, kv_length: int) -> Hashable:
        return self._name, n_rows, n, cache.size, kv_length

    def _run(self, rows: torch.Tensor, input_pos: int, n: int, cache: KVCache, kv_length: int) -> Proposal:
        model, sampler, n_layer, allowed = self._model, self._sampler, self._n_layer, self._allowed

        def make() -> Callable[..., Proposal]:
            def draft(cache: KVCache, rows: torch.Tensor, input_pos: torch.Tensor, inputs: Inputs) -> Proposal:
                def step(tokens: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
                    idx = tokens.view(1, -1)
                    logits = model.verify(idx, position, cache, kv_length=kv_length, n_layer=n_layer, last=1)
                    return allowed(logits[0])

                logits = step(rows, input_pos)
                return draft_tokens(sampler, logits, step, input_pos + rows.size(0), n, inputs)

            return draft

        key = self._key(rows.size(0), n, cache, kv_length)
        inputs = sampler.inputs(rows.device, draws=n, columns=self._columns)
        return self._graphs.call(key, make, cache, rows, cache.slots[input_pos : input_pos + 1], inputs)
