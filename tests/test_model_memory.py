"""A long context costs its keys and values and little else. Bytes are those that PyTorch's allocator gave out."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path

import litgpt.model
import pytest
import torch
from families import model_of
from litgpt.config import Config

from litspec.model import GPT

SCRIPT = Path(__file__).parents[1] / "scripts" / "bench_forward.py"


@pytest.fixture(scope="module")
def peak_bytes() -> Callable[[Callable[[], object]], int]:
    """The benchmark's measurement of peak additional memory."""
    spec = importlib.util.spec_from_file_location("bench_forward", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["bench_forward"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module.peak_bytes


def toy(**changes: object) -> Config:
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "n_query_groups": 2, "intermediate_size": 128}
    return Config.from_name("SmolLM2-135M", **sizes | {"head_size": 16, "block_size": 131072, **changes})


def test_the_measure_sees_what_is_allocated_and_given_back(peak_bytes: Callable) -> None:
    def call() -> torch.Tensor:
        for _ in range(3):
            held = torch.zeros(2**20, dtype=torch.uint8)
            del held
        return torch.zeros(2**19, dtype=torch.uint8)

    assert 2**20 <= peak_bytes(call) < 2**20 + 2**19


@pytest.mark.parametrize("windows", [None, 4096])
def test_a_cache_of_131072_positions_costs_its_keys_and_values(peak_bytes: Callable, windows: int | None) -> None:
    model = GPT(toy(vocab_size=128, padded_vocab_size=128, sliding_window_size=windows))
    made = []
    peak = peak_bytes(lambda: made.append(model.make_cache(131072)))
    kv_bytes = sum(buffer.nbytes for buffer in made[0].k + made[0].v)
    assert kv_bytes <= 2 * 2 * 2 * 16 * 4 * (131072 + 512)  # layers, K and V, groups, head size, bytes, slots
    assert peak <= kv_bytes + 64 * 2**20


@pytest.mark.slow
@torch.inference_mode()
def test_reading_4096_tokens_takes_at_most_a_quarter_of_litgpts_memory(peak_bytes: Callable) -> None:
    config = toy(block_size=4096)
    assert config.padded_vocab_size == 49152
    theirs = litgpt.model.GPT(config)
    ours = GPT(config)
    ours.load_state_dict(theirs.state_dict(), assign=True)
    theirs.set_kv_cache(batch_size=1)
    cache = ours.make_cache(4096)
    idx = torch.randint(49152, (1, 4096), generator=torch.Generator().manual_seed(0))
    litgpts = peak_bytes(lambda: theirs(idx, torch.arange(4096), 4096))
    assert litgpts >= 4096 * 49152 * 4  # the logits alone
    assert peak_bytes(lambda: ours.prefill(idx, cache)) <= litgpts / 4


@torch.inference_mode()
def test_memory_beyond_keys_and_values_grows_by_no_more_than_a_chunks_mask(peak_bytes: Callable) -> None:
    model = GPT(toy(vocab_size=128, padded_vocab_size=128))
    idx = torch.randint(128, (1, 4096), generator=torch.Generator().manual_seed(0))
    peaks = []
    for length in (1024, 4096):
        cache = model.make_cache(length)
        peaks.append(peak_bytes(lambda length=length, cache=cache: model.prefill(idx[:, :length], cache)))
    # Mask, and two booleans on the way to it, for 512 rows over 3,072 more slots.
    assert peaks[1] - peaks[0] <= 512 * (4096 - 1024) * (4 + 1 + 1)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama-3", "gemma-3", "latent"])
def test_a_compiled_step_does_not_copy_the_cache(peak_bytes: Callable, name: str) -> None:
    model = model_of(name)
    model.fix_shapes()
    cache = model.make_cache(3000, powers_of_two=True)
    compiled = torch.compile(model.verify, fullgraph=True, dynamic=False)
    args = torch.zeros(1, 4, dtype=torch.int64), torch.tensor([100]), cache
    compiled(*args, kv_length=256)
    smallest = min(buffer.numel() * buffer.element_size() for buffer in (*cache.k, *cache.v))
    assert peak_bytes(lambda: compiled(*args, kv_length=256)) < smallest / 2
