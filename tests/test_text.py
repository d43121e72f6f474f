"""Encoding and decoding, compared with LitGPT's encoding and the tokenizers' decoding of a whole text."""

from __future__ import annotations

import functools
import io
import itertools
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
import torch
from checkpoints import BOS, EOS, byte_level_tokenizer, tiny_config, write_checkpoint
from hypothesis import given, settings
from hypothesis import strategies as st
from litgpt.config import Config
from litgpt.prompts import PromptStyle, save_prompt_style
from litgpt.tokenizer import Tokenizer as LitGPTTokenizer
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from litspec.errors import InputError
from litspec.text import Detokenizer, TextCodec

TEXTS = [
    "The llama, it is said, does not don't. 'Tis the season! Isn't it?",
    "Una llama vio a otra llama; la llama se fue.",
    "駱馬吃草。草很好吃。我喜歡駱馬。",
    "🦙🦙 llamas 👩‍👩‍👧 eat 🌿, naïve café, cafe\u0301, ﷽",
    "  two leading spaces and\n\na paragraph\twith a tab",
    "नमस्ते दुनिया — Здравствуй, мир",
]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
SPECIAL = ["<s>", "</s>", "<unk>"]


def _trained_byte_level() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=SPECIAL,
        show_progress=False,
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    # Added tokens are spelled in plain characters, some of which byte-level BPE also uses for bytes.
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("é x", special=False), AddedToken("é")])
    return tokenizer


def _byte_level_rewritten() -> Tokenizer:
    tokenizer = byte_level_tokenizer()
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("l", "ll")])
    return tokenizer


def _byte_fallback(decoder: Any) -> Tokenizer:
    words = ["▁", "▁▁", "▁the", "▁llama", "a", "s", "吃", "é", "\u0301", "'", "\ufffd", "<0x", "<0xZZ>", "."]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate([*BYTES, *words])}, [], byte_fallback=True))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.add_tokens([AddedToken("<tool>", special=False)])
    tokenizer.decoder = decoder
    return tokenizer


def _llama() -> Tokenizer:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    return _byte_fallback(decoders.Sequence(steps))


def _gemma() -> Tokenizer:
    return _byte_fallback(decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]))


def _metaspace(scheme: str) -> Tokenizer:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    trainer = trainers.UnigramTrainer(vocab_size=160, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False)
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


def _wordpiece() -> Tokenizer:
    words = [
        "do",
        "is",
        "##n",
        "'",
        "##'",
        "t",
        "##t",
        "n't",
        "'s",
        ".",
        "!",
        "##.",
        "llama",
        "##s",
        "駱",
        "##馬",
        "not",
    ]
    tokenizer = Tokenizer(models.WordPiece({w: i for i, w in enumerate([*words, "[UNK]", "[SEP]"])}, unk_token="[UNK]"))
    tokenizer.add_special_tokens(["[SEP]"])
    tokenizer.decoder = decoders.WordPiece(cleanup=True)
    return tokenizer


def _word_ends() -> Tokenizer:
    words = ["llama</w>", "lla", "ma</w>", "</w>", "a", ".</w>", "é</w>"]
    tokenizer = Tokenizer(models.BPE({w: i for i, w in enumerate(words)}, []))
    tokenizer.decoder = decoders.BPEDecoder(suffix="</w>")
    return tokenizer


def _no_decoder() -> Tokenizer:
    return Tokenizer(models.WordLevel({w: i for i, w in enumerate(["llamas", "eat", "grass", "."])}, unk_token="."))


def _rewriting() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(["a", "b", "ab", " "])}, unk_token=" "))
    tokenizer.decoder = decoders.Sequence([decoders.Fuse(), decoders.Replace(Regex("ab+"), "x")])
    return tokenizer


def _sentencepiece(**options: Any) -> sentencepiece.SentencePieceProcessor:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS[:3] * 3),
        model_writer=model,
        hard_vocab_limit=False,
        character_coverage=0.98,
        minloglevel=2,
        num_threads=1,
        **options,
    )
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


