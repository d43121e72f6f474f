"""`SpecLLM` from prompt to text, compared with LitGPT's generation, known texts, and plain decoding."""

from __future__ import annotations

import gc
import random
import resource
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import litgpt.model
import pytest
import torch
import transformers
from checkpoints import BOS, EOS, byte_level_tokenizer, lively_weights, tiny_config, write_checkpoint, write_pair
from families import build
from litgpt.config import Config
from litgpt.generate.base import generate as litgpt_generate
from tokenizers import Tokenizer, decoders, models

from litspec import Completion, SpecLLM
from litspec.drafters import Drafter, DraftSession, Proposal
from litspec.errors import InputError
from litspec.model import GPT, KVCache

PROMPTS = ["abcabcabc", "x", "The llama said: the llama said"]
DRAFTERS = ["draft_model", "prompt_lookup", "lookup_then_model", "early_exit", "none"]


def target_alone(folder: Path, prompt: Sequence[int], max_new_tokens: int) -> list[int]:
    """Greedy tokens by litgpt's own model and loop; stops are ignored."""
    model = litgpt.model.GPT(Config.from_file(folder / "model_config.yaml")).eval()
    model.load_state_dict(torch.load(folder / "lit_model.pth", weights_only=True))
    size = len(prompt) + max_new_tokens
    model.max_seq_length = size
    model.set_kv_cache(1)
    return litgpt_generate(model, torch.tensor(prompt), size, temperature=0.0)[len(prompt) :].tolist()


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return write_pair(tmp_path_factory.mktemp("pair"), tiny_config(block_size=1280), noise=0.02)


@pytest.fixture(scope="module")
def llm(pair: tuple[Path, Path]) -> SpecLLM:
    return SpecLLM.load(*pair)


# A target whose greedy text is known: its layers add nothing, and its head makes each token's successor most likely.


def chain_weights(config: Config, successors: dict[int, int]) -> dict[str, torch.Tensor]:
    weights = {name: torch.zeros_like(w) for name, w in litgpt.model.GPT(config).state_dict().items()}
    for name, weight in weights.items():
        if "norm" in name or "ln_f" in name:
            weight.fill_(1.0)
    generator = torch.Generator().manual_seed(0)
    signs = torch.randint(2, (config.padded_vocab_size, config.n_embd), generator=generator) * 2.0 - 1
    weights["transformer.wte.weight"] = signs
    for token, successor in successors.items():
        weights["lm_head.weight"][successor] += 0.1 * signs[token]
    return weights


# Byte-level vocabularies write a byte as its Latin-1 character if that is printable, else from U+0100 on.
VISIBLE = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
HIDDEN = [byte for byte in range(0x100) if byte not in VISIBLE]


def byte_level(data: bytes) -> str:
    return "".join(chr(byte) if byte in VISIBLE else chr(0x100 + HIDDEN.index(byte)) for byte in data)


LLAMA, CAMEL, HORSE = "🦙".encode(), "駱".encode(), "馬".encode()
# Characters spread over tokens, a token that ends one and begins the next, a combining mark, white-space of all kinds.
BYTE_LEVEL_PARTS = [
    b"The", b" llama", b" ", LLAMA[:1], LLAMA[1:3], LLAMA[3:], b" eats", b" gr", b"ass", b";\n", b"\n", b"  two",
    CAMEL[:2], CAMEL[2:] + HORSE[:1], HORSE[1:], "。吃".encode(), b" cafe", "\u0301".encode(), b"\t", b" END", b"!",
]  # fmt: skip
BYTE_FALLBACK_PARTS = [
    "▁The", "▁llama", "▁", *(f"<0x{byte:02X}>" for byte in LLAMA), "▁eats", "▁gr", "ass", ";\n", "\n", "▁▁two",
    *(f"<0x{byte:02X}>" for byte in CAMEL), "馬", "。吃", "▁cafe", "\u0301", "\t", "▁END", "!",
]  # fmt: skip


def byte_level_chain() -> tuple[Tokenizer, list[int]]:
    words = [byte_level(part) for part in BYTE_LEVEL_PARTS]
    tokenizer = byte_level_tokenizer(words=tuple(word for word in words if len(word) > 1))  # it has the bytes
    return tokenizer, [tokenizer.token_to_id(word) for word in words]


def byte_fallback_chain() -> tuple[Tokenizer, list[int]]:
    """As in Llama 2."""
    words = [f"<0x{byte:02X}>" for byte in range(256)]
    words += [part for part in BYTE_FALLBACK_PARTS if part not in words]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.add_special_tokens(["<|end|>", "<|begin|>"])
    return tokenizer, [tokenizer.token_to_id(part) for part in BYTE_FALLBACK_PARTS]


