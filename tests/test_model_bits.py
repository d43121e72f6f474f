"""A row's logits have the same bits at every place in a block, for any other rows and any number of masked slots."""

from __future__ import annotations

import copy

import litgpt.model
import pytest
import torch
from families import FAMILIES, VOCAB, model_of, randomise
from litgpt.config import Config
from torch.nn.attention import SDPBackend, sdpa_kernel

from litspec.model import GPT, kv_bucket, packed
from litspec.model.mlp import activate, build_mlp

WIDTHS = (2, 4, 5, 8, 16)
DTYPES = (torch.float32, torch.bfloat16)
# Before, across and after the end of every K/V bucket up to 2,048.
# Each width takes every third of them, shifted, to keep the suite short; 1 runs them all (and all of them hold).
STRIDE = 3
POSITIONS = (61, 65, 125, 253, 385, 449, 509, 513, 1021, 1530, 1537, 2020)


def assert_rows_keep_their_bits(model: GPT, positions: tuple[int, ...] = POSITIONS) -> None:
    """Verify the row at each position first, in the middle and last in a block, with the text and with junk behind."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCAB, (max(positions) + 32,), generator=generator)
    cache = model.make_cache(max(positions), width=32)
    model.prefill(text[None], cache)
    for shift, width in enumerate(WIDTHS):
        # From right to left, and in each place the text's own rows last: what was written behind a row is masked for
        # all that follow, and what lies before it is always the text.
        for position in reversed(positions[shift % STRIDE :: STRIDE]):
            model.verify(text[None, position - width : position], torch.tensor([position - width]), cache)
            tight = kv_bucket(position + width)
            logits = {}
            for kv_length in {tight, cache.bucket(tight + 1), cache.size}:
                for row in (width - 1, width // 2, 0):
                    for junk in (True, False):
                        rows = text[position - row : position - row + width].clone()
                        if junk:
                            rows[row + 1 :] = torch.randint(VOCAB, (width - row - 1,), generator=generator)
                        first = torch.tensor([position - row])
                        logits[kv_length, row, junk] = model.verify(rows[None], first, cache, kv_length=kv_length)[
                            0, row
                        ]
            want = logits[tight, 0, True]
            moved = {
                where: (got - want).abs().max().item() for where, got in logits.items() if not torch.equal(got, want)
            }
            assert not moved, f"width {width}, position {position}: (kv_length, row, junk) -> off by {moved}"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_keeps_its_bits_in_a_block_of_many_rows(name: str, width: int = 72) -> None:
    """Such a block is as long as a chunk of a prompt, but is not run as one."""
    model = model_of(name, torch.float32)
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(VOCAB, (400,), generator=generator)
    cache = model.make_cache(300, width=width)
    position = 200
    model.prefill(text[None, :position], cache)
    model.verify(text[None, position - width : position], torch.tensor([position - width]), cache)
    found = []
    for row in (0, 5, width // 2, width - 1):
        rows = text[position - row : position - row + width].clone()
        rows[row + 1 :] = torch.randint(VOCAB, (width - row - 1,), generator=generator)
        found.append(model.verify(rows[None], torch.tensor([position - row]), cache)[0, row])
    assert all(torch.equal(logits, found[0]) for logits in found[1:])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_a_row_keeps_its_bits_in_every_family(name: str, dtype: torch.dtype) -> None:
    assert_rows_keep_their_bits(model_of(name, dtype))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "groups", "head_size"), [(9, 3, 64), (8, 1, 128), (2, 2, 256)])
def test_a_row_keeps_its_bits_at_real_head_sizes(heads: int, groups: int, head_size: int, dtype: torch.dtype) -> None:
    config = Config.from_name(
        "SmolLM2-135M",
        n_layer=2,
        n_embd=576,
        n_head=heads,
        n_query_groups=groups,
        head_size=head_size,
        intermediate_size=1536,
        vocab_size=VOCAB,
        padded_vocab_size=VOCAB,
    )
    reference = litgpt.model.GPT(config)
    randomise(reference, torch.Generator().manual_seed(0))
    model = GPT(config)
    model.load_state_dict(reference.state_dict())
    assert_rows_keep_their_bits(model.to(dtype), positions=(125, 385, 509, 1021, 2020))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["llama-3", "pythia", "latent", "mixtral"])
def test_packed_layers_keep_a_rows_bits_and_compute_the_same(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = torch.randint(VOCAB, (1, 20), generator=torch.Generator().manual_seed(0))
    as_they_were = model_of(name, dtype)
    want = as_they_were.prefill(text, as_they_were.make_cache(20))
    model = copy.deepcopy(as_they_were)
    monkeypatch.setattr(packed, "GAINS", dict.fromkeys(DTYPES, (1, 1)))
    packed.pack(model, 8)
    layers = [m for m in model.modules() if isinstance(m, torch.nn.Linear | packed.PackedLinear)]
    assert all(isinstance(layer, packed.PackedLinear) for layer in layers) and len(layers) > 8
    close = dict(atol=1e-4, rtol=0) if dtype == torch.float32 else dict(atol=0.05, rtol=0.05)
    torch.testing.assert_close(model.prefill(text, model.make_cache(20)), want, **close)
    assert_rows_keep_their_bits(model, positions=(125, 385, 509, 1021, 2020))


@pytest.mark.parametrize(
    ("dtype", "rows", "gains"), [(torch.float32, 8, True), (torch.float32, 2, False), (torch.bfloat16, 1, True)]
)
def test_only_layers_that_gain_are_packed(
    dtype: torch.dtype, rows: int, gains: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "GAINS", {torch.float32: (64 * 128, 3), torch.bfloat16: (64 * 128, 1)})
    if dtype is torch.bfloat16:
        gains = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    model = copy.deepcopy(model_of("llama-3", dtype))
    large = {
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module.weight.numel() >= 64 * 128
    }
    assert "lm_head" in large and "transformer.h.0.attn.proj" not in large
    packed.pack(model, rows)
    found = {name for name, module in model.named_modules() if isinstance(module, packed.PackedLinear)}
    assert found == (large if gains else set())


@pytest.mark.parametrize("name", ["llama-3", "pythia", "latent", "mixtral"])
def test_weights_by_columns_keep_a_rows_bits_and_are_the_same_matrices(name: str) -> None:
    as_they_were = model_of(name, torch.float32)
    model = copy.deepcopy(as_they_were)
    packed.pack(model, 8)
    layers = [layer for layer in model.modules() if type(layer) is torch.nn.Linear]
    assert len(layers) > 8 and all(layer.weight.t().is_contiguous() for layer in layers)
    assert packed.slows_one_row(model) and not packed.slows_one_row(as_they_were)
    for key, weight in as_they_were.state_dict().items():
        assert torch.equal(model.state_dict()[key], weight)
    text = torch.randint(VOCAB, (1, 20), generator=torch.Generator().manual_seed(0))
    want, got = (m.prefill(text, m.make_cache(20)) for m in (as_they_were, model))
    torch.testing.assert_close(got, want, atol=1e-4, rtol=0)
    assert_rows_keep_their_bits(model, positions=(125, 385, 509, 1021, 2020))


@pytest.mark.parametrize(
    ("dtype", "rows", "most"), [("float32", 4, 2**25), ("float32", 8, 2**10), ("bfloat16", 8, 2**25)]
)
def test_weights_are_left_as_they_are_where_columns_do_not_pay(
    dtype: str, rows: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed, "COLUMNS", (most, 5))
    model = copy.deepcopy(model_of("llama-3", getattr(torch, dtype)))
    packed.pack(model, rows)
    assert all(m.weight.is_contiguous() for m in model.modules() if type(m) is torch.nn.Linear)


class ByCount(torch.nn.Linear):
    """A layer whose result depends on the number of rows, as with libraries that choose kernels by shape."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * (1 + len(x) / 1000)