KINDS: dict[str, Callable[[], Any]] = {
    "byte-level BPE": _trained_byte_level,
    "byte-level BPE without merges": byte_level_tokenizer,
    "byte-level BPE that is rewritten": _byte_level_rewritten,
    "byte fallback, leading space stripped": _llama,
    "byte fallback": _gemma,
    "metaspace always": functools.partial(_metaspace, "always"),
    "metaspace first": functools.partial(_metaspace, "first"),
    "metaspace never": functools.partial(_metaspace, "never"),
    "wordpiece with cleanup": _wordpiece,
    "end-of-word suffix": _word_ends,
    "no decoder": _no_decoder,
    "a rewriting decoder": _rewriting,
    "sentencepiece BPE": functools.partial(
        _sentencepiece, model_type="bpe", vocab_size=340, byte_fallback=True, user_defined_symbols=["<tool>"]
    ),
    "sentencepiece BPE as Llama's": functools.partial(
        _sentencepiece, model_type="bpe", vocab_size=340, byte_fallback=True, remove_extra_whitespaces=False
    ),
    "sentencepiece unigram": functools.partial(_sentencepiece, model_type="unigram", vocab_size=90),
    "sentencepiece without prefix": functools.partial(
        _sentencepiece, model_type="bpe", vocab_size=340, byte_fallback=True, add_dummy_prefix=False
    ),
}


@functools.cache
def tokenizer_of(kind: str) -> Any:
    """Shaped as LitGPT's tokenizer: a processor and the name of its library."""
    processor = KINDS[kind]()
    if isinstance(processor, sentencepiece.SentencePieceProcessor):
        return SimpleNamespace(processor=processor, backend="sentencepiece", size=processor.get_piece_size())
    return SimpleNamespace(processor=processor, backend="huggingface", size=processor.get_vocab_size())


def whole(tokenizer: Any, ids: Sequence[int]) -> str:
    """The library's decoding of all tokens; sentencepiece alone cannot be asked for ids beyond its vocabulary."""
    known = [id_ for id_ in ids if tokenizer.backend == "huggingface" or id_ < tokenizer.size]
    return tokenizer.processor.decode(known)


def id_lists(tokenizer: Any, max_size: int = 24) -> st.SearchStrategy[list[int]]:
    """Ids of a real text, byte tokens, any token, ids beyond the vocabulary, mixed."""
    real = [tokenizer.processor.encode(text) for text in (*TEXTS, "🦙吃\u0301")]
    real = [text if isinstance(text, list) else text.ids for text in real]
    slices = st.builds(
        lambda ids, at, n: ids[at : at + n], st.sampled_from(real), st.integers(0, 20), st.integers(1, 8)
    )
    to_id = getattr(tokenizer.processor, "piece_to_id", None) or tokenizer.processor.token_to_id
    of_bytes = [to_id(f"<0x{byte:02X}>") for text in ("🦙", "吃", "é", "a") for byte in text.encode()]
    of_bytes = [id_ for id_ in of_bytes if id_ not in (None, 0)] or [0]
    single = st.one_of(st.integers(0, tokenizer.size + 2), st.sampled_from(of_bytes), st.integers(0, 4)).map(
        lambda i: [i]
    )
    return st.lists(st.one_of(slices, single), max_size=12).map(lambda parts: list(itertools.chain(*parts))[:max_size])


def pieces(detokenizer: Detokenizer, ids: Sequence[int], sizes: Sequence[int]) -> list[str]:
    """The output when tokens are pushed in blocks of the given sizes, cyclically."""
    out, at, turn = [], 0, 0
    while at < len(ids):
        size = sizes[turn % len(sizes)]
        out.append(detokenizer.push(ids[at : at + size]))
        at, turn = at + size, turn + 1
    return [*out, detokenizer.flush()]