class Chain:
    """A pair whose text is known. The draft is wrong after every fourth token.

    Attributes:
        ids: The tokens, over and over.
    """

    prompt = "z"

    def __init__(self, folder: Path, make: Callable[[], tuple[Tokenizer, list[int]]], **files: Any) -> None:
        self.tokenizer, ids = make()
        self.prompt_ids = self.tokenizer.encode(self.prompt).ids
        config = tiny_config(n_embd=128, intermediate_size=16, padded_vocab_size=320, vocab_size=300, block_size=2048)
        successors = dict(zip(ids, [*ids[1:], ids[0]]))
        successors[self.prompt_ids[-1]] = ids[0]
        wrong = successors | {id_: 7 for id_ in ids[3::4]}
        self.ids = ids * 100
        self.folders = [
            write_checkpoint(
                folder / name, config, tokenizer=self.tokenizer, weights=chain_weights(config, table), **files
            )
            for name, table in (("target", successors), ("draft", wrong))
        ]
        self.llm = SpecLLM.load(*self.folders)

    def text(self, size: int) -> str:
        """The text that they add to the prompt's text, including a leading space."""
        return self.tokenizer.decode(self.prompt_ids + self.ids[:size])[len(self.prompt) :]

    def shortest(self, text: str) -> list[int]:
        """The shortest prefix of the tokens whose text begins with the given text."""
        return next(self.ids[:n] for n in range(len(self.ids)) if self.text(n).startswith(text))


@pytest.fixture(scope="module", params=[byte_level_chain, byte_fallback_chain], ids=["byte-level", "byte fallback"])
def chain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    return Chain(tmp_path_factory.mktemp("chain"), request.param)


# --- the target's text


@pytest.mark.parametrize("drafter", DRAFTERS)
def test_greedy_tokens_are_those_of_litgpt(llm: SpecLLM, pair: tuple[Path, Path], drafter: str) -> None:
    drafting = llm.with_drafter(drafter)
    for prompt, k in zip(PROMPTS, ("auto", 1, 7)):
        out = drafting.generate(prompt, max_new_tokens=80, temperature=0, speculative_k=k)
        assert out.token_ids == target_alone(pair[0], llm.codec.encode(prompt).tolist(), 80)
        assert out.text == llm.codec.tokenizer.processor.decode(out.token_ids)
        assert (out.finish_reason, out.stats.new_tokens, str(out)) == ("length", 80, out.text)
        assert len(out.drafted) == 80 and sum(out.drafted) == out.stats.accepted


def test_texts_of_growing_lengths_begin_alike_and_are_litgpts(llm: SpecLLM, pair: tuple[Path, Path]) -> None:
    """Beyond the K/V bucket sizes, and with the engine of the previous text."""
    longest = target_alone(pair[0], llm.codec.encode("abc").tolist(), 300)
    for size in (1, 2, 9, 60, 64, 70, 124, 130, 252, 260, 300, 40):
        assert llm.generate("abc", max_new_tokens=size, temperature=0).token_ids == longest[:size]


def test_a_sampled_text_is_the_same_for_every_drafter_and_k_when_coupled(llm: SpecLLM) -> None:
    settings = dict(max_new_tokens=60, temperature=0.9, top_k=40, top_p=0.95, sampler="coupled", seed=5)
    texts = {
        tuple(llm.with_drafter(drafter).generate(PROMPTS[2], speculative_k=k, **settings).token_ids)
        for drafter, k in [
            ("draft_model", "auto"),
            ("draft_model", 3),
            ("prompt_lookup", 7),
            ("lookup_then_model", 5),
            ("early_exit", 2),
            ("none", 0),
        ]
    }
    assert len(texts) == 1


class Foresight(Drafter, DraftSession):
    """A drafter that proposes given tokens, some of them wrong."""

    def __init__(self, tokens: Sequence[int], prompt_size: int) -> None:
        self.tokens, self.prompt_size = list(tokens), prompt_size

    def start(self, target: Any, max_length: int, sampler: Any) -> Foresight:
        return self

    def propose(self, token: int, input_pos: int, k: int) -> Proposal:
        begin = input_pos + 1 - self.prompt_size
        return Proposal(torch.tensor(self.tokens[begin : begin + k], dtype=torch.int64))


