"""The drop-in module, against LitGPT's own decoding, closed forms and sequences worked by hand."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import lightning
import litgpt.generate.base as litgpt_base
import litgpt.generate.speculative_decoding as litgpt_speculative
import litgpt.lora
import pytest
import torch
from host_reads import HostReads
from laws import follows, repeat
from litgpt import GPT, Config
from torch import Tensor, nn

import litspec.model
from litspec.errors import InputError
from litspec.generate import speculative_decoding as module
from litspec.generate.speculative_decoding import generate, next_token, speculative_decoding

GREEDY = {"temperature": 0.0}


class Model(nn.Module):
    """Any model with LitGPT's forward: logits from the position and the tokens fed so far, which is its cache.

    A rejected draft stays in the cache until it is overwritten, as keys and values do.
    """

    def __init__(self, vocab: int, max_seq_length: int = 64) -> None:
        super().__init__()
        self.max_seq_length = max_seq_length
        self.vocab = vocab
        self.cache = torch.full((max_seq_length,), -1, dtype=torch.int64)
        self.calls: list[tuple[list[int], list[int]]] = []  # tokens and positions
        self.record = True

    def logits(self, positions: Tensor) -> Tensor:
        """(T,) positions -> (T, V) logits of the tokens that follow."""
        raise NotImplementedError

    def forward(self, idx: Tensor, input_pos: Tensor, input_pos_maxp1: Any = None) -> Tensor:
        assert idx.dim() == 2
        assert idx.size(0) == 1
        assert idx.shape[1:] == input_pos.shape
        if self.record:
            self.calls.append((idx[0].tolist(), input_pos.tolist()))
            assert input_pos_maxp1 is None or int(input_pos_maxp1) == int(input_pos[-1]) + 1
            assert int(idx.max()) < self.vocab, "an id that the model does not have"
        self.cache[input_pos] = idx[0].long()
        return self.logits(input_pos).unsqueeze(0)


class Says(Model):
    """Has a fixed text: the token after position i is `text[i + 1]` for every input."""

    def __init__(self, text: Sequence[int], vocab: int = 10, **kwargs: Any) -> None:
        super().__init__(vocab, **kwargs)
        self.text = torch.tensor([*text, *[0] * (self.max_seq_length + 1 - len(text))])

    def logits(self, positions: Tensor) -> Tensor:
        return nn.functional.one_hot(self.text[positions + 1], self.vocab).float()


class Walk(Model):
    """A random function of the last two tokens."""

    def __init__(self, vocab: int = 7, seed: int = 0, **kwargs: Any) -> None:
        super().__init__(vocab, **kwargs)
        self.table = torch.randn(vocab, vocab, vocab, generator=torch.Generator().manual_seed(seed))

    def logits(self, positions: Tensor) -> Tensor:
        return self.table[self.cache[(positions - 1).clamp_min(0)], self.cache[positions]]


def greedy(target: nn.Module, prompt: Tensor, max_returned_tokens: int) -> Tensor:
    """What LitGPT's own loop says, token by token, with the target alone."""
    return litgpt_base.generate(target, prompt, max_returned_tokens, temperature=0.0)


def prompt_of(*ids: int, dtype: torch.dtype = torch.int64) -> Tensor:
    return torch.tensor(ids, dtype=dtype)


# The public reproduction of LitGPT's missing first token, with the import changed


def test_the_token_of_the_prefill_is_the_first_of_the_completion(monkeypatch: pytest.MonkeyPatch) -> None:
    class Bare(nn.Module):
        max_seq_length = 10

    first = iter([9, 7])
    monkeypatch.setattr(module, "next_token", lambda *args, **kwargs: torch.tensor([next(first)]))
    monkeypatch.setattr(module, "speculative_decoding", lambda *args, **kwargs: torch.tensor([8]))
    tokens, rate = generate(Bare(), Bare(), prompt_of(1, 2), 5, speculative_k=2)
    assert tokens.tolist() == [1, 2, 7, 8, 8]
    assert rate == 0.0


def test_the_module_has_the_names_and_arguments_of_litgpts() -> None:
    for name in ("next_token", "speculative_decoding", "generate"):
        ours = inspect.signature(getattr(module, name)).parameters
        theirs = inspect.signature(getattr(litgpt_speculative, name)).parameters
        assert list(ours) == list(theirs)
        for parameter in theirs.values():
            assert ours[parameter.name].kind == parameter.kind
            assert ours[parameter.name].default == parameter.default