@pytest.mark.parametrize("kind", KINDS)
def test_joined_pieces_are_the_text_of_all_tokens_and_its_shortest_prefixes_are_found(kind: str) -> None:
    tokenizer = tokenizer_of(kind)

    @settings(max_examples=80, derandomize=True, deadline=None, database=None)
    @given(id_lists(tokenizer), st.lists(st.integers(1, 5), min_size=1, max_size=3), st.data())
    def check(ids: list[int], sizes: list[int], data: st.DataObject) -> None:
        detokenizer = Detokenizer(tokenizer)
        got = pieces(detokenizer, ids, sizes)
        text = whole(tokenizer, ids)
        assert "".join(got) == detokenizer.text == text
        assert detokenizer.char_count == len(text)

        seen = data.draw(st.integers(0, len(ids)))
        unfinished = Detokenizer(tokenizer)
        assert text.startswith(unfinished.push(ids[:seen]))
        texts = [whole(tokenizer, ids[:n]) for n in range(len(ids) + 1)]
        for asked in (detokenizer, unfinished):
            for count in range(asked.char_count + 1):
                shortest = next(n for n, prefix in enumerate(texts) if prefix.startswith(text[:count]))
                assert asked.tokens_for(count) == shortest

    check()


@pytest.mark.parametrize(
    "kind", [kind for kind in KINDS if "rewrit" not in kind]
)  # which change the text before as well
def test_behind_other_tokens_the_text_is_what_they_leave_to_add(kind: str) -> None:
    tokenizer = tokenizer_of(kind)

    @settings(max_examples=30, derandomize=True, deadline=None, database=None)
    @given(st.sampled_from(TEXTS), id_lists(tokenizer, 12))
    def check(prompt: str, ids: list[int]) -> None:
        before = tokenizer.processor.encode(prompt)
        before = before if isinstance(before, list) else before.ids
        whole_text, known = whole(tokenizer, before + ids), whole(tokenizer, before)
        got = "".join(pieces(Detokenizer(tokenizer, after=before), ids, [1]))
        if whole_text.startswith(known):  # not where the prompt ends in a run of bytes that more bytes spoil
            assert got == whole_text[len(known) :]

    check()