def test_a_drafter_of_the_callers_own_changes_the_rounds_and_not_the_text(
    llm: SpecLLM, pair: tuple[Path, Path]
) -> None:
    prompt = llm.codec.encode("abc").tolist()
    truth = target_alone(pair[0], prompt, 31)
    out = llm.with_drafter(Foresight(truth, len(prompt))).generate(
        "abc", max_new_tokens=31, temperature=0, speculative_k=4
    )
    # The prefill's token, then six rounds of four proposals and one of the target's own.
    assert (out.token_ids, out.stats.rounds, out.stats.acceptance_rate) == (truth, 6, 1.0)
    assert out.drafted == [False] + [True, True, True, True, False] * 6
    wrong = [(token + (i % 3 == 0)) % 256 for i, token in enumerate(truth)]
    out = llm.with_drafter(Foresight(wrong, len(prompt))).generate("abc", max_new_tokens=31, temperature=0)
    assert out.token_ids == truth and 0 < out.stats.acceptance_rate < 1


def test_a_drafter_in_the_place_of_another_drafts_from_the_next_text_on(llm: SpecLLM, pair: tuple[Path, Path]) -> None:
    truth = target_alone(pair[0], llm.codec.encode("abc").tolist(), 31)
    other, settings = llm.with_drafter("none"), dict(max_new_tokens=31, temperature=0)
    drafters = [None, Foresight(truth, 3), Foresight([5] * 31, 3), None]
    assert len(llm.codec.encode("abc")) == 3
    for k, rates in ((4, [0, 1, 0, 0]), ("auto", [0, 1, 0, 0])):
        outs = []
        for other.drafter in drafters:
            outs.append(other.generate("abc", speculative_k=k, **settings))
        assert [out.token_ids for out in outs] == [truth] * 4 and 5 not in truth
        assert [out.stats.acceptance_rate for out in outs] == rates
        assert [out.stats.proposed > 0 for out in outs] == [False, True, True, False]


def test_room_made_beforehand_serves_all_texts_that_fit(llm: SpecLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], KVCache.__init__
    monkeypatch.setattr(KVCache, "__init__", lambda self, *args: (made.append(args[3]), make(self, *args))[1])
    other = llm.with_drafter("draft_model")
    other.reserve(600)
    assert made == [600, 600]  # target and draft
    for prompt in ("a", "b" * 500):
        assert other.generate(prompt, max_new_tokens=20, temperature=0).token_ids
    assert made == [600, 600]


