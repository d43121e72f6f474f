"""Encoding of prompts and decoding of texts: prompt style, tokenizer, stops, and incremental detokenization.

Encoding is LitGPT's, including BOS. A whole text is decoded by the tokenizer. `Detokenizer` gives the same text
incrementally, and never returns text that a later token could change.
"""

from __future__ import annotations

import codecs
import functools
import importlib
import json
import os
import re
import sys
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import Any, Protocol

import litgpt.prompts
import yaml
from litgpt.config import Config
from litgpt.prompts import PromptStyle, has_prompt_style
from litgpt.tokenizer import Tokenizer
from torch import Tensor

from litspec.checkpoint import load_tokenizer, read_generation_config
from litspec.conversation import Message, Turns
from litspec.errors import InputError


class TextCodec:
    """The tokenizer, prompt style and stop tokens of one checkpoint folder.

    Args:
        checkpoint_dir: The target's folder.
        config: Its model config. Without a `prompt_style.yaml`, LitGPT chooses the prompt style by the model's name.
        trust_prompt_style: Allow `prompt_style.yaml` to name a class outside LitGPT, whose code is then run.

    Attributes:
        tokenizer: LitGPT's tokenizer.
        prompt_style: LitGPT's prompt style.
        stop_tokens: Every id sequence that ends a text: the tokenizer's EOS, those of `generation_config.json`, and the
            prompt style's.
        notes: Sentences for the user, such as an EOS id that the model cannot produce.

    Raises:
        InputError: A file of the folder is broken.
    """

    def __init__(self, checkpoint_dir: str | Path, config: Config, *, trust_prompt_style: bool = False) -> None:
        self.checkpoint_dir = Path(checkpoint_dir)
        self.config = config
        self.tokenizer = load_tokenizer(self.checkpoint_dir)
        self.prompt_style = _prompt_style(self.checkpoint_dir, config, trust_prompt_style)
        notes: list[str] = []
        self.stop_tokens = self._find_stops(notes)
        self.notes = tuple(notes)
        self._vocabulary = _Vocabulary(self.tokenizer)

    def encode(self, prompt: str, sys_prompt: str | None = None) -> Tensor:
        """Encodes a prompt in its prompt style as token ids `(T,)`, int32, T >= 1.

        Args:
            prompt: The user's text.
            sys_prompt: Replaces the system prompt of a style that has one.

        Raises:
            InputError: The text has no tokens, is not valid Unicode, or has a token that the model does not have.
        """
        text = self.prompt_style.apply(prompt, sys_prompt=sys_prompt)
        if not isinstance(text, str):
            style, kind = type(self.prompt_style).__name__, type(prompt).__name__
            raise InputError(f"The prompt is a {kind}; the prompt style {style} takes a string.")
        return self.encode_text(text, prompt)

    @functools.cached_property
    def turns(self) -> Turns:
        """Formats conversations; loaded when first used."""
        return Turns(self.checkpoint_dir, self.prompt_style)

    def encode_messages(self, messages: Sequence[Message], sys_prompt: str | None = None) -> Tensor:
        """Encodes a conversation up to the start of the next answer as token ids `(T,)`, int32, T >= 1.

        Args: as for `Turns.render`.

        Raises:
            InputError: As for `encode` and `Turns.render`.
        """
        return self.encode_text(self.turns.render(messages, sys_prompt), messages[-1]["content"])

    def encode_text(self, text: str, prompt: str | None = None) -> Tensor:
        """Encodes text without a prompt style as token ids `(T,)`, int32, T >= 1; with BOS if the tokenizer adds it.

        Args:
            text: The text.
            prompt: The user's prompt in the text, for messages.

        Raises:
            InputError: As for `encode`.
        """
        try:
            text.encode()  # tokenizers do not accept an unpaired surrogate
            ids = self.tokenizer.encode(text)
        except UnicodeEncodeError as error:
            raise InputError("The prompt is not valid Unicode: it contains an unpaired surrogate.") from error
        except NotImplementedError as error:
            folder = str(self.checkpoint_dir)
            raise InputError(
                f"LitGPT puts BOS before prompts for {folder!r}, but its tokenizer_config.json has no bos_token."
            ) from error
        except (RuntimeError, OverflowError, TypeError, ValueError) as error:  # ids outside the range of a tensor
            raise InputError(
                f"The tokenizer of {str(self.checkpoint_dir)!r} gives invalid token ids for the prompt: "
                f"{' '.join(str(error).split())}."
            ) from error
        if ids.numel() == 0:
            shown = text if prompt is None else prompt
            raise InputError(f"The prompt {shown!r} has no tokens; give at least one character.")
        size = self.config.padded_vocab_size
        if (largest := int(ids.max())) >= size:
            raise InputError(f"The prompt has the token id {largest}, but the model's ids are in [0, {size}).")
        return ids

    def decode(self, token_ids: Sequence[int] | Tensor, *, after: Sequence[int] | Tensor = ()) -> str:
        """Decodes tokens. Special tokens and ids that the tokenizer does not know give no text.

        Args:
            token_ids: `(T,)`.
            after: The tokens before them, whose text is not returned. Sentencepiece-style tokenizers drop the space at
                the beginning of a text; after other tokens it stays.
        """
        if len(after):
            detokenizer = self.detokenizer(after=after)
            return detokenizer.push(token_ids) + detokenizer.flush()
        return self._vocabulary.decode(_ids(token_ids))

    @property
    def known_ids(self) -> int:
        """Upper bound of the tokenizer's ids (exclusive)."""
        processor = self.tokenizer.processor
        if self.tokenizer.backend == "sentencepiece":
            return int(processor.get_piece_size())
        return max(processor.get_vocab(with_added_tokens=True).values()) + 1

    def token_id(self, token: str) -> int:
        """The id of a token, given as a special token's name, as text, or as in the vocabulary.

        Raises:
            InputError: It is not a single token.
        """
        if token in self.special_tokens:
            return self.special_tokens[token]
        ids = self.encode_alone(token)
        if len(ids) == 1:
            return ids[0]
        # Sentencepiece returns the id of <unk> for unknown tokens.
        with suppress(ValueError):
            id_ = self.tokenizer.token_to_id(token)
            if self.tokenizer.backend == "huggingface" or self.tokenizer.processor.id_to_piece(id_) == token:
                return id_
        raise InputError(
            f"{token!r} is not a single token but {len(ids)} tokens; give a token id, or text that is one token."
        )

    def spellings(self, word: str) -> list[list[int]]:
        """The token ids of a word, at the beginning of a text and after a space.

        Raises:
            InputError: The word has no tokens.
        """
        if word in self.special_tokens:
            return [[self.special_tokens[word]]]
        found = [self.encode_alone(word), self.encode_alone(" " + word.lstrip(" "))]
        found = [ids for i, ids in enumerate(found) if ids and ids not in found[:i]]
        if not found:
            raise InputError(f"The word {word!r} has no tokens.")
        return found

    def encode_alone(self, text: str) -> list[int]:
        """Encodes text without a prompt style, BOS or EOS."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"{text!r} is not valid Unicode: it contains an unpaired surrogate.") from error
        if self.tokenizer.backend == "huggingface":
            return list(self.tokenizer.processor.encode(text, add_special_tokens=False).ids)
        return self.tokenizer.encode(text, bos=False, eos=False).tolist()

    @property
    def special_tokens(self) -> dict[str, int]:
        """The tokens that a text does not show, with their ids."""
        return self._vocabulary.special

    def detokenizer(self, *, after: Sequence[int] | Tensor = ()) -> Detokenizer:
        """A new detokenizer; `after` as in `decode`."""
        return Detokenizer(self._vocabulary, after=after)

    def _find_stops(self, notes: list[str]) -> tuple[tuple[int, ...], ...]:
        content, repaired = read_generation_config(self.checkpoint_dir)
        path = str(self.checkpoint_dir / "generation_config.json")
        if repaired:
            notes.append(f"{path!r} is not valid JSON; it was repaired as LitGPT repairs it.")
        eos = content.get("eos_token_id")
        for id_ in eos if isinstance(eos, list) else [eos]:
            if id_ is not None and (not isinstance(id_, int) or isinstance(id_, bool)):
                raise InputError(f"{path!r} has eos_token_id: {eos!r}; it must be an integer or a list of integers.")
        try:
            style = self.prompt_style.stop_tokens(self.tokenizer)
        except ValueError as error:
            name, folder = type(self.prompt_style).__name__, str(self.checkpoint_dir)
            raise InputError(
                f"The prompt style {name} cannot be used with the tokenizer of {folder!r}: {error}"
            ) from error
        # LitGPT's eos_id may be the list of generation_config.json; then each of its ids is a stop.
        stops: list[Any] = [[id_] for id_ in _flat(self.tokenizer.eos_id)] + [[id_] for id_ in _flat(eos)]
        for sequence in style:
            stops += [[id_] for id_ in _flat(sequence[0])] if len(sequence) == 1 else [list(sequence)]
        usable = []
        for sequence in dict.fromkeys(tuple(stop) for stop in stops):
            if not sequence or None in sequence:
                continue
            if all(0 <= id_ < self.config.padded_vocab_size for id_ in sequence):
                usable.append(sequence)
            elif max(sequence) >= 0:
                notes.append(f"The stop {list(sequence)} is outside the model's vocabulary and is ignored.")
        return tuple(usable)


def _flat(ids: Any) -> list[int]:
    return [id_ for id_ in (ids if isinstance(ids, (list, tuple)) else [ids]) if id_ is not None]


def _ids(token_ids: Sequence[int] | Tensor) -> list[int]:
    return token_ids.tolist() if isinstance(token_ids, Tensor) else [int(id_) for id_ in token_ids]


def _prompt_style(checkpoint_dir: Path, config: Config, trusted: bool) -> PromptStyle:
    if not has_prompt_style(checkpoint_dir):
        return PromptStyle.from_config(config)
    path = checkpoint_dir / "prompt_style.yaml"
    module, _, name = _class_path(path).rpartition(".")
    cls: Any = None
    if module == litgpt.prompts.__name__:
        cls = getattr(litgpt.prompts, name, None)
    elif trusted:
        cls = _import(module, name, path)
    elif module:
        raise InputError(
            f"{str(path)!r} names {module}.{name}, which is not one of LitGPT's prompt styles (litgpt.prompts.*); "
            "loading it would run its code. If you trust its source, allow it with trust_prompt_style."
        )
    if not (isinstance(cls, type) and issubclass(cls, PromptStyle)):
        raise InputError(
            f"{str(path)!r} names no prompt style: {module}.{name} is not a subclass of LitGPT's PromptStyle."
        )
    try:
        return cls()
    except Exception as error:  # the constructor may be third-party code
        reason = " ".join(str(error).split())
        raise InputError(f"{str(path)!r} names a prompt style that cannot be constructed: {reason}.") from error


def _class_path(path: Path) -> str:
    """Reads `class_path` from the file, without importing or calling anything."""
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        found = content["class_path"]
        if isinstance(found, str):
            return found
    except (OSError, yaml.YAMLError, ValueError, TypeError, KeyError, RecursionError) as error:
        kind = error.strerror if isinstance(error, OSError) else type(error).__name__
        raise InputError(
            f"{str(path)!r} names no prompt style that can be loaded ({kind}); it must hold class_path: and a class of "
            "litgpt.prompts."
        ) from error
    raise InputError(f"{str(path)!r} names no prompt style: class_path is a {type(found).__name__}, not a string.")


def _import(module: str, name: str, path: Path) -> Any:
    """Imports a class from Python's module path, but never from the checkpoint's folder."""
    before = list(sys.path)
    folder = os.path.realpath(path.parent)
    sys.path[:] = [entry for entry in before if os.path.realpath(entry or os.curdir) != folder]
    try:
        return getattr(importlib.import_module(module), name, None)
    except Exception as error:  # third-party code
        raise InputError(
            f"{str(path)!r} names no prompt style that can be loaded: {' '.join(str(error).split())}."
        ) from error
    finally:
        sys.path[:] = before


class Detokenizer:
    """Decodes tokens incrementally into whole characters. The concatenated parts equal the text of all tokens.

    A token is decoded together with a few tokens before it, not with all. Text that a later token may change is held
    back: the bytes of an incomplete character, or a run of byte tokens, since decoders replace the whole run if one
    byte is invalid.

    Args:
        vocabulary: The vocabulary (see `TextCodec.detokenizer`), or a LitGPT tokenizer.
        after: Tokens before the first one, whose text is not returned.

    Attributes:
        char_count: Characters released so far.
    """

    def __init__(self, vocabulary: _Vocabulary | Tokenizer, *, after: Sequence[int] | Tensor = ()) -> None:
        self._vocabulary = vocabulary if isinstance(vocabulary, _Vocabulary) else _Vocabulary(vocabulary)
        self._tokens = _ids(after)
        self._begin = len(self._tokens)
        self._stream = self._vocabulary.stream(self._tokens)
        self._pieces: list[str] = []
        self._chars = [0]  # [n]: characters released after n tokens
        self._settled = [0]  # [n]: the largest m <= n after which nothing was held back
        self._covered = (0, 0)  # the last argument and result of tokens_for
        self.char_count = 0

    @property
    def text(self) -> str:
        """The text released so far."""
        if len(self._pieces) > 1:
            self._pieces = ["".join(self._pieces)]
        return self._pieces[0] if self._pieces else ""

    @property
    def settled(self) -> bool:
        """Whether all tokens so far form whole characters, so that nothing is held back."""
        return self._settled[-1] == len(self._settled) - 1

    @property
    def held(self) -> str:
        """The text held back, decoded as if the text ended here."""
        n = len(self._settled) - 1
        m = self._settled[n]
        if m == n:
            return ""
        # Whole characters before an incomplete one have been released.
        return self._stream.tail(self._tokens, self._begin + m, self._begin + n)[self._chars[n] - self._chars[m] :]

    def push(self, tokens: Sequence[int] | Tensor) -> str:
        """Takes the next tokens; returns the new text that is certain, which may be empty."""
        released = []
        for token in _ids(tokens):
            piece, settled = self._stream.push(token)
            released.append(piece)
            self._tokens.append(token)
            self.char_count += len(piece)
            self._chars.append(self.char_count)
            self._settled.append(len(self._settled) if settled else self._settled[-1])
        return self._release("".join(released))

    def flush(self) -> str:
        """Ends the text: returns the text that was held back, with U+FFFD for invalid bytes."""
        piece = self._release(self._stream.flush())
        self.char_count += len(piece)
        self._chars[-1] = self.char_count
        return piece

    def _release(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece

    def tokens_for(self, char_count: int) -> int:
        """Length of the shortest prefix of the tokens whose text covers the first `char_count` characters.

        Args:
            char_count: At most `self.char_count`.
        """
        if char_count != self._covered[0]:
            self._covered = (char_count, self._shortest_for(char_count))
        return self._covered[1]

    def _shortest_for(self, char_count: int) -> int:
        reached = min(bisect_left(self._chars, char_count), len(self._chars) - 1)
        # If text was held back, a prefix may decode to more than was released at that time.
        first = bisect_left(self._chars, self._chars[reached - 1]) if reached else 0
        for n in range(first, reached):
            m = self._settled[n]
            if m == n:
                continue
            tail = self._stream.tail(self._tokens, self._begin + m, self._begin + n)
            begin = self._chars[m]
            if begin + len(tail) >= char_count and self.text[begin:char_count] == tail[: char_count - begin]:
                return n
        return reached


class _Stream(Protocol):
    def push(self, token: int) -> tuple[str, bool]:
        """The new text that is certain, and whether nothing is held back."""
        ...

    def flush(self) -> str: ...

    def tail(self, tokens: list[int], m: int, n: int) -> str:
        """The text that `tokens[m:n]` add to that of the settled `tokens[:m]`, with nothing held back."""
        ...


class _Kind(Enum):
    PLAIN = 0
    DROPPED = 1  # left out before decoding: special tokens, ids that the tokenizer does not know
    BYTE = 2  # decoded together with adjacent bytes
    CONTROL = 3  # has no text, but ends a run of bytes; only the first in a row matters


class _Vocabulary:
    """The text of the tokens of one tokenizer, and the kind of stream that can decode them incrementally."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._processor = processor = tokenizer.processor
        self._kinds: dict[int, _Kind] = {}
        self._bytes: dict[int, bytes] = {}
        self._is_sentencepiece = tokenizer.backend == "sentencepiece"
        self._special: set[str] = set()
        self.special: dict[str, int] = {}
        self._is_local = self._has_byte_tokens = True
        self._is_byte_level = False
        if self._is_sentencepiece:
            controls = [id_ for id_ in range(processor.get_piece_size()) if processor.is_control(id_)]
            self.special = {processor.id_to_piece(id_): id_ for id_ in controls}
        else:
            added = processor.get_added_tokens_decoder()
            self.special = {token.content: id_ for id_, token in added.items() if token.special}
            self._special = set(self.special)
            steps = _decoders(processor.decoder)
            kinds = [step["type"] for step in steps]
            self._is_byte_level = [kind for kind in kinds if kind != "Fuse"] == ["ByteLevel"]
            self._has_byte_tokens = "ByteFallback" in kinds
            self._is_local = _is_local(steps)

    def stream(self, after: list[int]) -> _Stream:
        return _ByteStream(self) if self._is_byte_level else _WindowStream(self, after)

    def decode(self, ids: list[int]) -> str:
        if self._is_sentencepiece:  # it raises for unknown ids; the tokenizers library leaves them out
            ids = [id_ for id_ in ids if self.kind(id_) is not _Kind.DROPPED]
        return self._processor.decode(ids)

    def kind(self, id_: int) -> _Kind:
        if id_ not in self._kinds:
            self._kinds[id_] = self._kind_of_piece(id_) if self._is_sentencepiece else self._kind_of_token(id_)
        return self._kinds[id_]

    def _kind_of_piece(self, id_: int) -> _Kind:
        if not 0 <= id_ < self._processor.get_piece_size():
            return _Kind.DROPPED
        if self._processor.is_control(id_):
            return _Kind.CONTROL
        return _Kind.BYTE if self._processor.is_byte(id_) else _Kind.PLAIN

    def _kind_of_token(self, id_: int) -> _Kind:
        token = self._processor.id_to_token(id_)
        if token is None or token in self._special:
            return _Kind.DROPPED
        if not self._is_local:
            return _Kind.BYTE  # the whole text is one run: nothing is certain before the end
        return _Kind.BYTE if self._has_byte_tokens and _BYTE_TOKEN.fullmatch(token) else _Kind.PLAIN

    def bytes_of(self, id_: int) -> bytes:
        """The bytes of a token of a byte-level tokenizer."""
        if id_ not in self._bytes:
            token = "" if self.kind(id_) is _Kind.DROPPED else self._processor.id_to_token(id_)
            known = all(char in _BYTE_OF for char in token)
            # An added token may contain plain characters instead of encoded bytes.
            self._bytes[id_] = bytes(_BYTE_OF[char] for char in token) if known else token.encode()
        return self._bytes[id_]