def released(kind: str, ids: list[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer_of(kind))
    return [*(detokenizer.push([id_]) for id_ in ids), detokenizer.flush()]


def byte_ids(kind: str, data: bytes) -> list[int]:
    processor = tokenizer_of(kind).processor
    if "level" in kind:
        return [processor.token_to_id(token) for token in _spelled(data)]
    return [processor.token_to_id(f"<0x{byte:02X}>") for byte in data]


def _spelled(data: bytes) -> list[str]:
    """How byte-level BPE spells bytes, asked of the library itself by way of every two-byte character."""
    spelling: dict[int, str] = {}
    for point in [*range(0x80), *range(0x80, 0x800), 0x20AC, 0x4E00, 0x9FFF, 0xE000, 0x1F999, 0x10FFFF, 0x40000]:
        split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(chr(point))
        spelling.update(zip(chr(point).encode(), split[0][0]))
    return [spelling[byte] for byte in data]


def test_an_emoji_of_four_byte_tokens_comes_out_whole() -> None:
    ids = byte_ids("byte-level BPE without merges", "a🦙b".encode())
    assert released("byte-level BPE without merges", ids) == ["a", "", "", "", "🦙", "b", ""]


def test_a_stray_byte_becomes_one_replacement_character_in_its_place() -> None:
    ids = byte_ids("byte-level BPE without merges", b"a\x80b\xf0\x9fc")
    assert released("byte-level BPE without merges", ids) == ["a", "\ufffd", "b", "", "", "\ufffdc", ""]


def test_an_unfinished_character_at_the_end_comes_with_the_flush() -> None:
    ids = byte_ids("byte-level BPE without merges", b"a\xf0\x9f\xa6")
    assert released("byte-level BPE without merges", ids) == ["a", "", "", "", "\ufffd"]


def test_a_run_of_byte_tokens_waits_for_its_end_since_one_wrong_byte_spoils_all_of_it() -> None:
    kind = "byte fallback"
    a = tokenizer_of(kind).processor.token_to_id("a")
    assert released(kind, [*byte_ids(kind, "🦙".encode()), a]) == ["", "", "", "", "🦙a", ""]
    assert released(kind, [*byte_ids(kind, "🦙".encode()), *byte_ids(kind, b"\x80"), a])[-2] == "\ufffd" * 5 + "a"


def test_spaces_between_words_are_kept_and_the_leading_one_is_left_to_the_tokenizer() -> None:
    kind = "byte fallback, leading space stripped"
    processor = tokenizer_of(kind).processor
    the, llama = processor.token_to_id("▁the"), processor.token_to_id("▁llama")
    assert released(kind, [the, llama, the]) == ["the", " llama", " the", ""]
    detokenizer = Detokenizer(tokenizer_of(kind), after=[llama])
    assert detokenizer.push([the]) == " the"


@pytest.mark.parametrize("kind", ["byte-level BPE", "byte fallback", "sentencepiece BPE", "metaspace always"])
@pytest.mark.parametrize("stream", ["text", "stray bytes", "one byte", "special"])
def test_the_work_per_token_does_not_grow_with_the_text(kind: str, stream: str) -> None:
    tokenizer, work = tokenizer_of(kind), [0]
    processor = tokenizer.processor
    to_id = getattr(processor, "piece_to_id", None) or processor.token_to_id
    rng = random.Random(0)
    stray = to_id("<0x80>") or 0 if "level" not in kind else byte_ids("byte-level BPE", b"\x80")[0]
    one = {"text": lambda: rng.randrange(tokenizer.size), "one byte": lambda: stray, "special": lambda: to_id("<s>")}
    one["stray bytes"] = lambda: rng.choice([stray, to_id("a") or 0, stray])

    class Counting:
        def decode(self, ids: list[int]) -> str:
            work[0] += len(ids)
            return processor.decode(ids)

        def __getattr__(self, name: str) -> Any:
            return getattr(processor, name)

    detokenizer = Detokenizer(SimpleNamespace(processor=Counting(), backend=tokenizer.backend))
    ids = [one[stream]() for _ in range(3000)]
    for id_ in ids:
        detokenizer.push([id_])
        detokenizer.tokens_for(detokenizer.char_count)
    detokenizer.flush()
    assert detokenizer.text == whole(tokenizer, ids)
    assert work[0] <= 60 * len(ids)  # a run of byte tokens is looked at once for each of its tokens


# --- encoding ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "tiny")


def test_a_prompt_is_encoded_in_its_style_as_litgpt_does_it(tmp_path: Path) -> None:
    for name in ("tiny-llama-test", "Llama-2-7b-chat-hf", "phi-2", "Qwen2.5-0.5B"):
        folder = write_checkpoint(tmp_path / name, tiny_config(name=name))
        config = Config.from_file(folder / "model_config.yaml")
        ids = TextCodec(folder, config).encode("Why?", "Be brief.")
        style = PromptStyle.from_config(config)
        expected = LitGPTTokenizer(folder).encode(style.apply("Why?", sys_prompt="Be brief."))
        assert ids.dtype == torch.int32
        assert torch.equal(ids, expected)


def test_a_style_saved_in_the_folder_wins_over_the_models_name(folder: Path) -> None:
    save_prompt_style("alpaca", folder)
    codec = TextCodec(folder, tiny_config(name="phi-2"))
    assert "### Instruction:\nWhy?" in codec.decode(codec.encode("Why?"))


def test_bos_is_litgpts_decision_by_the_folders_name(tmp_path: Path) -> None:
    for name, first in (("Llama-3.2-1B", BOS), ("other", "W")):
        codec = TextCodec(write_checkpoint(tmp_path / name), tiny_config())
        assert codec.tokenizer.processor.id_to_token(int(codec.encode("Why?")[0])) == first


def test_a_prompt_without_tokens_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="no tokens"):
        TextCodec(folder, tiny_config()).encode("")


