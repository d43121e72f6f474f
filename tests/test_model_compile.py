"""For one width and one K/V bucket `verify` is one graph; after a warm-up over the buckets nothing is compiled."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from families import VOCAB, model_of
from torch._dynamo.utils import counters

WIDTH = 4


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    yield
    torch._dynamo.reset()


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


# One of each kind of layer.
@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-3", "gemma-2", "gemma-3", "qwen-3-moe", "pythia", "falcon", "latent"])
def test_every_familys_verify_is_one_graph(name: str) -> None:
    model, as_it_is = model_of(name), model_of(name)
    model.fix_shapes()
    cache, eager_cache = model.make_cache(100), as_it_is.make_cache(100)
    idx = torch.randint(VOCAB, (1, WIDTH), generator=torch.Generator().manual_seed(0))
    compiled = torch.compile(model.verify, fullgraph=True, dynamic=False, backend="eager")
    for at in (0, 17, 60):
        got = compiled(idx, torch.tensor([at]), cache, kv_length=64)
        want = as_it_is.verify(idx, torch.tensor([at]), eager_cache, kv_length=64)
        torch.testing.assert_close(got, want, atol=1e-5, rtol=0)
    assert graphs() == 1


@pytest.mark.slow
def test_buckets_are_built_at_warm_up_and_none_later() -> None:
    model = model_of("llama-3")
    compiled = torch.compile(model.verify, fullgraph=True, dynamic=False, backend="aot_eager")
    cache = model.make_cache(600, powers_of_two=True)
    buckets = cache.buckets(600 + WIDTH)
    assert buckets == sorted({cache.bucket(length) for length in range(1, 601 + WIDTH)}) == [512, 1024]
    idx = torch.zeros(1, WIDTH, dtype=torch.int64)
    for kv_length in buckets:
        compiled(idx, torch.tensor([0]), cache, kv_length=kv_length)
    assert graphs() == len(buckets)
    for session in (cache, model.make_cache(600, powers_of_two=True)):
        for at in (0, 3, 59, 61, 130, 257, 480):
            compiled(idx + at % VOCAB, torch.tensor([at]), session, kv_length=session.bucket(at + WIDTH))
    assert graphs() == len(buckets)


@pytest.mark.slow
def test_the_compiled_graph_keeps_a_rows_bits_and_computes_the_eager_logits() -> None:
    model = model_of("llama-3")
    compiled = torch.compile(model.verify, fullgraph=True, dynamic=False)
    cache, eager_cache = model.make_cache(60), model.make_cache(60)
    text = torch.randint(VOCAB, (1, 60), generator=torch.Generator().manual_seed(0))
    rows = []
    for session in (cache, eager_cache):
        model.prefill(text[:, :36], session)
    # The first block gives all keys that later ones may overwrite the same origin.
    for start in (36, 40, 38, 37):
        idx = text[:, start : start + WIDTH].clone()
        idx[0, 41 - start :] = 7  # junk behind the row at position 40
        got = compiled(idx, torch.tensor([start]), cache, kv_length=64)
        want = model.verify(idx, torch.tensor([start]), eager_cache, kv_length=64)
        torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
        rows.append(got[0, (40 - start) % WIDTH])
    assert graphs() == 1
    assert torch.equal(rows[1], rows[2])
    assert torch.equal(rows[1], rows[3])