@pytest.mark.slow
@pytest.mark.parametrize("prompt_size", [5, 100])
def test_200_tokens_of_a_sliding_window_model_are_those_of_transformers(tmp_path: Path, prompt_size: int) -> None:
    config, weights, reference = build("mistral")
    assert config.sliding_window_size == 16 and isinstance(reference, transformers.MistralForCausalLM)
    generator = torch.Generator().manual_seed(1)
    noisy = {name: w + 0.01 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    target = write_checkpoint(tmp_path / "target", config, weights=weights)
    draft = write_checkpoint(tmp_path / "draft", config, weights=noisy)
    prompt = ("theoldmanandthesea" * 6)[:prompt_size]  # characters whose ids the small vocabulary has
    for drafter in ("draft_model", "prompt_lookup", "none"):
        llm = SpecLLM.load(target, draft, drafter=drafter, precision="32-true")
        ids = llm.codec.encode(prompt)
        assert len(ids) == prompt_size
        want = reference.generate(
            ids[None].long(), max_new_tokens=200, do_sample=False, eos_token_id=None, pad_token_id=0
        )[0, prompt_size:]
        out = llm.generate(prompt, max_new_tokens=200, temperature=0)
        assert out.token_ids == want.tolist()
        assert drafter != "draft_model" or 0.1 < out.stats.acceptance_rate < 1


# --- seeds and many prompts


def test_a_list_of_prompts_gives_the_texts_of_each_by_its_index(llm: SpecLLM) -> None:
    settings = dict(max_new_tokens=20, temperature=1.0, seed=3)
    outs = llm.generate(PROMPTS, **settings)
    assert [out.prompt for out in outs] == PROMPTS
    for index, (prompt, out) in enumerate(zip(PROMPTS, outs)):
        alone = llm.generate(prompt, index=index, **settings)
        assert (alone.text, alone.token_ids, alone.finish_reason) == (out.text, out.token_ids, out.finish_reason)
    more = llm.generate([*PROMPTS, "one more"], **settings)
    assert [out.token_ids for out in more[:-1]] == [out.token_ids for out in outs]
    assert llm.generate([], **settings) == []


@pytest.mark.parametrize("sampler", ["rejection", "coupled"])
def test_the_seed_and_the_index_decide_a_sampled_text(llm: SpecLLM, pair: tuple[Path, Path], sampler: str) -> None:
    settings = dict(max_new_tokens=20, temperature=1.0, sampler=sampler)
    first = llm.generate("abc", seed=3, **settings).token_ids
    llm.generate("something else", max_new_tokens=9)
    assert llm.generate("abc", seed=3, **settings).token_ids == first
    assert SpecLLM.load(*pair).generate("abc", seed=3, **settings).token_ids == first
    others = [llm.generate("abc", seed=seed, index=i, **settings).token_ids for seed, i in ((4, 0), (3, 1), (2**70, 0))]
    assert first not in others and len({tuple(other) for other in others}) == 3


def test_without_a_seed_torchs_global_generator_decides(llm: SpecLLM) -> None:
    texts, states = [], []
    for drafter in (llm, llm, llm.with_drafter("none")):
        torch.manual_seed(1)
        texts.append([drafter.generate("abc", max_new_tokens=20, sampler="coupled").token_ids for _ in range(2)])
        states.append(torch.get_rng_state())
    assert texts[0] == texts[1] == texts[2]
    assert texts[0][0] != texts[0][1]
    # Each text draws exactly one number.
    assert torch.equal(states[0], states[1]) and torch.equal(states[0], states[2])


def count_rows(monkeypatch: pytest.MonkeyPatch, model: Any) -> list[int]:
    """How many rows each prefill of the model runs from now on."""
    rows: list[int] = []
    prefill = model.prefill

    def counting(idx: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        rows.append(idx.size(1))
        return prefill(idx, *args, **kwargs)

    monkeypatch.setattr(model, "prefill", counting)
    return rows


def test_a_prompt_that_is_repeated_is_read_once(monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path]) -> None:
    settings = dict(max_new_tokens=16, temperature=1.0, seed=2)
    alone = [SpecLLM.load(*pair).generate(PROMPTS[2], index=i, **settings).token_ids for i in range(4)]
    llm = SpecLLM.load(*pair)
    rows = count_rows(monkeypatch, llm.placed.model)
    outs = llm.generate([PROMPTS[2]] * 4, batch_size=3, **settings)
    assert rows == [len(llm.codec.encode(PROMPTS[2]))]
    assert [out.token_ids for out in outs] == alone


def test_a_long_beginning_that_prompts_share_is_read_once(
    monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path]
) -> None:
    shared = "".join(random.Random(0).choices("abcdefgh ", k=700))
    prompts = [shared + " and now for this", shared + " or for that?", shared[:600]]
    settings = dict(max_new_tokens=16, temperature=1.0, seed=2)
    alone = [SpecLLM.load(*pair).generate(prompt, index=i, **settings).token_ids for i, prompt in enumerate(prompts)]
    llm = SpecLLM.load(*pair)
    rows = count_rows(monkeypatch, llm.placed.model)
    assert [out.token_ids for out in llm.generate(prompts, batch_size=3, **settings)] == alone
    assert rows == [512, len(prompts[0]) - 512, len(prompts[1]) - 512, len(prompts[2]) - 512]


# --- streams


def test_a_stream_gives_the_text_in_whole_characters(chain: Chain) -> None:
    for drafter, k in [("draft_model", 7), ("draft_model", 2), ("draft_model", 1), ("none", 0)]:
        stream = chain.llm.with_drafter(drafter).generate(
            chain.prompt, max_new_tokens=60, temperature=0, speculative_k=k, stream=True
        )
        pieces, latest = [], []
        for piece in stream:
            assert piece and "\ufffd" not in piece[:-1]
            assert "".join(text for text, _ in stream.latest) == piece
            pieces.append(piece)
            latest += stream.latest
        out = stream.completion
        assert "".join(pieces) == out.text == chain.text(60)
        assert out.token_ids == chain.ids[:60]
        assert len(pieces) >= out.stats.rounds / 3
        assert out.pieces == latest and out.pieces[0].drafted is False
        assert any(piece.drafted for piece in latest) == (drafter != "none")


def test_streams_of_any_bytes_join_to_the_text(llm: SpecLLM) -> None:
    """A random byte-level model: broken characters everywhere, the last one perhaps unfinished."""
    for seed in range(6):
        settings = dict(max_new_tokens=40 + seed, temperature=1.0, seed=seed)
        stream = llm.generate("abc", stream=True, **settings)
        pieces = list(stream)
        out = llm.generate("abc", **settings)
        assert "".join(pieces) == stream.completion.text == out.text
        assert out.text == llm.codec.tokenizer.processor.decode(out.token_ids)
        assert stream.completion.token_ids == out.token_ids