def test_a_prompt_that_is_not_valid_unicode_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match="not valid Unicode"):
        TextCodec(folder, tiny_config()).encode("a\udc80b")
    with pytest.raises(InputError, match="takes a string"):
        TextCodec(folder, tiny_config()).encode(["a", "list"])


def test_a_token_that_the_model_has_no_row_for_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"token id 257, but .* 257\)"):
        TextCodec(folder, tiny_config(vocab_size=257, padded_vocab_size=257)).encode(f"a{BOS}")


def test_bos_without_a_bos_token_is_refused(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "Llama-3-x", tokenizer_config={"bos_token": None})
    with pytest.raises(InputError, match="has no bos_token"):
        TextCodec(folder, tiny_config()).encode("Why?")


def test_decoding_is_the_tokenizers_own_and_takes_a_tensor(folder: Path) -> None:
    codec = TextCodec(folder, tiny_config())
    ids = codec.encode("naïve 🦙")
    assert codec.decode(ids) == codec.decode(ids.tolist()) == "naïve 🦙"
    assert codec.decode(ids, after=ids) == "naïve 🦙"
    assert codec.decode([]) == ""


# --- stops ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "generation_config, expected",
    [
        (None, ((256,),)),
        ({"eos_token_id": 3}, ((256,), (3,))),
        ({"eos_token_id": [3, 256, 4]}, ((256,), (3,), (4,))),
        ({"eos_token_id": None}, ((256,),)),
        ({}, ((256,),)),
        # As in Llama 3.2's file: a comma is missing, another is too many.
        ('{\n  "eos_token_id": [\n    3,\n    4,\n  ],\n  "top_p": 0.9\n  "do_sample": true\n}', ((256,), (3,), (4,))),
    ],
)
def test_every_eos_id_stops(tmp_path: Path, generation_config: Any, expected: Any) -> None:
    folder = write_checkpoint(tmp_path / "tiny", generation_config=generation_config)
    codec = TextCodec(folder, tiny_config())
    assert codec.stop_tokens == expected
    assert len(codec.notes) == isinstance(generation_config, str)


def test_a_list_of_eos_ids_that_litgpt_takes_for_one_id_still_stops_at_each(tmp_path: Path) -> None:
    folder = write_checkpoint(
        tmp_path / "tiny", tokenizer_config={"eos_token": None}, generation_config={"eos_token_id": [3, 4]}
    )
    assert LitGPTTokenizer(folder).eos_id == [3, 4]
    codec = TextCodec(folder, tiny_config())
    assert codec.stop_tokens == ((3,), (4,))
    assert codec.encode("Why?").tolist() == LitGPTTokenizer(folder).encode("Why?").tolist()