def test_generate_prefills_the_draft_then_the_target_and_looks_both_functions_up_when_called(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    draft, target, calls = Says([0] * 20), Says([0, 1, 2, 3, 4, 5, 6, 7]), []

    def spy(name: str) -> Callable:
        real = getattr(module, name)

        def called(*args: Any, **kwargs: Any) -> Tensor:
            bound = inspect.signature(real).bind(*args, **kwargs).arguments
            calls.append((name, bound))
            return real(*args, **kwargs)

        return called

    for name in ("next_token", "speculative_decoding"):
        monkeypatch.setattr(module, name, spy(name))
    settings = {"temperature": 0.5, "top_k": 3, "top_p": 0.0}
    generate(draft, target, prompt_of(0, 1), 5, speculative_k=4, **settings)

    assert [name for name, _ in calls] == ["next_token"] * 2 + ["speculative_decoding"] * 2
    (_, first), (_, second), (_, third), (_, fourth) = calls
    assert (first["model"], second["model"]) == (draft, target)
    for prefill in (first, second):
        assert prefill["x"].tolist() == [[0, 1]]
        assert prefill["input_pos"].tolist() == [0, 1]
        assert prefill["input_pos_maxp1"] == 2
    for round_, token, input_pos, k in ((third, 2, 2, 1), (fourth, 3, 3, 0)):
        assert (round_["draft_model"], round_["target_model"]) == (draft, target)
        assert round_["token"].tolist() == [token]
        assert round_["input_pos"].tolist() == [input_pos]
        assert round_["input_pos_maxp1"] == input_pos + 1
        assert round_["speculative_k"] == k
    assert all(bound["sample_kwargs"] == settings for _, bound in calls)


# Stops


def test_a_stop_at_the_prefill_costs_one_forward_of_each_model() -> None:
    draft, target = Says([0, 1, 2, 3]), Says([0, 1, 9, 3])
    tokens, rate = generate(draft, target, prompt_of(0, 1), 8, stop_tokens=[9], speculative_k=3, **GREEDY)
    assert (tokens.tolist(), rate) == ([0, 1], 0.0)
    assert len(draft.calls) == len(target.calls) == 1


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("stop_tokens", [[9], ([9],)])
def test_an_empty_completion_is_the_prompt_alone_or_nothing(dtype: torch.dtype, stop_tokens: Any) -> None:
    models, prompt = (Says([0, 1, 9]), Says([0, 1, 9])), prompt_of(0, 1, dtype=dtype)
    kwargs = {"stop_tokens": stop_tokens, "speculative_k": 2, **GREEDY}
    tokens, _ = generate(*models, prompt, 6, **kwargs)
    assert torch.equal(tokens, prompt)
    assert tokens.dtype == dtype
    tokens, rate = generate(*models, prompt, 6, include_prompt=False, **kwargs)
    assert (tokens.shape, tokens.dtype, rate) == ((0,), torch.int64, 0.0)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize(
    "device",
    ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))],
)
def test_tokens_come_in_the_prompts_dtype_and_on_its_device(dtype: torch.dtype, device: str) -> None:
    draft, target = tiny_gpt(seed=1).to(device), tiny_gpt(seed=2).to(device)
    prompt = prompt_of(1, 2, 3, dtype=dtype).to(device)
    tokens, rate = generate(draft, target, prompt, 10, speculative_k=3, **GREEDY)
    assert (tokens.dtype, tokens.device, tokens.shape) == (dtype, prompt.device, (10,))
    assert torch.equal(tokens[:3], prompt)
    alone, _ = generate(draft, target, prompt, 10, speculative_k=3, include_prompt=False, **GREEDY)
    assert (alone.dtype, alone.device) == (torch.int64, prompt.device)
    assert torch.equal(alone, tokens[3:].long())
    assert type(rate) is float


TEXT = [0, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2, 3, 4, 5, 6, 7]
DRAFTS = {
    "always": TEXT,
    "never": [(t + 1) % 9 for t in TEXT],
    "sometimes": [t if i % 3 else 0 for i, t in enumerate(TEXT)],
}
each_draft = pytest.mark.parametrize("draft_says", DRAFTS.values(), ids=DRAFTS.keys())


@pytest.mark.slow
@each_draft
@pytest.mark.parametrize("k", range(0, 9))
def test_a_stop_ends_the_text_wherever_it_lies_in_a_block(draft_says: list[int], k: int) -> None:
    for offset in range(2, len(TEXT)):
        says = [*TEXT[:offset], 9, *TEXT[offset + 1 :]]
        # The draft proposes the stop too, where it agrees, and so it is accepted in the middle of a block.
        drafted = [9 if i == offset and d == t else d for i, (d, t) in enumerate(zip(draft_says, TEXT))]
        plain = litgpt_base.generate(Says(says), prompt_of(0, 1), len(TEXT), temperature=0.0, eos_id=9).tolist()
        assert plain == [*TEXT[:offset], 9]
        tokens, rate = generate(
            Says(drafted), Says(says), prompt_of(0, 1), len(TEXT), stop_tokens=[9], speculative_k=k, **GREEDY
        )
        assert tokens.tolist() == plain[:-1]
        assert 0 <= rate <= 1


@pytest.mark.slow
@each_draft
@pytest.mark.parametrize("k", range(0, 9))
def test_without_a_stop_the_text_has_the_length_asked_for(draft_says: list[int], k: int) -> None:
    for max_returned_tokens in range(3, len(TEXT) + 1):
        draft, target = Says(draft_says), Says(TEXT)
        tokens, _ = generate(draft, target, prompt_of(0, 1), max_returned_tokens, speculative_k=k, **GREEDY)
        assert tokens.tolist() == TEXT[:max_returned_tokens]
        # The last token is never run, so a cache with one token less than the text is enough.
        fed = [position for model in (draft, target) for _, positions in model.calls for position in positions]
        assert max(fed) <= max_returned_tokens - 2