_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Byte-level BPE writes a byte as its Latin-1 character if that is printable, else as a character from U+0100 on.
_VISIBLE = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
_HIDDEN = [byte for byte in range(0x100) if byte not in _VISIBLE]
_BYTE_OF = {chr(byte): byte for byte in _VISIBLE} | {chr(0x100 + i): byte for i, byte in enumerate(_HIDDEN)}


def _decoders(decoder: Any) -> list[dict[str, Any]]:
    """The steps of a decoder of the tokenizers library, in order."""
    if decoder is None:
        return []
    steps = [json.loads(decoder.__getstate__())]
    while any(step["type"] == "Sequence" for step in steps):
        steps = [inner for step in steps for inner in step.get("decoders", [step])]
    return steps


def _is_local(decoders: list[dict[str, Any]]) -> bool:
    """Whether a token's text depends only on adjacent tokens, so that a window is enough to decode it."""
    fused = False
    for decoder in decoders:
        kind = decoder["type"]
        fused = fused or kind == "Fuse"
        if kind in ("ByteFallback", "Fuse", "Metaspace", "WordPiece", "BPEDecoder"):
            continue
        if kind == "Replace" and (not fused or len(decoder["pattern"].get("String", "--")) == 1):
            continue
        if kind == "Strip" and decoder["stop"] == 0:
            continue
        return False
    return True


