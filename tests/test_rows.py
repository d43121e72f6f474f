"""Exactly the row counts with equal bits are found."""

from __future__ import annotations

import copy

import pytest
import torch
from families import FAMILIES, VOCAB, model_of
from litgpt.config import Config

from litspec.engine.rows import class_limit, distinct_blocks, find_rows
from litspec.errors import InputError
from litspec.model import GPT, packed
from litspec.model.packed import PackedLinear

DTYPES = (torch.float32, torch.bfloat16)


class ByRows(torch.nn.Linear):
    """A layer whose sums depend on the number of rows, as with libraries that choose kernels by shape."""

    odd_ones: frozenset[int] = frozenset()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.nn.functional.linear(x.double(), self.weight.double(), self.bias)
        return (y * (1 + 1e-3 * (len(x) in self.odd_ones))).to(x.dtype)


class Exact(ByRows):
    """A layer whose rounded result does not depend on the order of summation."""


def exact_model(name: str = "llama-3") -> GPT:
    """A model with exact products and ordinary attention."""
    model = copy.deepcopy(model_of(name))
    for module in list(model.modules()):
        for child_name, child in module.named_children():
            if type(child) is torch.nn.Linear:
                layer = Exact(child.in_features, child.out_features, bias=child.bias is not None)
                layer.weight, layer.bias = child.weight, child.bias
                setattr(module, child_name, layer)
    return model


def rows_alone(model: GPT, text: torch.Tensor, position: int, n: int) -> torch.Tensor:
    """Logits of the n tokens at a position, all before them read from the start."""
    cache = model.make_cache(position + n, width=16)
    model.prefill(text[None, :position], cache)
    kv_length = cache.bucket(position + n)
    return model.verify(text[None, position : position + n], torch.tensor([position]), cache, kv_length=kv_length)[0]