@pytest.mark.parametrize("k", range(0, 9))
@pytest.mark.parametrize(
    ("stop_tokens", "kept"),
    [
        ([[4, 5, 6]], 4),
        (([4, 5, 6], [5, 6]), 4),
        ([[4, 5, 7], [5, 6, 7, 8]], 5),
        (([1, 2], [7, 8, 1]), 7),  # 1 2 begins in the prompt, where it is no match
        ([[2, 3], 8], 2),
        ([torch.tensor([6, 7])], 6),
        ([[8, 2]], None),
    ],
)
def test_stop_sequences_are_found_across_rounds_and_never_begin_in_the_prompt(
    stop_tokens: Any, kept: int | None, k: int
) -> None:
    for draft_says in DRAFTS.values():
        tokens, _ = generate(
            Says(draft_says), Says(TEXT), prompt_of(0, 1), 10, stop_tokens=stop_tokens, speculative_k=k, **GREEDY
        )
        assert tokens.tolist() == TEXT[: kept or 10]


@pytest.mark.parametrize("k", range(1, 9))
def test_a_stop_sequence_that_overlaps_itself_is_found(k: int) -> None:
    says = [0, 3, 1, 1, 1, 2, 5, 5, 5]
    for drafted in (says, [4] * 9, [0, 3, 1, 4, 1, 2, 4, 4, 4]):
        tokens, _ = generate(
            Says(drafted), Says(says), prompt_of(0), 8, stop_tokens=([1, 1, 2],), speculative_k=k, **GREEDY
        )
        assert tokens.tolist() == [0, 3, 1]


# Greedy


def tiny_gpt(seed: int, **kwargs: Any) -> GPT:
    """A random LitGPT model with its cache set up; its logits are spread out, so that no two are nearly the same."""
    sizes = {"n_layer": 2, "n_head": 4, "n_embd": 32, "block_size": 64, "vocab_size": 40, "padded_vocab_size": 40}
    torch.manual_seed(seed)
    model = GPT(Config(**(sizes | kwargs))).eval()
    for weight in model.parameters():
        if weight.dim() > 1:
            nn.init.normal_(weight, std=0.3)
    model.max_seq_length = kwargs.get("block_size", 64)
    model.set_kv_cache(batch_size=1)
    return model


ARCHITECTURES = [
    {},
    {"n_query_groups": 2, "norm_class_name": "RMSNorm", "mlp_class_name": "LLaMAMLP", "intermediate_size": 48},
    {"n_query_groups": 1, "parallel_residual": False, "rotary_percentage": 1.0},
    {"n_layer": 1, "n_embd": 16, "n_head": 2},
    {"n_layer": 3, "bias": False, "rotary_percentage": 0.5, "norm_class_name": "RMSNorm"},
]