def test_nothing_is_streamed_before_it_is_asked_for(monkeypatch: pytest.MonkeyPatch, pair: tuple[Path, Path]) -> None:
    llm = SpecLLM.load(*pair)
    rows = count_rows(monkeypatch, llm.placed.model)
    stream = llm.generate("abc" * 8, stream=True)  # too long to be read in a round
    assert rows == []
    next(stream)
    assert rows == [24] and stream.completion is None


def test_two_streams_of_one_object_take_turns_without_disturbing_each_other(llm: SpecLLM) -> None:
    settings = dict(max_new_tokens=40, temperature=1.0, seed=4)
    alone = [llm.generate(prompt, **settings).text for prompt in PROMPTS[:2]]
    streams = [llm.generate(prompt, stream=True, **settings) for prompt in PROMPTS[:2]]
    texts = ["", ""]
    while not all(stream.completion for stream in streams):
        for i, stream in enumerate(streams):
            texts[i] += next(stream, "")
    assert texts == alone


def test_two_objects_at_once_have_nothing_in_common(chain: Chain, llm: SpecLLM) -> None:
    alone = llm.generate("abc", max_new_tokens=30, temperature=0).text
    one = llm.generate("abc", max_new_tokens=30, temperature=0, stream=True)
    two = chain.llm.generate(chain.prompt, max_new_tokens=30, temperature=0, stream=True)
    texts = ["", ""]
    while not (one.completion and two.completion):
        texts = [texts[0] + next(one, ""), texts[1] + next(two, "")]
    assert texts == [alone, chain.text(30)]


def test_a_stream_that_is_not_read_to_the_end_does_not_affect_later_texts(llm: SpecLLM) -> None:
    settings = dict(max_new_tokens=40, temperature=1.0, seed=4)
    alone = llm.generate(PROMPTS[0], **settings).text
    abandoned = llm.generate("something else", stream=True, **settings)
    next(abandoned)
    assert llm.generate(PROMPTS[0], **settings).text == alone
    abandoned.close()
    assert list(abandoned) == [] and abandoned.completion is None
    interrupted = llm.generate(PROMPTS[0], stream=True, **settings)
    next(interrupted)
    del interrupted
    assert llm.generate(PROMPTS[0], **settings).text == alone