class _ByteStream:
    """For byte-level tokenizers: each token is a fixed byte string, and the text is these bytes as UTF-8."""

    def __init__(self, vocabulary: _Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token: int) -> tuple[str, bool]:
        piece = self._utf8.decode(self._vocabulary.bytes_of(token))
        return piece, not self._utf8.getstate()[0]

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)

    def tail(self, tokens: list[int], m: int, n: int) -> str:
        return b"".join(map(self._vocabulary.bytes_of, tokens[m:n])).decode(errors="replace")


class _WindowStream:
    """For other tokenizers: decodes new tokens after a few settled ones, so that they are not decoded as the first."""

    def __init__(self, vocabulary: _Vocabulary, after: list[int]) -> None:
        self._vocabulary = vocabulary
        self._context = self._shortest_context(after, len(after))
        self._held: list[int] = []

    def push(self, token: int) -> tuple[str, bool]:
        kind = self._vocabulary.kind(token)
        last = (self._held or self._context)[-1:]
        repeated = kind is _Kind.CONTROL and bool(last) and self._vocabulary.kind(last[0]) is _Kind.CONTROL
        if kind is _Kind.DROPPED or repeated:
            return "", not self._held
        self._held.append(token)
        if kind is _Kind.BYTE:
            return "", False
        return self.flush(), True

    def flush(self) -> str:
        tokens, settled = self._context + self._held, len(self._context)
        piece = self._added_text(tokens[:settled], tokens[settled:])
        self._context, self._held = self._shortest_context(tokens, len(tokens)), []
        return piece

    def tail(self, tokens: list[int], m: int, n: int) -> str:
        return self._added_text(self._shortest_context(tokens, m), tokens[m:n])

    def _added_text(self, context: list[int], tokens: list[int]) -> str:
        decode = self._vocabulary.decode
        return decode(context + tokens)[len(decode(context)) :] if tokens else ""

    def _shortest_context(self, tokens: list[int], end: int) -> list[int]:
        """A short suffix of `tokens[:end]` that has text, so that tokens after it are not decoded as the first."""
        kind = self._vocabulary.kind
        size = 1
        while True:
            start = max(0, end - size)
            while start and kind(tokens[start]) in (_Kind.BYTE, _Kind.DROPPED):
                start -= 1  # a run of bytes is decoded as a whole
            context = [token for token in tokens[start:end] if kind(token) is not _Kind.DROPPED]
            if not start or self._vocabulary.decode(context):
                return context
            size *= 2
