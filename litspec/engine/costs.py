"""The cost of a draft and of a verification on this machine: measured once, or computed from a cost model."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import torch

from litspec.drafters.autoregressive import step_bytes
from litspec.drafters.base import Proposal
from litspec.drafters.speculative_k import FixedK, RoundCosts, pieces_of
from litspec.engine.rows import distinct_blocks
from litspec.engine.sequence import Text
from litspec.engine.speculate import Slot, prepare, propose, verify
from litspec.engine.target import Placed, Slots
from litspec.model import GPT
from litspec.stopping import StopTokens

if TYPE_CHECKING:
    from litspec.drafters.base import Drafter
    from litspec.sampling import Sampler


@dataclass(frozen=True)
class Machine:
    """Cost model of a kind of device: rough constants, equal in every run.

    Attributes:
        layer: Seconds per layer, without reading its weights.
        byte: Seconds to read a byte of weights.
        row: Cost of each additional row, as a fraction of the time to read the weights.
        token: Seconds to choose a token.
    """

    layer: float
    byte: float
    row: float
    token: float


CPU = Machine(layer=2.4e-4, byte=4.5e-11, row=0.12, token=2e-4)
# For 16-bit weights: a byte costs more, but a product of a few rows costs about the same as one row.
CPU_16 = Machine(layer=3e-4, byte=6e-11, row=0.02, token=2.4e-4)
GPU = Machine(layer=1e-4, byte=1e-12, row=0.0, token=1e-4)


def modelled(placed: Placed, drafter: Drafter, most: int) -> RoundCosts:
    """Costs computed from bytes and layers.

    They depend only on the models and the kind of device. The placement and the measured row counts do not change them.

    Args:
        placed: The target.
        drafter: The drafter.
        most: Largest k.
    """
    machine = GPU
    if placed.device.type == "cpu":
        machine = CPU if next(placed.model.parameters()).dtype is torch.float32 else CPU_16
    rows = placed.runner.rows(range(1, most + 2))
    weight_bytes, n_layer = step_bytes(placed.model), placed.model.config.n_layer
    draft, verify = [], []
    for k in range(most + 1):
        cost = drafter.cost(k)
        chosen = machine.token * k if cost.layers else 0.0
        draft.append(cost.layers * machine.layer + cost.weight_bytes * machine.byte + chosen)
        width = next(n for n in rows if n > k)
        reading = weight_bytes * machine.byte * (1 + machine.row * (width - 1))
        verify.append(n_layer * machine.layer + reading + machine.token)
    return RoundCosts(tuple(draft), tuple(verify))


class Trial:
    """Texts whose drafts and verifications can be run repeatedly for timing. Each run ends with a read to the host.

    Args:
        slots: Slots of the target; they hold no other text.
        drafter: The drafter; None for plain decoding.
        sampler: How tokens are chosen.
        prompt: Token ids of the texts so far, at least two.
        pieces: Lengths of which every proposal is a sum.
        count: Number of texts; they use the first slots.
    """

    def __init__(
        self,
        slots: Slots,
        drafter: Drafter | None,
        sampler: Sampler,
        prompt: Sequence[int],
        pieces: Sequence[int],
        count: int = 1,
    ) -> None:
        self._slots = slots
        self._prompt = list(prompt)
        self._texts: list[Slot] = []
        with torch.inference_mode():
            for target in slots.sessions[:count]:
                draft = drafter.start(target, slots.max_length, sampler) if drafter is not None else None
                choose_k = FixedK(max(pieces, default=0))
                choose_k.pieces = tuple(pieces)
                text = Text(len(prompt) - 1, slots.max_length, StopTokens())
                slot = Slot(text, target, drafter, draft, sampler, choose_k)
                prepare(slot, slots)
                # The last token is the target's own: `prefill` commits it to the drafter, unlike prompt[-1].
                text.commit(slot.prefill(prompt[:-1], slots, None)[1] or [])
                self._texts.append(slot)

    @torch.inference_mode()
    def verify(self, rows: int) -> None:
        """Verifies a proposal of `rows - 1` tokens for each text."""
        device = self._slots.placed.device
        tokens = torch.tensor((self._prompt * rows)[: rows - 1], dtype=torch.int64, device=device)
        self._slots.placed.runner.begin_round()
        verify(self._texts, {slot.number: Proposal(tokens) for slot in self._texts}, self._slots).packed.tolist()

    @torch.inference_mode()
    def draft(self, k: int) -> None:
        """Proposes k tokens for each text."""
        self._slots.placed.runner.begin_round()
        for slot in self._texts:
            slot.speculative_k = k
        for proposal in propose(self._texts, self._slots.placed.device).values():
            proposal.tokens.tolist()

    def close(self) -> None:
        """Ends the texts and frees their slots."""
        for slot in self._texts:
            if slot.draft is not None:
                slot.draft.close()
            slot.target.forget()


# Repetitions of each measurement. The shortest time is used, since disturbances only make it longer.
TURNS = 5
# Turns in which steps with one and with all threads are timed.
THREAD_TURNS = 3


def timed(slots: Slots, drafter: Drafter, most: int, sampler: Sampler, count: int = 1) -> RoundCosts:
    """Costs measured on artificial texts, with drafts and verifications interleaved.

    Args:
        slots: Slots of the target; they hold no text.
        drafter: The drafter.
        most: Largest k.
        sampler: How tokens are chosen.
        count: Texts in a round.
    """
    target = slots.sessions[0]
    size = max(2, min(16, slots.max_length - most - 2))
    prompt = [i * 7919 % target.config.padded_vocab_size for i in range(size)]
    widths = sorted({target.rows_for(k) for k in range(most + 1)})
    if len(widths) > 4:  # the others are interpolated
        widths = [widths[0], widths[1], widths[len(widths) // 2], widths[-1]]
    ks = sorted({1, most}) if drafter.cost(1).layers else []
    trial = Trial(slots, drafter if ks else None, sampler, prompt, pieces_of(most), count)
    seconds: dict[tuple[str, int], float] = {}
    for turn in range((TURNS if count == 1 else TURNS // 2) + 1):
        for name, part, sizes in (("verify", trial.verify, widths), ("draft", trial.draft, ks)):
            for size in sizes:
                began = time.perf_counter()
                part(size)
                taken = time.perf_counter() - began
                if turn:  # the first warms up
                    seconds[name, size] = min(seconds.get((name, size), taken), taken)
    trial.close()
    of_rows = _between([(width, seconds["verify", width]) for width in widths])
    of_drafts = _between([(0, 0.0), *((k, seconds["draft", k]) for k in ks)])
    return RoundCosts(
        tuple(of_drafts(k) for k in range(most + 1)),
        tuple(of_rows(target.rows_for(k)) for k in range(most + 1)),
    )


def _between(points: Sequence[tuple[int, float]]) -> Callable[[int], float]:
    """Linear interpolation between some points."""

    def at(x: int) -> float:
        for (x0, y0), (x1, y1) in itertools.pairwise(points):
            if x <= x1 and x1 > x0:
                return y0 + max(0.0, y1 - y0) * (x - x0) / (x1 - x0)
        return points[-1][1]

    return at


# Users get the advice if a step with all threads takes at least this many times as long as with one thread.
MUCH_SLOWER = 1.5


@torch.inference_mode()
def thread_advice(model: GPT, width: int) -> str | None:
    """A sentence for the user if steps are much faster with one thread on this CPU, else None.

    This happens with small models, or if other processes use the cores, since the threads of an operator wait for each
    other. Only the model's first layers are timed, since later layers are equal.

    Args:
        model: The target, on one CPU.
        width: Rows of a step.
    """
    threads = torch.get_num_threads()
    size = min(width, model.config.block_size)
    cache = model.make_cache(size, width=size)
    rows, position = torch.zeros(1, size, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
    seconds: dict[int, list[float]] = {threads: [], 1: []}
    try:
        for _ in range(THREAD_TURNS):
            for n, taken in seconds.items():
                torch.set_num_threads(n)
                for _ in range(2):  # the first call after a change starts threads
                    began = time.perf_counter()
                    model.verify(rows, position, cache, n_layer=distinct_blocks(model))
                    last = time.perf_counter() - began
                taken.append(last)
    finally:
        torch.set_num_threads(threads)
    ratio = median(seconds[threads]) / median(seconds[1])
    if ratio < MUCH_SLOWER:
        return None
    return f"Steps are {ratio:.1f} times as fast with one thread as with torch's {threads} now; try --threads 1."
