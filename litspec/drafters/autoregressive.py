"""Autoregressive drafting: shared code of the drafters that run a model token by token."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass

import torch

from litspec.drafters.base import Proposal
from litspec.engine.rows import class_limit
from litspec.engine.runner import Runner
from litspec.engine.target import neighbours
from litspec.model import GPT, KVCache
from litspec.sampling import Choosing, Distribution, Inputs, Sampler, concatenate

# Rows per draft step if the text depends on the drafts' bits, as with the rejection sampler: the last tokens are run
# again with the new one. Steps of one row have other bits in a batch than alone; steps of 4 rows rarely do.
EXACT_ROWS = 4
# The most rows of a forward over several texts.
MOST_ROWS = 256


def step_bytes(model: GPT, n_layer: int | None = None) -> int:
    """Bytes of weights that one row reads in the first `n_layer` blocks (None: all) and the head.

    Counts the whole model, even if this process holds a shard or another layout, since k depends on it.
    """
    with torch.device("meta"):
        whole = GPT(model.config)
    modules = [*whole.transformer.h[:n_layer], whole.transformer.ln_f, whole.lm_head]
    return sum(p.numel() for m in modules for p in m.parameters()) * model.transformer.wte.weight.element_size()


def exact_rows(sampler: Sampler) -> int | None:
    """Rows that each draft step of a text needs, so that the text is the same in every batch; None for any."""
    return None if isinstance(sampler, Choosing) else EXACT_ROWS


@dataclass
class Asked:
    """A request for drafts of one text.

    Attributes:
        number: Number of its slot.
        rows: The last committed tokens, which are run first.
        input_pos: Position of the first of them.
        sampler: The text's sampler.
        pieces: Drafts per compiled step, see `ModelDrafts.prepare`.
    """

    number: int
    rows: list[int]
    input_pos: int
    sampler: Sampler
    pieces: Sequence[int]


class ModelDrafts:
    """Drafts with a model: each token is drawn from the logits after the previous one.

    Args:
        model: The model that drafts.
        n_layer: Number of its first layers to run; None for all.
        allowed: Maps logits (N, V) to those of the ids that may be proposed, (N, v).
        name: Cache key of `allowed`.
    """

    def __init__(
        self,
        model: GPT,
        *,
        n_layer: int | None = None,
        allowed: Callable[[torch.Tensor], torch.Tensor] = lambda logits: logits,
        name: Hashable = None,
    ) -> None:
        self._model = model
        self._n_layer = n_layer
        self._allowed = allowed
        self._layers = len(model.transformer.h[:n_layer])
        self._name = ("draft", model, n_layer, name)
        self._most_rows: int | None = None

    def propose(self, asked: Sequence[Asked], k: Sequence[int], runner: Runner, cache: KVCache) -> list[Proposal]:
        """Drafts for some texts; nothing is read to the host.

        Args:
            asked: The texts, ordered by slot number.
            k: Tokens to draft for each text, at least 1.
            runner: Runs the steps.
            cache: The model's cache for all slots.
        """
        found: dict[int, Proposal] = {}
        together: dict[Hashable, list[int]] = {}
        for i, each in enumerate(asked):
            # A text with fewer tokens than its steps need rows is drafted alone.
            exact = exact_rows(each.sampler)
            alone = i if exact is not None and len(each.rows) < exact else None
            together.setdefault((each.sampler.batch_key, len(each.rows), tuple(each.pieces), alone), []).append(i)
        for own in together.values():
            first = asked[own[0]]
            most = 1
            if len(own) > 1:
                most = self._most_texts(len(first.rows), cache) if exact_rows(first.sampler) else len(cache.k[0])
            for members in neighbours([asked[i].number for i in own], most):
                chosen = [i for i in own if asked[i].number in members]
                if runner.compiles:
                    members = range(len(cache.k[0]))
                most_k = max(k[i] for i in chosen)
                tokens, q = self._together([asked[i] for i in chosen], most_k, runner, cache, members)
                for i in chosen:
                    at = asked[i].number - members.start
                    mine = None if q is None else Distribution(q.probs[at], None if q.ids is None else q.ids[at])
                    found[i] = Proposal(tokens[at, : k[i]], None if mine is None else mine.first(k[i]))
        return [found[i] for i in range(len(asked))]

    def prepare(
        self, sampler: Sampler, n_rows: int, runner: Runner, cache: KVCache, sizes: Sequence[int], max_length: int
    ) -> tuple[tuple[int, ...], bool]:
        """Builds the compiled steps that proposals for a text of `max_length` tokens need.

        Returns:
            Drafts per step (`pieces`), and whether a graph was built. Building writes to the end of the cache, which
            may have held a prompt.
        """
        before = len(runner)
        pieces = runner.pieces(sizes, self._layers)
        count = len(cache.k[0])
        for n in pieces:
            for kv_length in cache.buckets(max_length + max(pieces)):
                if self._key(sampler, n_rows, n, cache, kv_length) not in runner:
                    rows = torch.zeros(count, n_rows, dtype=torch.int64, device=cache.slots.device)
                    places = [cache.size - n_rows - n] * count
                    inputs = Inputs.stacked([sampler.inputs(rows.device, 0, n)] * count)
                    self._run(sampler, rows, places, inputs, n, runner, cache, kv_length)
        return pieces, len(runner) > before

    def _most_texts(self, rows: int, cache: KVCache) -> int:
        """The most texts, with `rows` rows each, whose drafts keep their bits in one forward."""
        if self._most_rows is None:
            count = len(cache.k[0]) * rows
            self._most_rows = class_limit(self._model, (rows,), min(count, MOST_ROWS))
        return max(1, self._most_rows // rows)

    def _together(
        self, asked: Sequence[Asked], k: int, runner: Runner, cache: KVCache, members: range
    ) -> tuple[torch.Tensor, Distribution | None]:
        """Drafts k tokens for neighbouring slots: (count, k), and their distributions."""
        buffers = cache.sequences(members.start, members.stop)
        device, sampler, r = cache.slots.device, asked[0].sampler, len(asked[0].rows)
        count = len(members)
        sizes = runner.split(k, asked[0].pieces)
        # Idle slots run too. They write to the end of their buffer, which no text uses.
        first = [[0] * r for _ in members]
        places = [cache.size - r - sum(sizes)] * count
        for each in asked:
            first[each.number - members.start], places[each.number - members.start] = each.rows, each.input_pos
        rows = torch.tensor(first, device=device)
        longest = max(each.input_pos for each in asked)
        found: list[tuple[torch.Tensor, Distribution | None]] = []
        done = 0
        for n in sizes:
            own = {each.number: each.sampler.inputs(device, each.input_pos + r + done, n) for each in asked}
            inputs = Inputs.stacked([own.get(number, own[asked[0].number]) for number in members])
            if found:
                inputs = inputs.after(torch.cat([tokens for tokens, _ in found], 1))
            at = [place + done for place in places]
            kv_length = buffers.bucket(longest + done + r + n - 1)
            found.append(self._run(sampler, rows, at, inputs, n, runner, buffers, kv_length))
            rows = torch.cat((rows, found[-1][0]), 1)[:, -r:].contiguous()  # graphs need fixed strides
            done += n
        if len(found) == 1:
            return found[0]
        q = [each for _, each in found if each is not None]
        return torch.cat([tokens for tokens, _ in found], 1), concatenate(q) if q else None

    def _key(self, sampler: Sampler, n_rows: int, n: int, cache: KVCache, kv_length: int) -> Hashable:
        return self._name, sampler.batch_key, n_rows, n, cache.shape, kv_length

    def _run(
        self,
        sampler: Sampler,
        rows: torch.Tensor,
        places: Sequence[int],
        inputs: Inputs,
        n: int,
        runner: Runner,
        cache: KVCache,
        kv_length: int,
    ) -> tuple[torch.Tensor, Distribution | None]:
        """n drafts of each text after `rows` (count, r), which begin at positions `places`."""
        model, n_layer, allowed = self._model, self._n_layer, self._allowed
        r, again = rows.size(1), exact_rows(sampler) is not None

        def draft(
            cache: KVCache, rows: torch.Tensor, input_pos: torch.Tensor, inputs: Inputs
        ) -> tuple[torch.Tensor, Distribution | None]:
            drawn: list[tuple[torch.Tensor, Distribution | None]] = []
            idx, place = rows, input_pos[:, 0]
            for i in range(n):
                logits = model.verify(idx, place, cache, kv_length=kv_length, n_layer=n_layer, last=1)
                drawn.append(sampler.draw(allowed(logits[:, 0]), inputs.row(i, [token for token, _ in drawn])))
                token = drawn[-1][0].unsqueeze(1)
                idx, place = (torch.cat((idx[:, 1:], token), 1) if again else token), input_pos[:, i + 1]
            q = [
                Distribution(each.probs.unsqueeze(1), None if each.ids is None else each.ids.unsqueeze(1))
                for _, each in drawn
                if each is not None
            ]
            return torch.stack([token for token, _ in drawn], 1), concatenate(q) if q else None

        # Position of each step's first row. It advances by one per step; steps of one row skip the first r - 1 rows.
        step = 0 if again else r - 1
        if len(places) == 1:  # a view, which avoids a copy to the device
            after = cache.slots[places[0] + step + 1 : places[0] + step + n + 1]
            input_pos = torch.cat((cache.slots[places[0] : places[0] + 1], after)).unsqueeze(0)
        else:
            input_pos = torch.tensor(
                [[place, *range(place + step + 1, place + step + n + 1)] for place in places], device=rows.device
            )
        key = self._key(sampler, r, n, cache, kv_length) if runner.compiles else None
        return runner.run(key, draft, cache, rows, input_pos, inputs)
