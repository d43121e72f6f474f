"""What drafters that run a model token by token have in common."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence

import torch

from litspec.drafters.base import Proposal
from litspec.engine.runner import Runner
from litspec.model import GPT, KVCache
from litspec.sampling import Distribution, Inputs, Sampler, concatenate


def step_bytes(model: GPT, n_layer: int | None = None) -> int:
    """Bytes of weights that one row reads on its way through the first `n_layer` blocks (None: all) and the head.

    Of the whole model, also where this process holds a part of it or has laid it out otherwise: k is chosen by it.
    """
    with torch.device("meta"):
        whole = GPT(model.config)
    modules = [*whole.transformer.h[:n_layer], whole.transformer.ln_f, whole.lm_head]
    return sum(p.numel() for m in modules for p in m.parameters()) * model.transformer.wte.weight.element_size()


class ModelDrafts:
    """Drafts of one text by a model, each token drawn from the logits that followed the one before.

    Args:
        runner: Runs the steps.
        model: Whose steps they are ...
        sampler: The text's.
        n_layer: ... of its first layers; None: of all.
        allowed: Makes the logits of one row, (1, V), those of the ids that may be proposed, (1, v).
        name: Of all that `allowed` depends on.
    """

    def __init__(
        self,
        runner: Runner,
        model: GPT,
        sampler: Sampler,
        *,
        n_layer: int | None = None,
        allowed: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
        name: Hashable = None,
    ) -> None:
        self._runner = runner
        self._model = model
        self._sampler = sampler
        self._n_layer = n_layer
        self._allowed = allowed
        self._layers = len(model.transformer.h[:n_layer])
        self._pieces: tuple[int, ...] = (4, 2, 1)
        self._name = ("draft", model, n_layer, name, sampler.kind)

    def propose(self, rows: torch.Tensor, input_pos: int, k: int, cache: KVCache) -> Proposal:
        """Drafts k tokens; nothing is read to the host.

        Args:
            rows: The last committed tokens, (r,), to be run first.
            input_pos: Position of the first of them.
            k: At least 1.
            cache: The model's.
        """
        found: list[Proposal] = []
        for n in self._runner.split(k, self._pieces):
            before = torch.cat([proposal.tokens for proposal in found]) if found else None
            found.append(self._run(rows, input_pos, n, cache, cache.bucket(input_pos + rows.size(0) + n - 1), before))
            input_pos += n
            rows = torch.cat((rows, found[-1].tokens))[-rows.size(0) :]
        tokens, q = found[0] if len(found) == 1 else _joined(found)
        # The last piece may have been larger than what was left to draft.
        return Proposal(tokens[:k], None if q is None else q.first(k))

    def prepare(self, n_rows: int, cache: KVCache, sizes: Sequence[int], max_length: int) -> bool:
        """Builds what proposals in a text of `max_length` will need; tells whether anything was built.

        That writes to the last places of the cache, where a prompt may have stood.
        """
        before = len(self._runner)
        rows = torch.zeros(n_rows, dtype=torch.int64, device=cache.slots.device)
        self._pieces = self._runner.pieces(sizes, self._layers)
        for n in self._pieces:
            for kv_length in cache.buckets(max_length + max(self._pieces)):
                if self._key(n_rows, n, cache, kv_length) not in self._runner:
                    self._run(rows, cache.size - n_rows - n, n, cache, kv_length)
        return len(self._runner) > before

    def _key(self, n_rows: int, n: int, cache: KVCache, kv_length: int) -> Hashable:
        return self._name, n_rows, n, cache.shape, kv_length

    def _run(
        self,
        rows: torch.Tensor,
        input_pos: int,
        n: int,
        cache: KVCache,
        kv_length: int,
        before: torch.Tensor | None = None,
    ) -> Proposal:
        model, sampler, n_layer, allowed = self._model, self._sampler, self._n_layer, self._allowed

        def draft(cache: KVCache, rows: torch.Tensor, places: torch.Tensor, inputs: Inputs) -> Proposal:
            idx, place, behind = rows.view(1, -1), places[:1], rows.size(0)
            drawn: list[tuple[torch.Tensor, Distribution | None]] = []
            for i in range(n):
                logits = model.verify(idx, place, cache, kv_length=kv_length, n_layer=n_layer, last=1)
                drawn.append(sampler.draw(allowed(logits[0]), inputs.row(i, [token for token, _ in drawn])))
                idx, place = drawn[-1][0].view(1, 1), places[behind + i : behind + i + 1]
            q = [each for _, each in drawn if each is not None]
            return Proposal(torch.cat([token for token, _ in drawn]), concatenate(q) if q else None)

        first = input_pos + rows.size(0)
        inputs = sampler.inputs(rows.device, first, n, before)
        # Positions are on the device already.
        places = cache.slots[input_pos : first + n]
        key = self._key(rows.size(0), n, cache, kv_length) if self._runner.compiles else None
        return self._runner.run(key, draft, cache, rows, places, inputs)


def _joined(found: Sequence[Proposal]) -> Proposal:
    q = [proposal.q for proposal in found if proposal.q is not None]
    return Proposal(torch.cat([proposal.tokens for proposal in found]), concatenate(q) if q else None)
