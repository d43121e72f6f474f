"""How many texts to run at the same time: limited by memory, and by the point where more texts gain no speed."""

from __future__ import annotations

import os
import time
from collections import Counter
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING

import torch

from litspec.engine.costs import Trial
from litspec.engine.runner import Runner
from litspec.engine.target import PREFILL_CHUNK, Placed, Slots
from litspec.model import GPT
from litspec.model.kv_cache import kv_bucket
from litspec.sampling import Greedy, Sampling

if TYPE_CHECKING:
    from litspec.drafters.base import Drafter

# Share of the free memory that texts may take. Main memory is shared with other processes.
CPU_SHARE, GPU_SHARE = 0.5, 0.9
# Batch sizes are tried in powers of two, up to this size and for at most this many seconds.
MOST_SLOTS, SECONDS = 64, 5.0
# Per id and row, when tokens are drawn from all ids: probabilities of target and draft, and the residual distribution.
DENSE_BYTES = 24
# A batch size is good enough if the cost per text is at most this factor times the lowest.
GOOD_ENOUGH = 1.05


def cache_bytes(model: GPT, slots: int, positions: int) -> Counter[torch.device]:
    """Bytes of the keys and values of some slots, by device.

    Args:
        model: The model.
        slots: Number of slots.
        positions: Positions per slot, including those for rejected proposals.
    """
    size, found = kv_bucket(positions), Counter[torch.device]()
    itemsize = model.transformer.wte.weight.element_size()
    for block in model.transformer.h:
        batch, groups, places, head = block.attn.cache_shape(slots, size)
        found[next(block.parameters()).device] += 2 * batch * groups * places * head * itemsize
    return found


def memory(
    placed: Placed, drafter: Drafter | None, slots: int, max_length: int, *, dense: bool = True
) -> Counter[torch.device]:
    """Bytes that some texts need in addition to the weights, by device: keys and values, and the largest forward.

    Args:
        placed: The target.
        drafter: The drafter; None for plain decoding.
        slots: Texts at the same time.
        max_length: Tokens of the longest text.
        dense: Whether tokens are drawn from all ids, so that the probabilities of all ids are stored. Otherwise
            sampling is greedy or uses `top_k`.
    """
    model, config = placed.model, placed.model.config
    width = placed.verify_width
    found = cache_bytes(model, slots, max_length + 2 * width)
    itemsize = model.transformer.wte.weight.element_size()
    vocab_size, wide = config.padded_vocab_size, max(config.intermediate_size, config.n_embd)
    rows = slots * width
    per_id = itemsize + (DENSE_BYTES if dense else 4 * (itemsize < 4))
    verifying = rows * (vocab_size * per_id + 3 * wide * itemsize)
    found[placed.device] += slots * vocab_size * itemsize  # logits after each prompt
    chunk = min(PREFILL_CHUNK, max_length)
    # Two MLP activations, the residual stream, queries, keys and values; the attention mask and its intermediates.
    reading = chunk * (2 * wide + 6 * config.n_embd) * itemsize + chunk * kv_bucket(max_length) * (itemsize + 2)
    found[placed.device] += max(verifying, reading)
    if drafter is not None:
        found[placed.device] += slots * drafter.memory(max_length)
    return found


def slots_that_fit(placed: Placed, drafter: Drafter | None, max_length: int) -> int:
    """The most texts of `max_length` tokens that fit in the free memory, at least 1."""
    free = {device: _free_bytes(device) for device in memory(placed, drafter, 1, max_length)}

    def fits(slots: int) -> bool:
        return all(need <= free[device] for device, need in memory(placed, drafter, slots, max_length).items())

    fitting, too_many = 1, 2
    while too_many <= MOST_SLOTS * MOST_SLOTS and fits(too_many):
        fitting, too_many = too_many, 2 * too_many
    while too_many - fitting > 1:
        middle = (fitting + too_many) // 2
        fitting, too_many = (middle, too_many) if fits(middle) else (fitting, middle)
    return fitting


def slots_that_pay(placed: Placed, most: int = MOST_SLOTS) -> int:
    """The smallest batch size with nearly the lowest cost per text, measured with verifications of medium width.

    Args:
        placed: The target.
        most: Largest batch size to try.
    """
    if placed.runner.compiles and is_dataclass(placed):
        placed = replace(placed, runner=Runner())  # each batch size would need a graph
    target = Slots(placed, 1, 64).sessions[0]
    rows = target.rows_for(target.verify_width // 2)
    prompt = [i * 7919 % placed.model.config.padded_vocab_size for i in range(16)]
    spent, each = 0.0, {}
    count = 1
    while count <= most and spent < SECONDS:
        trial = Trial(Slots(placed, count, 64), None, Greedy(Sampling(0)), prompt, (), count)
        seconds = []
        for _ in range(3):
            start = time.perf_counter()
            trial.verify(rows)
            seconds.append(time.perf_counter() - start)
        # Ranks that generate texts together must take the same decision, so all use one rank's clock.
        shortest, taken = (placed.share_int(int(1e9 * value)) / 1e9 for value in (min(seconds), sum(seconds)))
        each[count], spent = shortest / count, spent + taken
        if count > 2 and each[count] > each[count // 2] * 0.98 > each[count // 4] * 0.96:
            break  # doubling twice gained nothing
        count *= 2
    return min(count for count, seconds in each.items() if seconds <= GOOD_ENOUGH * min(each.values()))


def _free_bytes(device: torch.device) -> float:
    if device.type == "cuda":
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return GPU_SHARE * (torch.cuda.mem_get_info(device)[0] + cached)
    return CPU_SHARE * _free_memory()


def _free_memory() -> int:
    """Bytes of main memory that are free or can be reclaimed."""
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            lines = dict(line.split(":", 1) for line in file)
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError, ValueError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2
