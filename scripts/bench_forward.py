"""Time and memory of one forward, beside LitGPT's `GPT` with the same weights in the same process.

    python scripts/bench_forward.py                 every row
    python scripts/bench_forward.py --rows smollm   only rows whose name contains the word

Times are medians of 20 runs after a warm-up, the two models taking turns. LitGPT runs as its own generate loop runs it:
cached, with `input_pos_maxp1` given. Ours reads the K/V bucket that covers the rows. A ratio above 1 means that ours is
faster (or lighter). The bar is what the project asks of itself; the last column says whether the row keeps it.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import litgpt.model
import torch
from litgpt.config import Config
from torch.profiler import ProfilerActivity, profile

from litspec.model import GPT
from litspec.model.packed import pack

RUNS = 20
DTYPES = (torch.float32, torch.bfloat16)

LLAMA = {
    "rotary_percentage": 1.0,
    "parallel_residual": False,
    "bias": False,
    "norm_class_name": "RMSNorm",
    "mlp_class_name": "LLaMAMLP",
}
SHAPES = {
    "llama-3-8b, 2 layers": Config(
        n_layer=2, n_embd=4096, n_head=32, n_query_groups=8, intermediate_size=14336, padded_vocab_size=1024,
        vocab_size=1024, block_size=4352, **LLAMA,
    ),
    "smollm2-135m": Config.from_name("SmolLM2-135M"),
    "5m parameters": Config(
        n_layer=16, n_embd=160, n_head=5, n_query_groups=1, intermediate_size=384, padded_vocab_size=2048,
        vocab_size=2048, block_size=1024, **LLAMA,
    ),
    "mixtral-shaped, 4 layers": Config(
        n_layer=4, n_embd=512, n_head=8, n_query_groups=2, intermediate_size=1024, padded_vocab_size=1024,
        vocab_size=1024, block_size=1024, n_expert=8, n_expert_per_token=2, moe_intermediate_size=1024,
        **LLAMA | {"mlp_class_name": "LLaMAMoE"},
    ),
    "qwen3-moe-shaped, 4 layers": Config(
        n_layer=4, n_embd=512, n_head=8, n_query_groups=2, intermediate_size=1024, padded_vocab_size=1024,
        vocab_size=1024, block_size=1024, n_expert=64, n_expert_per_token=8, moe_intermediate_size=192,
        **LLAMA | {"mlp_class_name": "LLaMAMoE"},
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Row:
    """One comparison: a shape, the position of the first row, rows per forward, and the ratio it should reach."""

    shape: str
    position: int
    width: int
    dtype: torch.dtype
    bar: float | None


ROWS = (
    *(Row("llama-3-8b, 2 layers", 4000, width, dtype, 1.5) for width in (1, 5) for dtype in DTYPES),
    *(Row("smollm2-135m", 200, width, torch.float32, 1.1) for width in (1, 5)),
    *(Row("smollm2-135m", 4000, width, torch.float32, 1.3) for width in (1, 5)),
    *(Row("5m parameters", 300, width, torch.float32, 1.5) for width in (1, 5)),
    *(Row("mixtral-shaped, 4 layers", 300, width, torch.float32, None) for width in (1, 5, 8)),
    *(Row("qwen3-moe-shaped, 4 layers", 300, width, torch.float32, None) for width in (1, 5, 8)),
)  # fmt: skip


def models(config: Config, dtype: torch.dtype, rows: int = 1) -> tuple[litgpt.model.GPT, GPT]:
    """LitGPT's model and ours, laid out for `rows` rows as when loading, over one set of random weights."""
    torch.manual_seed(0)
    config.block_size = min(config.block_size, 4352)
    theirs = litgpt.model.GPT(config).to(dtype).eval()
    with torch.device("meta"):
        ours = GPT(config)
    ours.load_state_dict(theirs.state_dict(), assign=True)
    pack(ours, rows)
    return theirs, ours.eval()