@pytest.mark.slow
def test_threads_share_one_object(llm: SpecLLM) -> None:
    settings = dict(max_new_tokens=30, temperature=1.0, seed=6)
    jobs = [(prompt, index) for prompt in PROMPTS for index in range(2)]
    alone = {job: llm.generate(job[0], index=job[1], **settings).token_ids for job in jobs}
    seen: dict[tuple[str, int, int], list[int]] = {}

    def work(worker: int) -> None:
        for prompt, index in jobs[worker:] + jobs[:worker]:
            out = llm.generate(prompt, index=index, **settings)
            seen[prompt, index, worker] = out.token_ids

    threads = [threading.Thread(target=work, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(seen) == 4 * len(jobs)
    assert all(tokens == alone[prompt, index] for (prompt, index, _), tokens in seen.items())


# --- stops


# Within a token, across tokens, across blocks, characters of several tokens, white space, one of which only the
# beginning occurs, and several of which the earliest counts.
STOPS = [
    ["eats"], ["ats gr"], ["llama 🦙 eats grass"], ["🦙"], ["駱馬"], ["馬。"], ["\n\n"], ["\n"], ["  two駱"],
    ["e\u0301"],
    ["grass;\n\n  two camels"], ["llama eats", "ss;", "s;\n"], ["END!", "D!The llama", "D!"], ["The"], ["!The"],
    ["never"], ["The llama 🦙 eats grass;\n\n  two駱馬。吃 cafe\u0301\t END!The llama 🦙 eats"],
]  # fmt: skip


@pytest.mark.parametrize("stop", STOPS)
def test_the_text_ends_before_the_earliest_stop_string(chain: Chain, stop: list[str]) -> None:
    whole = chain.text(50)
    ends = [whole.find(string) for string in stop if string in whole]
    text = whole[: min(ends)] if ends else whole
    for drafter, k in [("draft_model", 7), ("draft_model", 2), ("none", 0)]:
        stream = chain.llm.with_drafter(drafter).generate(
            chain.prompt, max_new_tokens=50, temperature=0, speculative_k=k, stop=stop, stream=True
        )
        # The joined pieces are the text, without any part of a stop and with all that only looked like one.
        assert "".join(stream) == text == stream.completion.text
        assert stream.completion.finish_reason == ("stop" if ends else "length")
        assert stream.completion.token_ids == (chain.shortest(text) if ends else chain.ids[:50])
        assert len(stream.completion.drafted) == len(stream.completion.token_ids) == stream.completion.stats.new_tokens
        assert "".join(piece.text for piece in stream.completion.pieces) == text


def test_a_stop_in_what_an_unfinished_character_decodes_to_is_found(chain: Chain) -> None:
    settings = dict(max_new_tokens=5, temperature=0, stop="\ufffd")
    for k in (7, 0):
        out = chain.llm.generate(chain.prompt, speculative_k=k, **settings)
        assert chain.text(5).endswith("\ufffd") and out.text == chain.text(5).rstrip("\ufffd")
        assert (out.token_ids, out.finish_reason) == (chain.shortest(out.text), "stop")
        assert len(out.drafted) == out.stats.new_tokens == len(out.token_ids)


def test_what_may_become_a_stop_is_held_back_until_it_fails(chain: Chain) -> None:
    stop = "llama 🦙 eats hay"
    shown = ""
    for piece in chain.llm.with_drafter("none").generate(
        chain.prompt, max_new_tokens=50, temperature=0, stop=stop, stream=True
    ):
        shown += piece
        assert not any(shown.endswith(stop[:size]) for size in range(1, len(stop)))
    assert shown == chain.text(50)


def test_stop_strings_do_not_count_in_the_first_tokens(chain: Chain) -> None:
    cycle = len(set(chain.ids))
    settings = dict(max_new_tokens=2 * cycle, temperature=0, stop="grass")
    assert chain.llm.generate(chain.prompt, **settings).text == chain.text(cycle).partition("grass")[0]
    later = chain.llm.generate(chain.prompt, min_new_tokens=cycle, **settings)
    assert later.text == chain.text(2 * cycle).rpartition("grass")[0]
    assert later.finish_reason == "stop"


@pytest.mark.parametrize("eos", [[8, 6], [6], 6])
def test_every_eos_id_stops(tmp_path: Path, eos: int | list[int]) -> None:
    ids = byte_level_chain()[1]
    eos_ids = [ids[i] for i in eos] if isinstance(eos, list) else ids[eos]
    chain = Chain(tmp_path, byte_level_chain, generation_config={"eos_token_id": eos_ids})
    for drafter, k in [("draft_model", 7), ("draft_model", 2), ("none", 0)]:
        drafting = chain.llm.with_drafter(drafter)
        out = drafting.generate(chain.prompt, max_new_tokens=50, temperature=0, speculative_k=k)
        assert (out.token_ids, out.text, out.finish_reason) == (chain.ids[:6], chain.text(6), "stop")
        stream = drafting.generate(chain.prompt, max_new_tokens=50, temperature=0, speculative_k=k, stream=True)
        assert "".join(stream) == chain.text(6)


def test_until_min_new_tokens_an_eos_has_probability_0(pair: tuple[Path, Path], tmp_path: Path) -> None:
    weights = torch.load(pair[0] / "lit_model.pth", weights_only=True)
    prompt = list(b"abc")
    free = target_alone(pair[0], SpecLLM.load(pair[0]).codec.encode("abc").tolist(), 12)
    eos = sorted({free[2], free[5]})
    target = write_checkpoint(
        tmp_path / "target", tiny_config(block_size=1280), weights=weights, generation_config={"eos_token_id": eos}
    )
    llm = SpecLLM.load(target, pair[1])
    model = litgpt.model.GPT(Config.from_file(target / "model_config.yaml")).eval()
    model.load_state_dict(weights)
    prompt = llm.codec.encode("abc").tolist()
    tokens: list[int] = []
    while len(tokens) < 40:
        with torch.no_grad():
            logits = model(torch.tensor([prompt + tokens]))[0, -1]
        if len(tokens) < 9:
            logits[[*eos, llm.codec.tokenizer.eos_id]] = float("-inf")
        if (token := int(logits.argmax())) in eos:
            break
        tokens.append(token)
    for drafter in ("draft_model", "prompt_lookup", "none"):
        out = llm.with_drafter(drafter).generate("abc", max_new_tokens=40, min_new_tokens=9, temperature=0)
        assert out.token_ids == tokens
        assert out.finish_reason == ("stop" if len(tokens) < 40 else "length")


# --- memory


def peak_megabytes() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / 2**20 if sys.platform == "darwin" else peak / 2**10


@pytest.mark.slow
def test_memory_does_not_grow_in_200_generations(tmp_path: Path) -> None:
    ids = byte_level_chain()[1]

    def caches() -> int:
        gc.collect()
        return sum(type(each) is KVCache for each in gc.get_objects())

    def generate(i: int) -> None:
        # Each needs memory for up to 1900 tokens, 4 MB, and ends early; every third stream is dropped before its end.
        settings = dict(max_new_tokens=1600 + i, temperature=0, stop="never" if i % 2 else None)
        if i % 3 == 0:
            next(chain.llm.generate(chain.prompt, stream=True, **settings))
        else:
            assert chain.llm.generate(chain.prompt * (1 + i % 5), **settings).token_ids == ids[:5]

    others = caches()
    chain = Chain(tmp_path, byte_level_chain, generation_config={"eos_token_id": ids[5]})
    for i in range(41):
        generate(i)
    peak = peak_megabytes()
    for i in range(41, 242):
        generate(i)
    assert caches() == others + 2  # the target's and the draft's, to be used again
    assert peak_megabytes() - peak < 32


# --- what cannot be used


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        (dict(max_new_tokens=0), ["max_new_tokens", "at least 1", "0"]),
        (dict(max_new_tokens=1278), ["3 tokens", "1278", "1281", "block_size", "1280"]),
        (dict(max_new_tokens=5, min_new_tokens=6), ["min_new_tokens", "5", "6"]),
        (dict(min_new_tokens=-1), ["min_new_tokens", "-1"]),
        (dict(temperature=-0.5), ["temperature", "-0.5"]),
        (dict(temperature=float("nan")), ["temperature", "nan"]),
        (dict(top_k=0), ["top_k", "0"]),
        (dict(top_p=1.01), ["top_p", "1.01"]),
        (dict(sampler="beam"), ["sampler", "beam", "coupled"]),
        (dict(speculative_k=-1), ["speculative_k", "-1"]),
        (dict(speculative_k=2.5), ["speculative_k", "2.5"]),
        (dict(speculative_k=8), ["speculative_k", "8", "verify_width=9"]),
        (dict(stop=["x", ""]), ["stop", "empty"]),
        (dict(prompt=["a", "b"], stream=True), ["stream", "one prompt"]),
        (dict(prompt=""), ["prompt", "no tokens"]),
        (dict(prompt="\ud83e"), ["prompt", "Unicode"]),
        (dict(prompt=5, stream=False), ["prompt", "5"]),
        (dict(prompt=[5], stream=False), ["prompt", "string", "5"]),
    ],
)
def test_a_setting_that_cannot_be_used_is_named_before_anything_runs(
    llm: SpecLLM, settings: dict[str, Any], named: list[str]
) -> None:
    for stream in [settings["stream"]] if "stream" in settings else [False, True]:
        with pytest.raises(InputError) as error:
            llm.generate(**({"prompt": "abc"} | settings | {"stream": stream}))
        assert all(word in str(error.value) for word in named), error.value
        assert "\n" not in str(error.value)


