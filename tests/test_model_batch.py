"""A text in a batch has the logits that it has alone, to the bit, at a position of its own."""

from __future__ import annotations

import pytest
import torch
from families import FAMILIES, VOCAB, model_of

DTYPES = (torch.float32, torch.bfloat16)
POSITIONS = (1, 59, 300, 1090)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_text_in_a_batch_has_the_logits_that_it_has_alone(name: str, dtype: torch.dtype) -> None:
    model = model_of(name, dtype)
    texts = torch.randint(VOCAB, (len(POSITIONS), 1100), generator=torch.Generator().manual_seed(3))
    together = model.make_cache(1100, batch_size=len(POSITIONS))
    alone = [model.make_cache(1100) for _ in POSITIONS]
    for b, position in enumerate(POSITIONS):
        # Each into its own sequence of the shared buffers.
        model.prefill(texts[b : b + 1, :position], together.sequences(b, b + 1))
        model.prefill(texts[b : b + 1, :position], alone[b])
    for first, end in ((0, 4), (1, 3)):
        for width in (4, 8):
            at = torch.tensor(POSITIONS[first:end])
            idx = torch.stack([texts[b, p : p + width] for b, p in enumerate(POSITIONS)])[first:end]
            kv_length = together.bucket(max(POSITIONS[first:end]) + width)
            got = model.verify(idx, at, together.sequences(first, end), kv_length=kv_length)
            for i, b in enumerate(range(first, end)):
                tight = together.bucket(POSITIONS[b] + width)
                want = model.verify(idx[i : i + 1], at[i : i + 1], alone[b], kv_length=tight)
                assert torch.equal(got[i], want[0]), f"text {b} of {first} to {end}, {width} rows"
    for buffers in (lambda cache: cache.k, lambda cache: cache.v):
        for layer, buffer in enumerate(buffers(together)):
            for b, position in enumerate(POSITIONS):
                own = buffers(alone[b])[layer][0, :, : position + 8]
                assert torch.equal(buffer[b, :, : position + 8], own), f"layer {layer}, text {b}"


@pytest.mark.parametrize("name", FAMILIES)
def test_an_idle_sequence_out_of_every_window_stays_finite(name: str) -> None:
    # It runs in the last places of its buffer, of which a short forward reads none; a later text may reach them.
    model = model_of(name)
    cache = model.make_cache(200, width=16, batch_size=2)
    idle = cache.size - 8
    model.verify(torch.zeros(2, 8, dtype=torch.int64), torch.tensor([10, idle]), cache, kv_length=cache.bucket(18))
    for buffer in (*cache.k, *cache.v):
        assert buffer.isfinite().all()
        assert not buffer[1, :, idle:].eq(0).all()