def test_experts_see_all_rows_of_a_block_of_any_width() -> None:
    sizes = dict(n_embd=32, n_head=2, n_expert=4, n_expert_per_token=2, moe_intermediate_size=48, intermediate_size=48)
    module = build_mlp(Config(mlp_class_name="LLaMAMoE", bias=False, **sizes), 0)
    for expert in module.experts:
        for layer in (expert.fc_1, expert.fc_2, expert.proj):
            layer.__class__ = ByCount
    module.bind()
    own = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    for width in (8, 65, 72, 200):
        blocks = [torch.randn(width, 32, generator=torch.Generator().manual_seed(seed)) for seed in range(1, 5)]
        first, *others = (module(torch.cat((own, block[5:])))[:5] for block in blocks)
        assert all(torch.equal(first, other) for other in others), width


@pytest.mark.parametrize("threads", [2, 3, 4])
@pytest.mark.parametrize("mlp", ["LLaMAMLP", "GemmaMLP", "GptNeoxMLP"])
def test_no_thread_count_and_no_odd_width_moves_a_row_of_an_activation(mlp: str, threads: int) -> None:
    # PyTorch cuts a large block into one piece per thread, and at a cut SiLU and GELU may round apart.
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for size in (1000, 11008):
            sizes = dict(n_embd=32, n_head=1, intermediate_size=size, bias=False)
            module = build_mlp(Config(mlp_class_name=mlp, gelu_approximate="tanh", **sizes), 0)
            row = torch.randn(size, generator=torch.Generator().manual_seed(size))
            for width in (2, 5, 16):
                y = activate(module.activation, row.expand(width, size).contiguous())
                assert torch.equal(y, y[:1].expand_as(y)), f"{size} wide, {width} rows"
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "gemma-2"])
def test_attention_stays_on_the_fused_kernel(name: str, dtype: torch.dtype) -> None:
    # All but soft-capping, which no fused kernel has. Forced, PyTorch raises where the kernel cannot serve.
    model = model_of(name, dtype)
    cache = model.make_cache(100)
    with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
        model.prefill(torch.ones(1, 80, dtype=torch.int64), cache)
        model.verify(torch.ones(1, 5, dtype=torch.int64), torch.tensor([80]), cache, kv_length=128)


def test_junk_in_masked_slots_changes_nothing() -> None:
    model = model_of("llama-3")
    clean, dirty = model.make_cache(200), model.make_cache(200)
    for k, v in zip(dirty.k, dirty.v):
        k.fill_(1e30), v.fill_(-1e30)
    text = torch.randint(VOCAB, (1, 75), generator=torch.Generator().manual_seed(0))
    logits = []
    for cache in (clean, dirty):
        model.prefill(text[:, :70], cache)
        logits.append(model.verify(text[:, 70:], torch.tensor([70]), cache))
    assert torch.equal(*logits)


def test_the_lengths_read_are_buckets() -> None:
    assert [kv_bucket(n) for n in (1, 64, 65, 129, 257, 512, 513, 1024, 1025, 1537)] == [
        *(64, 64, 128, 512, 512, 512, 1024, 1024, 1536, 2048)
    ]
    assert [kv_bucket(n, powers_of_two=True) for n in (1, 257, 513, 1025, 3000)] == [64, 512, 1024, 2048, 4096]