def test_loading_says_what_is_missing(pair: tuple[Path, Path]) -> None:
    for arguments, named in [
        (dict(draft_dir=pair[1]), ["draft_dir", "checkpoint_dir"]),
        (dict(checkpoint_dir=pair[0], drafter="draft_model"), ["draft_dir"]),
        (dict(checkpoint_dir=pair[0], drafter="oracle"), ["drafter", "oracle", "prompt_lookup"]),
        (dict(checkpoint_dir=pair[0], drafter=object()), ["drafter", "object", "litspec.drafters.Drafter"]),
        (dict(checkpoint_dir=pair[0], verify_width=0), ["verify_width", "0"]),
        (dict(checkpoint_dir=pair[0], precision="8-bit"), ["precision", "8-bit"]),
    ]:
        with pytest.raises(InputError) as error:
            SpecLLM.load(**arguments)
        assert all(word in str(error.value) for word in named), error.value


# --- the embedded pair


def test_no_argument_loads_the_embedded_pair_which_shows_itself() -> None:
    llm = SpecLLM.load()
    assert "embedded" in llm.describe() and "Drafter: draft_model" in llm.describe()
    out = llm.generate("It was a truth", max_new_tokens=24, temperature=0)
    assert (
        isinstance(out, Completion)
        and out.token_ids
        == llm.with_drafter("none").generate("It was a truth", max_new_tokens=24, temperature=0).token_ids
    )
    assert "litspec-completion" in out._repr_html_()
    assert len(out.plot().axes) == 2