def test_the_styles_own_stops_join_in(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", tokenizer=byte_level_tokenizer(special=(EOS, BOS, "<|eot_id|>")))
    codec = TextCodec(folder, tiny_config(name="Llama-3-8B-Instruct"))
    assert codec.stop_tokens == ((256,), (258,))


def test_without_any_eos_nothing_stops(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", tokenizer_config={"eos_token": None})
    assert TextCodec(folder, tiny_config()).stop_tokens == ()


def test_ids_that_the_model_cannot_produce_are_ignored_and_noted(tmp_path: Path) -> None:
    folder = write_checkpoint(tmp_path / "tiny", generation_config={"eos_token_id": [3, 10**30, -1]})
    codec = TextCodec(folder, tiny_config())
    assert codec.stop_tokens == ((256,), (3,))
    assert len(codec.notes) == 1 and str(10**30) in codec.notes[0]


@pytest.mark.parametrize("eos", ["2", 2.0, True, {"id": 2}, [2, "3"], [[2]]])
def test_eos_ids_of_the_wrong_type_are_refused(tmp_path: Path, eos: Any) -> None:
    folder = write_checkpoint(tmp_path / "tiny", generation_config={"eos_token_id": eos})
    with pytest.raises(InputError, match=r"generation_config\.json.*integer"):
        TextCodec(folder, tiny_config())


def test_broken_files_of_the_tokenizer_are_named(tmp_path: Path) -> None:
    cases: list[tuple[str, str | None, str]] = [
        ("tokenizer.json", "{", "cannot be loaded as a tokenizer"),
        ("tokenizer.json", "version https://git-lfs.github.com/spec/v1", "cannot be loaded as a tokenizer"),
        ("tokenizer_config.json", "{", "not valid JSON"),
        ("tokenizer_config.json", "[]", "must hold a JSON object"),
        ("tokenizer_config.json", "{}", "no tokenizer_class"),
        ("tokenizer_config.json", json.dumps({"tokenizer_class": "T", "eos_token": "<nowhere>"}), "<nowhere>"),
        ("generation_config.json", "eos: 2", "not valid JSON"),
        ("generation_config.json", "[2]", "must hold a JSON object"),
        ("prompt_style.yaml", "class_path: no.such.Style", "not one of LitGPT's prompt styles"),
        ("prompt_style.yaml", "{", "no prompt style"),
    ]
    for number, (name, content, reason) in enumerate(cases):
        folder = write_checkpoint(tmp_path / str(number))
        (folder / name).write_text(content)
        with pytest.raises(InputError) as caught:
            TextCodec(folder, tiny_config())
        message = str(caught.value)
        assert reason in message and "\n" not in message and message.endswith(".")
        assert name in message or "tokenizer.json" in message


def test_a_style_that_needs_a_token_the_tokenizer_lacks_is_refused(folder: Path) -> None:
    with pytest.raises(InputError, match=r"Llama3.*eot_id"):
        TextCodec(folder, tiny_config(name="Llama-3-8B-Instruct"))


def test_a_folder_with_a_sentencepiece_model_only_reads_and_writes_text(tmp_path: Path) -> None:
    processor = tokenizer_of("sentencepiece BPE").processor
    folder = tmp_path / "tiny"
    write_checkpoint(folder, generation_config={"eos_token_id": [2, 7]})
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(processor.serialized_model_proto())
    codec = TextCodec(folder, tiny_config(vocab_size=512, padded_vocab_size=512))
    assert codec.stop_tokens == ((2,), (7,))
    ids = codec.encode("la llama 🦙")
    assert ids.tolist() == processor.encode("la llama 🦙")
    assert "".join(pieces(codec.detokenizer(), ids.tolist(), [1])) == "la llama 🦙"
    assert codec.decode([*ids.tolist(), 511]) == "la llama 🦙"


# --- settings of training


@pytest.mark.parametrize("side", ["left", "right"])
def test_truncation_and_padding_in_the_file_do_not_touch_a_prompt(tmp_path: Path, side: str) -> None:
    """transformers reads the same file and encodes all of the prompt."""
    tokenizer = byte_level_tokenizer()
    tokenizer.enable_truncation(16, direction=side)
    tokenizer.enable_padding(length=48, direction=side, pad_token=EOS, pad_id=256)
    folder = write_checkpoint(tmp_path / "tuned", tokenizer=tokenizer)
    codec = TextCodec(folder, tiny_config())
    fast = PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    for prompt in ("short", "a question at the end of a long prompt: what do llamas eat?"):
        assert codec.encode(prompt).tolist() == fast(prompt)["input_ids"]
        assert len(codec.encode(prompt)) == len(prompt)


def test_merges_that_were_dropped_by_chance_in_training_are_all_made(tmp_path: Path) -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: id_ for id_, token in enumerate([*alphabet, "ab", "abab"])}

    def written(name: str, **options: float) -> TextCodec:
        tokenizer = Tokenizer(models.BPE(vocabulary, [("a", "b"), ("ab", "ab")], **options))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens([EOS, BOS])
        return TextCodec(write_checkpoint(tmp_path / name, tokenizer=tokenizer), tiny_config())

    right = written("plain").encode("abababab").tolist()
    assert right == [257, 257]
    tuned = written("tuned", dropout=0.5)
    assert all(tuned.encode("abababab").tolist() == right for _ in range(20))