@pytest.mark.slow
@pytest.mark.parametrize("block", range(10))
def test_greedy_text_of_random_pairs_is_that_of_the_target_alone(block: int) -> None:
    accepted = 0.0
    for pair in range(10 * block, 10 * block + 10):
        target = tiny_gpt(pair, **ARCHITECTURES[pair % 5])
        if pair % 2:
            draft = tiny_gpt(1000 + pair, **ARCHITECTURES[pair // 5 % 5])
        else:  # a draft that agrees at times: the target's weights, shaken
            draft = tiny_gpt(pair, **ARCHITECTURES[pair % 5])
            for weight in draft.parameters():
                weight.data += 0.03 * torch.randn_like(weight)
        prompt = torch.randint(0, 40, (1 + pair % 7,))
        size = prompt.size(0) + 8 + pair % 17
        kwargs: dict[str, Any] = {"top_p": 0.0} if pair % 3 == 0 else {"temperature": 0.0}
        tokens, rate = generate(draft, target, prompt, size, speculative_k=1 + pair % 8, **kwargs)
        assert torch.equal(tokens, greedy(target, prompt, size)), f"pair {pair}"
        accepted += rate
    assert accepted > 0, "no draft was ever right"


def test_a_draft_with_the_targets_weights_is_always_right() -> None:
    # It would not be if the draft's cache lacked the last proposal of a round that was accepted as a whole.
    for k in (1, 3, 8):
        target, draft = tiny_gpt(5), tiny_gpt(5)
        tokens, rate = generate(draft, target, prompt_of(1, 2, 3), 50, speculative_k=k, **GREEDY)
        assert rate == 1.0
        assert torch.equal(tokens, greedy(target, prompt_of(1, 2, 3), 50))


def test_a_draft_is_accepted_iff_it_is_the_argmax_of_the_target() -> None:
    # The target gives the draft's token a higher probability than the draft does, but it is not the argmax.
    draft, target = Says([0, 1, 1, 1]), Says([0, 2, 2, 2])
    draft.logits = lambda positions: torch.tensor([[0.0, 0.2, 0.1, 0.1]]).expand(len(positions), -1)
    target.logits = lambda positions: torch.tensor([[0.0, 2.0, 2.1, 0.0]]).expand(len(positions), -1)
    tokens, rate = generate(draft, target, prompt_of(0), 8, speculative_k=3, **GREEDY)
    assert (tokens.tolist(), rate) == ([0] + [2] * 7, 0.0)


def test_models_set_up_by_fabric_work_as_in_litgpts_command() -> None:
    fabric = lightning.Fabric(accelerator="cpu", devices=1, precision="32-true")
    target = tiny_gpt(3)
    expected = greedy(target, prompt_of(1, 2, 3), 20)
    pair = fabric.setup_module(tiny_gpt(4)), fabric.setup_module(target)
    tokens, _ = generate(*pair, prompt_of(1, 2, 3), 20, speculative_k=4, **GREEDY)
    assert torch.equal(tokens, expected)


def test_no_speculation_is_plain_decoding() -> None:
    draft, target = Walk(seed=1), Walk(seed=2)
    tokens, rate = generate(draft, target, prompt_of(1, 2), 20, speculative_k=0, **GREEDY)
    assert torch.equal(tokens, greedy(Walk(seed=2), prompt_of(1, 2), 20))
    assert rate == 0.0
    assert [len(idx) for idx, _ in target.calls] == [2] + [1] * 17
    assert len(draft.calls) == 1


@pytest.mark.parametrize("maxp1", [None, 2, torch.tensor(2)], ids=["None", "int", "tensor"])
def test_the_largest_position_may_be_a_number_a_tensor_or_unknown(maxp1: Any) -> None:
    draft, target = tiny_gpt(3), tiny_gpt(3)
    first = next_token(target, torch.arange(2), prompt_of(1, 2).view(1, 2), maxp1, **GREEDY)
    assert first.tolist() == greedy(target, prompt_of(1, 2), 3)[2:].tolist()
    next_token(draft, torch.arange(2), prompt_of(1, 2).view(1, 2), maxp1, **GREEDY)
    after = None if maxp1 is None else maxp1 + 1
    block = speculative_decoding(draft, target, first, torch.tensor([2]), after, 3, **GREEDY)
    assert block.tolist() == greedy(target, prompt_of(1, 2), 7)[3:].tolist()
    assert block.dtype == torch.int64


# LitGPT's own tests of these functions, where they expected what is right


class Fixed(nn.Module):
    def __init__(self, *rows: Sequence[float]) -> None:
        super().__init__()
        self.rows = torch.tensor(rows)

    def forward(self, idx: Tensor, **kwargs: Any) -> Tensor:
        rows = self.rows if self.rows.size(0) > 1 else self.rows.expand(idx.size(1), -1)
        return rows[-idx.size(1) :].unsqueeze(0)


@pytest.mark.parametrize(
    ("draft", "target", "expected"),
    [
        ([[1.0, 2, 3, 4, 5, 0, 0, 0, 0, 0]], [[0.0, 0, 0, 0, 0, 6, 7, 8, 9, 10]], [9]),
        ([[0.0, 0, 3, 4, 5, 6, 7, 8, 0, 0]], [[0.0, 0, 3, 4, 5, 6, 7, 8, 0, 0]], [7, 7, 7, 7]),
        (
            [[0.0, 0, 3, 4, 10, 9, 7, 8, 0, 0]],
            [[0.0, 0, 0, 0, 10, 9, 0, 0, 0, 0]] * 2 + [[0.0, 0, 0, 0, 0, 0, 0, 0, 0, 10]] * 2,
            [4, 4, 9],
        ),
    ],
    ids=["never", "always", "sometimes"],
)
def test_a_round_keeps_what_the_target_accepts(
    draft: list[list[float]], target: list[list[float]], expected: list[int]
) -> None:
    output = speculative_decoding(
        Fixed(*draft), Fixed(*target), torch.tensor([-1]), torch.tensor([0]), 1, 3, top_k=None, top_p=0.0, temperature=0
    )
    assert output.tolist() == expected


@pytest.mark.parametrize("max_seq_length", [10, 15, 20, 25])
@pytest.mark.parametrize("speculative_k", [1, 2, 3])
def test_a_pair_of_other_sizes_fills_all_there_is_room_for(max_seq_length: int, speculative_k: int) -> None:
    draft = GPT(Config(vocab_size=16, block_size=64, n_layer=1, n_head=4, n_embd=8))
    target = GPT(Config(vocab_size=16, block_size=128, n_layer=2, n_head=8, n_embd=16))
    for model in (draft, target):
        model.max_seq_length = max_seq_length
        model.set_kv_cache(batch_size=1)
    prompt = torch.arange(5)
    tokens, rate = generate(draft, target, prompt, max_seq_length, top_k=1, speculative_k=speculative_k)
    assert torch.equal(tokens, greedy(target, prompt, max_seq_length))
    assert 0 <= rate <= 1


# The sampled law

SAMPLING: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": 0.6},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.8},
    "all three": {"temperature": 1.3, "top_k": 5, "top_p": 0.9},
}
each_sampling = pytest.mark.parametrize("sampling", SAMPLING.values(), ids=SAMPLING.keys())


def processed_by_litgpt(tables: Tensor, sampling: dict[str, Any]) -> Tensor:
    """What LitGPT's `sample` draws from, for logits (..., V)."""
    rows = [litgpt_speculative.sample(row.view(1, 1, -1), **sampling)[1] for row in tables.flatten(0, -2)]
    return torch.stack(rows).view_as(tables)


class Chain(nn.Module):
    """P(next token | token, position), with nothing to remember, so that many texts can be drawn at once."""

    def __init__(self, vocab: int, seed: int) -> None:
        super().__init__()
        self.tables = 1.5 * torch.randn(3, vocab, vocab, generator=torch.Generator().manual_seed(seed))
        self.known = vocab

    def forward(self, idx: Tensor, input_pos: Tensor, input_pos_maxp1: None = None) -> Tensor:
        # Ids of the target that it does not have are replaced by one that it has.
        return self.tables[input_pos.clamp_max(2), idx % self.known]

    def law(self, sampling: dict[str, Any]) -> Tensor:
        """P(x, y, z) of the three tokens that follow a 0 at position 0: (V, V, V)."""
        x, y, z = processed_by_litgpt(self.tables, sampling)
        return x[0].view(-1, 1, 1) * y.unsqueeze(2) * z


def three_tokens(draft: Chain, target: Chain, k: int, sampling: dict[str, Any], times: int = 50_000) -> Tensor:
    """The first three tokens of many texts, generated with rounds of the module: (times, 3)."""
    sampler = module._sampler(**sampling)
    module._seen_vocab_sizes[target] = target.known  # as after a prefill

    def one(zero: Tensor) -> Tensor:
        token = input_pos = seen = zero.long().view(1)
        text = torch.zeros(3 * (k + 1), dtype=torch.int64) + token
        for _ in range(3):
            _, verified, _, _ = module._round(draft, target, token, input_pos, None, k, sampler)
            # The next round overwrites what was not accepted.
            text = text.scatter(0, seen + torch.arange(k + 1), verified.tokens)
            token = verified.tokens.gather(0, verified.accepted.view(1))
            input_pos, seen = input_pos + verified.accepted + 1, seen + verified.accepted + 1
        return text[:3]

    torch.manual_seed(k)
    return repeat(one, times)


@pytest.mark.slow
@each_sampling
@pytest.mark.parametrize("k", [0, 1, 2, 4])
def test_the_joint_law_of_three_sampled_tokens_is_that_of_the_target(sampling: dict[str, Any], k: int) -> None:
    draft, target = Chain(6, seed=1), Chain(6, seed=2)
    assert follows(three_tokens(draft, target, k, sampling), target.law(sampling))


@each_sampling
def test_a_rule_that_accepts_too_easily_does_not_pass(
    sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = torch.rand
    monkeypatch.setattr(torch, "rand", lambda *args, **kwargs: 0.85 * real(*args, **kwargs))
    draft, target = Chain(6, seed=1), Chain(6, seed=2)
    assert not follows(three_tokens(draft, target, 2, sampling), target.law(sampling))


@pytest.mark.slow
@pytest.mark.parametrize("sampling", [{"temperature": 0.8}, {"top_k": 5}, {"top_k": 3, "top_p": 0.9}])
@pytest.mark.parametrize(("draft_vocab", "target_vocab"), [(8, 5), (4, 6)])
def test_the_law_holds_where_the_vocabularies_differ_in_size(
    draft_vocab: int, target_vocab: int, sampling: dict[str, Any]
) -> None:
    draft, target = Chain(draft_vocab, seed=3), Chain(target_vocab, seed=2)
    draws = three_tokens(draft, target, 2, sampling)
    assert follows(draws, target.law(sampling))
    assert (draws == target_vocab - 1).any(), "the target's last id is out of reach"


class Triples(Model):
    """Its text is made of independent triples (x, y, z) with P(x) P(y | x) P(z | x, y), the first at position 3.

    So one long text holds many draws of three tokens, cut by rounds in every way.
    """

    def __init__(self, times: int, seed: int, vocab: int = 6) -> None:
        super().__init__(vocab, max_seq_length=3 * times + 3)
        self.record = False
        tables = 1.5 * torch.randn(3, vocab, vocab, vocab, generator=torch.Generator().manual_seed(seed))
        tables[0] = tables[0, 0, 0]
        tables[1] = tables[1, 0]
        self.tables = tables

    def logits(self, positions: Tensor) -> Tensor:
        return self.tables[(positions + 1) % 3, self.cache[positions - 1], self.cache[positions]]

    def law(self, sampling: dict[str, Any]) -> Tensor:
        """(V, V, V)."""
        x, y, z = processed_by_litgpt(self.tables, sampling)
        return x[0, 0].view(-1, 1, 1) * y[0].unsqueeze(2) * z


def triples(times: int, k: int, sampling: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Many triples out of one text by `generate`, (times, 3), and the target's law."""
    torch.manual_seed(1)
    draft, target = Triples(times, seed=1), Triples(times, seed=2)
    tokens, rate = generate(
        draft,
        target,
        torch.zeros(3, dtype=torch.int64),
        3 + 3 * times,
        speculative_k=k,
        include_prompt=False,
        **sampling,
    )
    assert 0.1 < rate < 0.9, "draft and target must differ, and agree at times"
    return tokens.view(-1, 3), target.law(sampling)


@pytest.mark.slow
def test_a_long_text_by_generate_has_the_law_of_the_target() -> None:
    assert follows(*triples(4_000, 2, SAMPLING["all three"]))
    assert follows(*triples(2_000, 3, SAMPLING["temperature"]))


def test_the_same_seed_gives_the_same_text() -> None:
    def text(seed: int) -> list[int]:
        torch.manual_seed(seed)
        return generate(Walk(seed=1), Walk(seed=2), prompt_of(1, 2), 40, speculative_k=3)[0].tolist()

    assert text(1) == text(1)
    assert text(1) != text(2)


# Vocabularies


@pytest.mark.parametrize("sampling", [GREEDY, {}, {"top_k": 45}, {"temperature": 0.7, "top_k": 5, "top_p": 0.8}])
@pytest.mark.parametrize(("draft_vocab", "target_vocab"), [(48, 40), (40, 48)])
def test_models_padded_to_other_vocabulary_sizes_work(
    draft_vocab: int, target_vocab: int, sampling: dict[str, Any]
) -> None:
    draft = tiny_gpt(1, padded_vocab_size=draft_vocab)
    target = tiny_gpt(2, padded_vocab_size=target_vocab)
    torch.manual_seed(0)
    # The draft's padding ids have high logits, so that proposing one would be detected.
    draft.lm_head.weight.data[40:] *= 10
    if target_vocab > draft_vocab:
        # Ids that only the target has cannot be fed to the draft, which LitGPT's tokenizers never give; so none here.
        target.lm_head.weight.data[40:] = 0
        target.lm_head.register_forward_hook(lambda _, __, logits: logits.index_fill(2, torch.arange(40, 48), -1e9))
    tokens, _ = generate(draft, target, prompt_of(1, 2, 3), 40, speculative_k=4, **sampling)
    assert tokens.shape == (40,)
    assert int(tokens.max()) < min(draft_vocab, target_vocab)
    if sampling == GREEDY:
        assert torch.equal(tokens, greedy(target, prompt_of(1, 2, 3), 40))


@pytest.mark.parametrize("sampling", [GREEDY, {}, {"top_k": 9}])
def test_a_round_on_models_never_seen_before_proposes_only_what_both_have(sampling: dict[str, Any]) -> None:
    # Without a config and without a prefill through the module nothing tells the target's vocabulary but its logits.
    for seed in range(20):
        torch.manual_seed(seed)
        draft, target = Walk(12, seed=1), Walk(7, seed=2)
        draft.cache[:2] = target.cache[:2] = torch.tensor([1, 2])
        tokens = speculative_decoding(draft, target, prompt_of(2), torch.tensor([1]), 2, 4, **sampling)
        assert int(tokens.max()) < 7


# Host reads


@pytest.mark.parametrize("k", [1, 4, 8])
@pytest.mark.parametrize("sampling", [GREEDY, {}, {"temperature": 0.7, "top_k": 5, "top_p": 0.8}])
def test_a_round_reads_from_the_device_at_most_twice_however_many_tokens_it_brings(
    k: int, sampling: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    draft, target = Walk(seed=2), Walk(seed=2)
    draft.table = draft.table + 0.1 * torch.randn_like(draft.table)
    draft.record = target.record = False
    reads_at: list[int] = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        reads_at.append(len(reads.seen))
        return speculative_decoding(*args, **kwargs)

    monkeypatch.setattr(module, "speculative_decoding", counted)
    with HostReads() as reads:
        generate(draft, target, prompt_of(1, 2), 60, speculative_k=k, **sampling)
    per_round = [after - before for before, after in zip(reads_at, [*reads_at[1:], len(reads.seen)])]
    assert set(per_round) == {2}
    # Before the first round: whether each prefill was finite, and its token.
    assert reads_at[0] == 3


# Statistics


def test_acceptance_counts_proposals_up_to_the_end_of_the_text() -> None:
    says = [0, 1, 2, 3, 4, 5, 6, 7, 8]

    def rate(drafted: list[int], k: int, size: int = 9, stops: Sequence[int] = ()) -> float:
        return generate(Says(drafted), Says(says), prompt_of(0), size, stop_tokens=stops, speculative_k=k, **GREEDY)[1]

    assert rate(says, 3) == 1.0
    assert rate([9] * 9, 3) == 0.0
    # Prefill 1; round 1: 2 3 right, 9 wrong, 4 own; round 2: 5 6 7 right, 8 own.
    assert rate([0, 1, 2, 3, 9, 5, 6, 7, 8], 3) == 5 / 6
    # The same, and 6 is a stop: of round 2 the proposals 5 and 6 count.
    assert rate([0, 1, 2, 3, 9, 5, 6, 7, 8], 3, stops=[6]) == 4 / 5
    # 4, the target's own, is the stop: the refused proposal in its place counts, none behind it would.
    assert rate([0, 1, 2, 9, 9, 9, 9, 9, 9], 4, stops=[3]) == 1 / 2
    # One token of room, or none for a proposal: nothing was proposed.
    assert rate(says, 3, size=2) == 0.0
    assert rate(says, 3, size=3) == 0.0
    assert rate(says, 0) == 0.0
    assert rate(says, 3, stops=[1]) == 0.0


# Bad input


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"speculative_k": -1}, "speculative_k must be at least 0, got -1"),
        ({"temperature": -0.5}, "temperature .* got -0.5"),
        ({"top_p": 1.5}, r"top_p must be in \[0, 1\], got 1.5"),
        ({"top_p": -0.1}, r"top_p must be in \[0, 1\], got -0.1"),
        ({"top_k": 0}, "top_k must be at least 1.* got 0"),
        ({"prompt": torch.empty(0, dtype=torch.int64)}, r"at least one token, got \(0,\)"),
        ({"prompt": torch.ones(1, 2, dtype=torch.int64)}, r"shape \(T,\) .* got \(1, 2\)"),
        ({"max_returned_tokens": 2}, "above the prompt's 2 tokens, got 2"),
        ({"max_returned_tokens": 66}, "draft model's max_seq_length must be at least .* 65, got 64"),
        ({"stop_tokens": ([],)}, "empty sequence"),
    ],
)
def test_a_wrong_setting_is_a_value_error_that_names_it_and_nothing_is_run(
    kwargs: dict[str, Any], message: str
) -> None:
    draft, target = Walk(seed=1), Walk(seed=2)
    call: dict[str, Any] = {"prompt": prompt_of(1, 2), "max_returned_tokens": 8, "speculative_k": 2} | kwargs
    with pytest.raises(ValueError, match=message):
        generate(draft, target, **call)
    assert draft.calls == target.calls == []


