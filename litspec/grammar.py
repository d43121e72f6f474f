"""Constrained decoding with a JSON schema, a regular expression, or a grammar in Lark's notation.

llguidance (https://github.com/guidance-ai/llguidance) computes which tokens are allowed next, and which are forced. The
allowed tokens after each token of a proposal are computed before the target verifies it. The grammar is then rolled
back to the committed text, so rejected proposals do not change it. Forced tokens are proposed without a drafter and
verified like all proposals.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from litspec.errors import InputError
from litspec.stopping import Verdict

if TYPE_CHECKING:
    from litspec.config import GenerateConfig
    from litspec.text import TextCodec


# The style of Python's `json.dumps`. With flexible white space, small models may write endless white space, and no
# tokens are forced. A schema can override this under "x-guidance".
JSON_STYLE = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


class Form(NamedTuple):
    """The required form of a text.

    Attributes:
        setting: The setting that gives the form.
        source: Its value: a JSON schema, a regular expression, or a Lark grammar.
    """

    setting: str
    source: str


def form_of(settings: GenerateConfig) -> Form | None:
    """The form that the settings give; None without one."""
    if settings.response_format is not None:
        schema = _schema_of_response(settings.response_format)
        return None if schema is None else Form("json_schema", json.dumps(schema))
    if settings.json_schema is not None:
        return Form("json_schema", json.dumps(settings.json_schema))
    if settings.regex is not None:
        return Form("regex", settings.regex)
    return None if settings.grammar is None else Form("grammar", settings.grammar)


def _schema_of_response(response_format: Mapping[str, Any]) -> Any:
    """The JSON schema of an OpenAI API's `response_format`; None for plain text.

    Raises:
        InputError: The value is not a valid `response_format`.
    """
    kind = response_format.get("type")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    inner = response_format.get("json_schema")
    if kind == "json_schema" and isinstance(inner, Mapping) and isinstance(inner.get("schema"), Mapping):
        return dict(inner["schema"])
    raise InputError(
        'response_format must be {"type": "text"}, {"type": "json_object"} or {"type": "json_schema", "json_schema": '
        f'{{"schema": {{...}}}}}}, got {str(dict(response_format))[:100]}'
    )


class Grammars:
    """Makes grammars for the tokens of one tokenizer.

    Args:
        codec: The tokenizer.
        stop_ids: Single tokens that end a text; a grammar allows them where the text may end.

    Raises:
        InputError: llguidance is not installed.
    """

    def __init__(self, codec: TextCodec, stop_ids: Sequence[int]) -> None:
        try:
            import llguidance
        except ImportError as error:
            raise InputError(
                "json_schema, regex, grammar and response_format need llguidance, which is not installed; "
                'pip install "litspec[structured]".'
            ) from error
        self._library: Any = llguidance
        self._vocab_size = codec.config.padded_vocab_size
        # llguidance needs an EOS token. If there is none, it gets an additional id.
        self._extra = None if stop_ids else codec.known_ids
        given: Any = (_Sentencepiece if codec.tokenizer.backend == "sentencepiece" else _huggingface)(
            codec, self._extra
        )
        size = max(self._vocab_size, codec.known_ids + 1)
        ends = [*stop_ids] if self._extra is None else [self._extra]
        self._tokenizer = llguidance.LLTokenizer(given, n_vocab=size, eos_token=ends)
        self._made: dict[Form, Any] = {}

    def make(self, form: Form) -> Grammar:
        """Makes a grammar in its initial state.

        Raises:
            InputError: The form cannot be parsed.
        """
        if form not in self._made:
            matcher = self._library.LLMatcher(self._tokenizer, self._compiled(form), log_level=0)
            if matcher.is_error():
                reason = " ".join(str(matcher.get_error()).split())
                raise InputError(f"{form.setting} cannot be used: {reason}")
            self._made[form] = matcher
        return Grammar(self._made[form].deep_copy(), self._vocab_size, self._extra)

    def _compiled(self, form: Form) -> str:
        matcher = self._library.LLMatcher
        if form.setting == "regex":
            return str(matcher.grammar_from_regex(form.source))
        if form.setting == "grammar":
            return str(matcher.grammar_from_lark(form.source))
        return str(matcher.grammar_from_json_schema(form.source, defaults=JSON_STYLE))


# The name of the additional EOS token; no tokenizer has it.
END = "<|the end of a text of litspec|>"


def _huggingface(codec: TextCodec, extra: int | None) -> str:
    # Without the file's padding and truncation, which are for batches of prompts.
    content = json.loads(codec.tokenizer.processor.to_str()) | {"padding": None, "truncation": None}
    if extra is not None:
        flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
        content["added_tokens"] = [*content["added_tokens"], {"id": extra, "content": END, "special": True, **flags}]
    return json.dumps(content)


class _Sentencepiece:
    """The interface of a sentencepiece tokenizer that llguidance expects."""

    is_tokenizer_wrapper = True

    def __init__(self, codec: TextCodec, extra: int | None) -> None:
        self._processor = processor = codec.tokenizer.processor
        ids = range(processor.get_piece_size())
        self.eos_token_id = max(0, processor.eos_id()) if extra is None else extra
        self.bos_token_id = processor.bos_id() if processor.bos_id() >= 0 else None
        self.special_token_ids = [id_ for id_ in ids if processor.is_control(id_) or processor.is_unknown(id_)]
        self.tokens = [self._bytes_of(id_) for id_ in ids]
        special = set(self.special_token_ids)
        self._ids = {spelled: id_ for id_, spelled in enumerate(self.tokens) if id_ not in special}
        self._most = max(map(len, self._ids), default=0)
        if extra is not None:
            self.tokens += [b""] * (extra - len(self.tokens)) + [END.encode()]
            self.special_token_ids.append(extra)

    def _bytes_of(self, id_: int) -> bytes:
        piece = self._processor.id_to_piece(id_)
        if self._processor.is_byte(id_):
            return bytes([int(piece[3:-1], 16)])
        return piece.replace("▁", " ").encode()

    def __call__(self, text: bytes | str) -> list[int]:
        wanted = text.encode() if isinstance(text, str) else text
        # After a character that merges with no other, so that the tokenizer adds no space before the text.
        before = self._processor.encode("\ue000")
        ids = list(self._processor.encode("\ue000" + wanted.decode(errors="replace"))[len(before) :])
        # A normalizer may have changed the text, but forced tokens must have exactly these bytes.
        return ids if b"".join(self.tokens[id_] for id_ in ids) == wanted else self._longest(wanted)

    def _longest(self, wanted: bytes) -> list[int]:
        """Tokens of a byte string; greedily takes the longest token."""
        found: list[int] = []
        while wanted:
            size = next((n for n in range(min(len(wanted), self._most), 0, -1) if wanted[:n] in self._ids), 0)
            if not size:
                break  # no token begins like this
            found.append(self._ids[wanted[:size]])
            wanted = wanted[size:]
        return found


class Grammar:
    """The state of one text in its grammar. It is also a `stopping.Stop`: the text ends where the grammar ends.

    Args:
        matcher: llguidance's matcher in its initial state.
        vocab_size: V.
        extra: An additional EOS id that the model does not have; None for none.
    """

    def __init__(self, matcher: Any, vocab_size: int, extra: int | None = None) -> None:
        self._matcher = matcher
        self._words = (vocab_size + 31) // 32
        self._extra = extra if extra is not None and extra < 32 * self._words else None
        self._seen = 0
        self._masks: list[bytes] = []  # for the next token, and after each token of the proposal

    def forced(self, most: int) -> list[int]:
        """The next tokens that the grammar forces, up to a limit."""
        return list(self._matcher.compute_ff_tokens()[:most])

    def foresee(self, proposal: Sequence[int]) -> None:
        """Computes the masks of allowed tokens after each token of a proposal.

        Raises:
            InputError: llguidance reached a limit in this grammar.
        """
        matcher = self._matcher
        self._masks = [self._mask()]
        consumed = 0
        for token in proposal:
            if token < 0 or matcher.try_consume_tokens([token]) != 1:
                break  # it will be rejected, so later masks are not used
            consumed += 1
            if matcher.is_stopped():
                break  # the text ends here
            self._masks.append(self._mask())
        if consumed:
            matcher.rollback(consumed)
        self._check()

    def masks(self, rows: int) -> torch.Tensor:
        """The allowed tokens in each row of a block: (rows, V / 32) int32, one bit per id.

        Rows for which `foresee` has computed no mask allow everything.
        """
        if not self._masks:
            self._masks = [self._mask()]
        known = self._masks[:rows]
        found = torch.frombuffer(bytearray(b"".join(known)), dtype=torch.int32).view(len(known), -1)[:, : self._words]
        if self._extra is not None:
            bits = 1 << self._extra % 32
            found[:, self._extra // 32] &= ~(bits - 2**32 if bits == 1 << 31 else bits)
        every = torch.full((rows - len(known), self._words), -1, dtype=torch.int32)
        return torch.cat((found, every))

    def push(self, tokens: Sequence[int]) -> Verdict:
        """Takes committed tokens. The token that completes the grammar is part of the text."""
        self._masks = []
        for token in tokens:
            self._seen += 1
            if not self._matcher.consume_token(token):
                self._check()
            if self._matcher.is_stopped():
                return Verdict(self._seen, self._seen)
        return Verdict(self._seen, None)

    def _mask(self) -> bytes:
        return bytes(self._matcher.compute_bitmask())

    def _check(self) -> None:
        if self._matcher.is_error():
            reason = " ".join(str(self._matcher.get_error()).split())
            raise InputError(f"The text cannot continue in its grammar: {reason}")