def taking_turns(*calls: Callable[[], object]) -> list[float]:
    """Median seconds of each call over `RUNS` rounds in which all of them run once."""
    for call in calls:
        for _ in range(3):
            call()
    seconds: list[list[float]] = [[] for _ in calls]
    for _ in range(RUNS):
        for call, times in zip(calls, seconds):
            start = time.perf_counter()
            call()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


@torch.inference_mode()
def compare(row: Row) -> tuple[float, float]:
    """Seconds of LitGPT's forward and of ours."""
    theirs, ours = models(SHAPES[row.shape], row.dtype, row.width)
    length = row.position + row.width
    theirs.max_seq_length = length
    theirs.set_kv_cache(batch_size=1, dtype=row.dtype)
    cache = ours.make_cache(length)
    for block, k, v in zip(theirs.transformer.h, cache.k, cache.v):
        kv = block.attn.kv_cache
        kv.k.normal_(), kv.v.normal_()
        k[:, :, :length], v[:, :, :length] = kv.k, kv.v
    idx = torch.randint(theirs.config.vocab_size, (1, row.width))
    positions, first = torch.arange(row.position, length), torch.tensor([row.position])
    kv_length = cache.bucket(length)
    want, got = theirs(idx, positions, length), ours.verify(idx, first, cache, kv_length=kv_length)
    tolerance = 1e-3 if row.dtype == torch.float32 else 0.1
    assert (want - got).abs().max() < tolerance * want.abs().max(), "the two models disagree"
    return taking_turns(
        lambda: theirs(idx, positions, length), lambda: ours.verify(idx, first, cache, kv_length=kv_length)
    )


def peak_bytes(call: Callable[[], object]) -> int:
    """Most memory that tensors held at once during a call, beyond what was there before (PyTorch's own allocator)."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        call()
    held = peak = 0
    for event in prof.profiler.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            peak = max(peak, held)
    return peak


@torch.inference_mode()
def prefill_memory(tokens: int = 4096, vocab_size: int = 49152) -> tuple[int, int]:
    """Peak extra bytes of reading a prompt in LitGPT and here; K/V are allocated before."""
    config = Config(
        n_layer=2, n_embd=576, n_head=9, n_query_groups=3, intermediate_size=1536, padded_vocab_size=vocab_size,
        vocab_size=vocab_size, block_size=tokens, **LLAMA,
    )  # fmt: skip
    theirs, ours = models(config, torch.float32)
    theirs.set_kv_cache(batch_size=1)
    cache = ours.make_cache(tokens)
    idx = torch.randint(vocab_size, (1, tokens))
    positions = torch.arange(tokens)
    return peak_bytes(lambda: theirs(idx, positions, tokens)), peak_bytes(lambda: ours.prefill(idx, cache))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rows", default="", help="only rows whose name contains this")
    parser.add_argument("--threads", type=int, default=None, help="threads of PyTorch's operators")
    args = parser.parse_args()
    if args.threads:
        torch.set_num_threads(args.threads)
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, medians of {RUNS}")
    print(f"{'shape':28} {'position':>8} {'W':>2} {'dtype':8} {'litgpt ms':>10} {'ours ms':>8} {'ratio':>6} {'bar':>5}")
    for row in (row for row in ROWS if args.rows in row.shape):
        theirs, ours = compare(row)
        ratio = theirs / ours
        verdict = "" if row.bar is None else f"{row.bar:5.2f} {'kept' if ratio >= row.bar else 'MISSED'}"
        dtype = str(row.dtype).removeprefix("torch.")
        print(
            f"{row.shape:28} {row.position:8} {row.width:2} {dtype:8} {theirs * 1e3:10.2f} {ours * 1e3:8.2f} "
            f"{ratio:6.2f} {verdict}",
            flush=True,
        )
    if args.rows in "prefill memory":
        theirs, ours = prefill_memory()
        ratio = theirs / ours
        print(
            f"prefill of 4,096 tokens, vocabulary 49,152: peak extra {theirs / 2**20:.0f} MiB in litgpt, "
            f"{ours / 2**20:.0f} MiB here, ratio {ratio:.1f}, bar 4.0 {'kept' if ratio >= 4 else 'MISSED'}"
        )


if __name__ == "__main__":
    main()