def test_a_target_with_too_little_room_is_named() -> None:
    with pytest.raises(ValueError, match=r"target model's max_seq_length must be at least .* 19, got 18"):
        generate(Walk(), Walk(max_seq_length=18), prompt_of(1, 2), 20, speculative_k=2)
    tokens, _ = generate(Walk(), Walk(max_seq_length=19), prompt_of(1, 2), 20, speculative_k=2)
    assert tokens.shape == (20,)


def test_the_functions_of_a_round_check_their_settings_too() -> None:
    with pytest.raises(ValueError, match="temperature"):
        next_token(Walk(), torch.arange(2), torch.ones(1, 2, dtype=torch.int64), temperature=-1)
    with pytest.raises(ValueError, match="speculative_k must be at least 0, got -2"):
        speculative_decoding(Walk(), Walk(), prompt_of(1), torch.tensor([1]), 2, -2)
    with pytest.raises(TypeError):
        next_token(Walk(), torch.arange(2), torch.ones(1, 2, dtype=torch.int64), sampler="coupled")


@pytest.mark.parametrize("sampling", [GREEDY, {}, {"top_k": 3}, {"temperature": 0.5, "top_p": 0.9}])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    # After full acceptance the draft runs its last proposal, at position 5, but its logits are not used.
    ("name", "position"),
    [("draft", i) for i in (1, 2, 3, 4, 6, 7, 8)] + [("target", i) for i in range(1, 9)],
)
def test_logits_that_are_not_finite_raise_and_name_model_and_position(
    name: str, position: int, bad: float, sampling: dict[str, Any]
) -> None:
    text = [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 0, 1]
    models = {"draft": Says(text), "target": Says(text)}
    # So sure of the text that sampling it is certain: all proposals are accepted.
    for model in models.values():
        right = model.logits
        model.logits = lambda positions, right=right: 100 * right(positions)
    sound = models[name].logits

    def logits(positions: Tensor) -> Tensor:
        rows = sound(positions)
        rows[positions == position, 3] = bad
        return rows

    models[name].logits = logits
    with pytest.raises(InputError, match=f"^The {name} model's logits at position {position} hold NaN or inf"):
        generate(models["draft"], models["target"], prompt_of(0, 1), 12, speculative_k=3, **sampling)