def test_prompt_lookup_brings_three_tokens_a_round_where_the_target_repeats_a_paragraph(tmp_path: Path) -> None:
    """A target that repeats the paragraph of its prompt: every token's successor there is its own."""
    paragraph = "The quick brown fox jumps"  # without a character that comes twice, but for spaces
    letters = [c for i, c in enumerate(paragraph) if c not in paragraph[:i]]
    tokenizer, config = byte_level_tokenizer(), tiny_config(n_embd=128, block_size=256)
    ids = tokenizer.encode("".join(letters)).ids
    successors = dict(zip(ids, [*ids[1:], ids[0]]))
    target = write_checkpoint(tmp_path / "copier", config, weights=chain_weights(config, successors))
    llm = SpecLLM.load(target, drafter="prompt_lookup")
    prompt = "".join(letters)
    out = llm.generate(prompt, max_new_tokens=4 * len(prompt), temperature=0.0)
    assert out.text == 4 * prompt
    assert (
        out.token_ids
        == llm.with_drafter("none")
        .generate(prompt, max_new_tokens=100, temperature=0.0)
        .token_ids[: len(out.token_ids)]
    )
    assert out.stats.tokens_per_round >= 3


# --- stop strings that name special tokens


def test_a_stop_string_that_is_a_special_token_stops(tmp_path: Path) -> None:
    """A token of the text is made special: then the ids contain it and the text does not."""
    config = tiny_config()
    weights = lively_weights(config, seed=3)
    plain = SpecLLM.load(write_checkpoint(tmp_path / "plain", config, weights=weights), accelerator="cpu")
    whole = plain.generate("abc", max_new_tokens=40, temperature=0.0)
    vocabulary = byte_level_tokenizer()
    ids = whole.token_ids
    at, before = next((i, ids[i - 1]) for i, id_ in enumerate(ids) if i > 6 and id_ not in ids[:i] and ids[i - 1] < 94)
    name = vocabulary.id_to_token(ids[at])
    tokenizer = byte_level_tokenizer(special=(EOS, BOS, name))
    folder = write_checkpoint(tmp_path / "special", config, weights=weights, tokenizer=tokenizer)
    llm = SpecLLM.load(folder, accelerator="cpu")
    free = llm.generate("abc", max_new_tokens=40, temperature=0.0)
    assert free.token_ids == ids and free.finish_reason == whole.finish_reason
    for stop in (name, [name], ["nowhere", name]):
        stopped = llm.generate("abc", max_new_tokens=40, temperature=0.0, stop=stop)
        assert stopped.finish_reason == "stop" and stopped.text == llm.codec.decode(ids[:at])
        assert len(stopped.token_ids) <= at
    last = vocabulary.decode([before])
    stopped = llm.generate("abc", max_new_tokens=40, temperature=0.0, stop=[last + name], stream=True)
    assert "".join(stopped) == llm.codec.decode(ids[: at - 1]) and stopped.completion.finish_reason == "stop"


def test_a_stop_string_that_can_never_come_is_refused(llm: SpecLLM) -> None:
    with pytest.raises(InputError, match="surrogate"):
        llm.generate("abc", stop=["\ud83e"])


def test_threads_are_set_before_the_weights_are_laid_out() -> None:
    before = torch.get_num_threads()
    try:
        SpecLLM.load(threads=before + 1)
        assert torch.get_num_threads() == before + 1
        SpecLLM.load()
        assert torch.get_num_threads() == before + 1  # None changes nothing
    finally:
        torch.set_num_threads(before)
    with pytest.raises(InputError, match="threads must be at least 1, got 0"):
        SpecLLM.load(threads=0)


@pytest.mark.parametrize(("slow", "advised"), [(2, True), (1, False)])
def test_a_user_is_told_where_one_thread_is_faster(slow: int, advised: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def verify_slowly(self: GPT, *args: Any, **kwargs: Any) -> None:
        # In place of a step, which threads of a busy machine may slow down too.
        time.sleep(0.02 if torch.get_num_threads() == slow else 0.001)

    monkeypatch.setattr(GPT, "verify", verify_slowly)
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        notes = SpecLLM.load().notes
        assert torch.get_num_threads() == 2
        assert not SpecLLM.load(threads=2).notes  # an explicit number needs no advice
    finally:
        torch.set_num_threads(before)
    assert [("try --threads 1" in note) for note in notes] == [True] * advised