class InFours(Exact):
    """A layer that computes tiles of four rows, and the remaining rows differently."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        whole = len(x) // 4 * 4
        return torch.cat((y[:whole], y[whole:] * (1 + 1e-3)))


def test_if_a_row_depends_on_its_place_the_next_row_count_is_used() -> None:
    model = exact_model()
    for block in model.transformer.h:
        block.mlp.proj.__class__ = InFours
    model.bind()
    assert find_rows(model, 5) == find_rows(model, 8) == (4, 8) and find_rows(model, 4) == (4,)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_row_count_that_is_found_gives_the_logits_of_the_most_rows(name: str, dtype: torch.dtype) -> None:
    model = model_of(name, dtype)
    found = find_rows(model, 8)
    assert found[-1] == 8 and list(found) == sorted(set(found)) and found[0] >= 1
    text = torch.randint(VOCAB, (1100,), generator=torch.Generator().manual_seed(1))
    for position in (3, 57, 124, 253, 508, 1021):
        want = rows_alone(model, text, position, 8)
        for n in found:
            assert torch.equal(rows_alone(model, text, position, n), want[:n]), f"{n} rows at {position}"


@pytest.mark.parametrize(("layer", "logits"), [("transformer.h.1.mlp.proj", False), ("lm_head", True)])
def test_a_row_count_that_differs_in_one_layer_is_left_out(layer: str, logits: bool) -> None:
    model = exact_model()
    everywhere = set(find_rows(model, 8))
    assert len(everywhere) > 1
    differing = min(everywhere)
    model.get_submodule(layer).odd_ones = frozenset({differing})
    # Equal blocks are tried once, using the first.
    seen = logits or distinct_blocks(model) == 2
    assert set(find_rows(model, 8)) == (everywhere - {differing} if seen else everywhere)


def test_blocks_are_tried_up_to_the_last_of_a_new_kind() -> None:
    assert distinct_blocks(model_of("llama-3")) == 1
    assert distinct_blocks(model_of("gemma-2")) == 2  # a window in every other
    assert distinct_blocks(model_of("latent")) == 2  # the first is dense, the others are mixtures
    model = copy.deepcopy(model_of("llama-3"))
    block = model.transformer.h[1]
    block.mlp.proj = PackedLinear(block.mlp.proj)
    assert distinct_blocks(model) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["llama-3", "gemma-2", "pythia"])
def test_packed_layers_have_equal_bits_from_two_rows_on(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = copy.deepcopy(model_of(name, dtype))
    monkeypatch.setattr(packed, "GAINS", dict.fromkeys(DTYPES, (1, 1)))
    packed.pack(model, 8)
    assert set(range(2, 9)) <= set(find_rows(model, 8))


def test_every_layer_of_a_large_model_is_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, large, every in ((8, 2**10, True), (8, 2**25, False), (1, 2**10, False)):
        monkeypatch.setattr(packed, "LARGE", large)
        model = copy.deepcopy(model_of("llama-3"))
        packed.pack(model, rows)
        assert all(isinstance(b.mlp.proj, PackedLinear) == every for b in model.transformer.h)


def test_one_row_is_a_class_of_its_own() -> None:
    assert find_rows(model_of("llama-3"), 1) == (1,)
    # Attention over one row uses other kernels, even if a few random tokens show no difference.
    assert 1 not in find_rows(exact_model(), 8)
    with pytest.raises(InputError, match="at least 1, got 0"):
        find_rows(model_of("llama-3"), 0)


def test_a_batch_may_have_as_many_rows_as_keep_their_bits() -> None:
    model = exact_model()
    rows = find_rows(model, 8)
    assert class_limit(model, rows, 8) == 8
    assert class_limit(model, rows, 50) == 64
    model.lm_head.odd_ones = frozenset({32})
    assert class_limit(model, rows, 16) == 16
    assert class_limit(model, rows, 128) == 16
    model.lm_head.odd_ones = frozenset({16})
    assert class_limit(model, rows, 128) == 8


def small_layers_of(width: int, vocab_size: int = VOCAB) -> GPT:
    """A bf16 model whose smallest layer has width x width elements."""
    sizes = dict(n_layer=2, n_head=2, n_embd=width, vocab_size=vocab_size, padded_vocab_size=vocab_size)
    config = Config(name="small", block_size=256, rotary_percentage=1.0, **sizes)
    model = GPT(config).to(torch.bfloat16)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=width**-0.5)
    model.bind()
    return model


@pytest.mark.parametrize(("width", "rows"), [(32, (5, 6, 7, 8)), (64, (2, 3, 4, 5, 6, 7, 8))])
def test_a_class_lies_on_one_side_of_the_size_where_bf16_products_change_their_kernel(
    width: int, rows: tuple[int, ...]
) -> None:
    assert find_rows(small_layers_of(width), 8) == rows


def test_a_batch_does_not_cross_the_size_where_bf16_products_change_their_kernel() -> None:
    # The largest layers, of 8 x 32, change their kernel after 16 rows.
    model = small_layers_of(8, vocab_size=16)
    assert find_rows(model, 8) == (2, 3, 4, 5, 6, 7, 8)
    assert class_limit(model, range(2, 9), 128) == 16
    assert class_limit(small_layers_of(32), range(5, 9), 128) >= 128
    # Products of attention have other sizes for other texts, which says nothing about layers.
    assert class_limit(model_of("gemma-2", torch.bfloat16), range(2, 9), 64) == 64


@pytest.mark.slow
def test_bf16_products_of_a_class_are_equal_in_a_million_results() -> None:
    generator = torch.Generator().manual_seed(0)
    for width in (16, 32, 48, 64):
        weight = torch.randn(width, width, generator=generator).bfloat16() / width**0.5
        most = 8
        rows = [n for n in range(2, most + 1) if (n * width**2 > 4096) == (most * width**2 > 4096)]
        assert len(rows) > 1
        for _ in range(1_000_000 // (most * width)):
            x = torch.randn(most, width, generator=generator).bfloat16()
            want = torch.mm(x, weight.t())
            for n in rows[:-1]:
                assert torch.equal(torch.mm(x[:n], weight.t()), want[:n]), (width, n)