# LitGPT models that cannot verify blocks


def gemma_like(gpt: type[nn.Module] = GPT, config: type[Config] = Config, **kwargs: Any) -> nn.Module:
    torch.manual_seed(0)
    model = gpt(
        config(
            name="gemma-like",
            block_size=64,
            n_layer=2,
            n_head=4,
            n_embd=32,
            vocab_size=40,
            padded_vocab_size=40,
            **kwargs,
        )
    ).eval()
    model.set_kv_cache(batch_size=1)
    return model


WINDOW = {"sliding_window_size": 8, "sliding_window_indices": [1, 0]}
SOFTCAP = {"attention_logit_softcapping": 50.0}


@pytest.mark.parametrize(
    ("kwargs", "reason"), [(WINDOW, r"sliding-window layers \(window 8\)"), (SOFTCAP, "soft-capped attention")]
)
@pytest.mark.parametrize("role", ["draft", "target"])
@pytest.mark.parametrize("lora", [False, True])
def test_litgpt_models_whose_caches_do_not_support_rejection_are_refused(
    kwargs: dict[str, Any], reason: str, role: str, lora: bool
) -> None:
    bad = gemma_like(litgpt.lora.GPT, litgpt.lora.Config, **kwargs) if lora else gemma_like(**kwargs)
    pair = {"draft_model": tiny_gpt(1), "target_model": tiny_gpt(1)} | {f"{role}_model": bad}
    with pytest.raises(ValueError, match=rf"^The {role} model 'gemma-like' .*{reason}.*litspec\.model\.GPT"):
        generate(**pair, prompt=prompt_of(1, 2), max_returned_tokens=30, speculative_k=2)


def test_a_window_that_holds_the_whole_text_is_no_reason() -> None:
    target = gemma_like(sliding_window_size=64, sliding_window_indices=[1, 0])
    tokens, _ = generate(tiny_gpt(1), target, prompt_of(1, 2), 60, speculative_k=3, **GREEDY)
    assert torch.equal(tokens, greedy(target, prompt_of(1, 2), 60))


@pytest.mark.parametrize("kwargs", [WINDOW, SOFTCAP, WINDOW | SOFTCAP])
def test_what_the_refusal_says_to_load_instead_gives_the_text_of_the_uncached_model(kwargs: dict[str, Any]) -> None:
    reference = gemma_like(**kwargs)
    pair = []
    for _ in range(2):
        model = litspec.model.GPT(reference.config).eval()
        model.load_state_dict(reference.state_dict())
        model.set_kv_cache(batch_size=1)
        pair.append(model)
    pair[0].lm_head.weight.data += 0.05 * torch.randn_like(pair[0].lm_head.weight)
    tokens, rate = generate(*pair, prompt_of(1, 2), 40, speculative_k=3, **GREEDY)
    assert 0 < rate < 1
    reference.clear_kv_cache()
    expected = prompt_of(1, 2)
    with torch.inference_mode():
        while expected.size(0) < 40:
            expected = torch.cat((expected, reference(expected.unsqueeze(0))[0, -1:].argmax(-1)))
    assert torch.equal(tokens, expected)


# Values from outside


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("sampling", [GREEDY, {}])
def test_ids_that_the_draft_lacks_are_supported(k: int, sampling: dict[str, Any]) -> None:
    """In the prompt, and said by the target."""
    draft, target = tiny_gpt(1, padded_vocab_size=40), tiny_gpt(2, padded_vocab_size=64)
    target.lm_head.weight.data[40:] *= 10
    prompt = prompt_of(1, 63, 50)
    tokens, _ = generate(draft, target, prompt, 40, speculative_k=k, **sampling)
    assert tokens.shape == (40,)
    if sampling == GREEDY:
        assert torch.equal(tokens, greedy(target, prompt, 40)) and int(tokens[3:].max()) >= 40


@pytest.mark.parametrize("k", [1, 2, 4])
@pytest.mark.parametrize("sampling", [GREEDY, {}])
def test_a_target_that_returns_only_its_last_row_is_named(k: int, sampling: dict[str, Any]) -> None:
    class LastRow(Walk):
        def logits(self, positions: Tensor) -> Tensor:
            return super().logits(positions)[-1:]

    with pytest.raises(ValueError, match=f"target model must return logits for each of the {k + 1} tokens"):
        generate(Walk(seed=1), LastRow(seed=2), prompt_of(1, 2), 30, speculative_k=k, **sampling)
    assert generate(Walk(seed=1), LastRow(seed=2), prompt_of(1, 2), 30, speculative_k=0)[0].shape == (30,)


@pytest.mark.parametrize("sampling", [GREEDY, {}, {"top_k": 3}])
def test_a_draft_that_allows_nothing_the_target_has_proposes_nothing(sampling: dict[str, Any]) -> None:
    draft, target = Walk(12, seed=1), Walk(7, seed=2)
    draft.table[:, ::2, :7] = -math.inf  # behind every other token
    tokens, _ = generate(draft, target, prompt_of(1, 2), 40, speculative_k=4, **sampling)
    assert tokens.shape == (40,)
    if sampling == GREEDY:
        assert torch.equal(tokens, greedy(Walk(7, seed=2), prompt_of(1, 2), 40))


@pytest.mark.parametrize(
    "setting", [{"speculative_k": 2.0}, {"max_returned_tokens": 8.0}, {"temperature": None}], ids=str
)
def test_a_setting_of_a_wrong_type_is_a_sentence(setting: dict[str, Any]) -> None:
    call: dict[str, Any] = {"prompt": prompt_of(1, 2), "max_returned_tokens": 8, "speculative_k": 2} | setting
    with pytest.raises(ValueError, match=f"^{next(iter(setting))} must be "):
        generate(Walk(seed=1), Walk(seed=2), **call)
