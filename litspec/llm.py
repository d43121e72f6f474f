"""`SpecLLM`: loads a pair, and generates a `Completion` or a stream for a prompt."""

from __future__ import annotations

import functools
import hashlib
import math
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, TypeVar, overload

import torch

from litspec.arguments import checked, spelled_out
from litspec.checkpoint import PairReport, check_pair, open_checkpoint
from litspec.config import GenerateConfig, LoadConfig, check_batch_size, check_k
from litspec.conversation import Message
from litspec.demo import DEMO_DRAFT, DEMO_TARGET
from litspec.drafters import AdaptiveK, Drafter, FixedK, SpeculativeK, make_drafter
from litspec.drafters.folders import kind_of, load_published
from litspec.drafters.speculative_k import Acceptance, RoundCosts
from litspec.engine.capacity import slots_that_fit, slots_that_pay
from litspec.engine.costs import modelled, thread_advice
from litspec.engine.engine import Engine, Request
from litspec.engine.runner import CompiledRunner, Runner
from litspec.engine.sequence import Block
from litspec.engine.target import PREFILL_CHUNK, Placed
from litspec.errors import InputError
from litspec.grammar import Grammar, Grammars, form_of
from litspec.logits import LogitsProcessor, rules_of
from litspec.logprobs import Logprobs, TokenLogprobs, measure
from litspec.model.packed import PackedLinear
from litspec.placement.place import place
from litspec.report import Piece, Pieces, Stats, make_stats, plot_acceptance, to_html
from litspec.sampling import Rejection, Sampler, Sampling, make_sampler
from litspec.stopping import FirstOf, StopStrings, StopTokens
from litspec.text import TextCodec
from litspec.types import DrafterName, FinishReason

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")  # the caller's name of a text


@dataclass(frozen=True)
class Completion:
    """A finished text. A notebook shows it with each token coloured by its origin.

    Attributes:
        prompt: The prompt as given, without the prompt style.
        text: The completion. It ends before a stop string, possibly inside the last token.
        token_ids: Its tokens: the shortest sequence whose text contains the completion.
        finish_reason: "stop" or "length".
        stats: Counts and times.
        drafted: For each token, whether a drafter proposed it (else it is the target's own).
        blocks: The committed tokens of each round, beginning with the prefill.
        pieces: The text, split by the origin of its tokens.
        logprobs: Log-probabilities of each token; None if not requested.
    """

    prompt: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    drafted: list[bool] = field(repr=False)
    blocks: list[Block] = field(repr=False)
    pieces: list[Piece] = field(default_factory=list, repr=False)
    logprobs: list[TokenLogprobs] | None = field(default=None, repr=False)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return to_html(self.pieces, self.drafted, self.stats, self.finish_reason)

    def plot(self) -> Figure:
        """Plots acceptance by position in the block, and tokens per round along the text, with matplotlib.

        Raises:
            InputError: matplotlib is not installed.
        """
        return plot_acceptance(self.blocks, self.stats)


@dataclass(frozen=True)
class Score:
    """The likelihood of a text under the target.

    Attributes:
        text: The text.
        logprobs: Log-probabilities of each scored token.
    """

    text: str
    logprobs: list[TokenLogprobs] = field(repr=False)

    @property
    def token_ids(self) -> list[int]:
        """The scored tokens."""
        return [each.token_id for each in self.logprobs]

    @property
    def logprob(self) -> float:
        """The sum of the tokens' log-probabilities (natural logarithm)."""
        return math.fsum(each.logprob for each in self.logprobs)

    @property
    def perplexity(self) -> float:
        """exp(-logprob / number of tokens)."""
        return math.exp(-self.logprob / len(self.logprobs))

    def __repr__(self) -> str:
        return f"Score(text={self.text!r}, logprob={self.logprob:.4f}, perplexity={self.perplexity:.4f})"


def text_seed(seed: int, index: int) -> int:
    """The seed of the text with an index: a hash, so that adding a text does not change the others."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class TextStream(Iterator[str]):
    """Parts of a text as they are committed: whole characters, without text that a stop may still remove.

    Attributes:
        completion: The finished text; None until the stream has ended.
        latest: The last returned part, split by the origin of its tokens.
    """

    def __init__(self, parts: Generator[list[Piece] | Completion]) -> None:
        self._parts = parts
        self.completion: Completion | None = None
        self.latest: list[Piece] = []

    def __next__(self) -> str:
        for part in self._parts:
            if isinstance(part, Completion):
                self.completion = part
            else:
                self.latest = part
                return "".join(piece.text for piece in part)
        raise StopIteration

    def close(self) -> None:
        """Ends the stream early."""
        self._parts.close()


class SpecLLM:
    """A loaded target and its drafter. Made by `SpecLLM.load`.

    Attributes:
        placed: The target on its devices.
        codec: The target's tokenizer and prompt style.
        drafter: The drafter; None for plain decoding.
        notes: Sentences about the loaded pair, for users.
    """

    def __init__(
        self,
        placed: Placed,
        codec: TextCodec,
        drafter: Drafter | None,
        pair: PairReport | None = None,
        embedded: bool = False,
        published: Drafter | None = None,
    ) -> None:
        self.placed = placed
        self.codec = codec
        self.drafter = drafter
        self.notes = [
            *codec.notes,
            *(pair.notes if pair is not None else ()),
            *(drafter.notes if drafter is not None else ()),
        ]
        self._pair = pair
        self._embedded = embedded
        self._published = published
        self._idle: Engine | None = None  # engine of the last texts, kept for its memory and its prompts
        self._grammars: Grammars | None = None  # made for the first text with a grammar
        self._paying: int | None = None  # result of `slots_that_pay`
        # Costs of rounds, and acceptance so far, by drafter and sampling settings.
        self._costs: dict[tuple[object, ...], RoundCosts] = {}
        self._accepted: dict[tuple[object, ...], Acceptance] = {}
        self._drafters: dict[int, Drafter] = {}  # by id; a reference keeps the id unique
        self._lock = threading.Lock()

    @classmethod
    @spelled_out(config=LoadConfig)
    def load(cls, config: LoadConfig) -> SpecLLM:
        """Loads a target and its drafter.

        Args:
            {config}

        Raises:
            InputError: A ValueError: a folder, file or setting cannot be used.
        """
        checkpoint_dir, draft_dir, drafter = config.checkpoint_dir, config.draft_dir, config.drafter
        embedded = checkpoint_dir is None
        if config.threads is not None:
            torch.set_num_threads(config.threads)  # before the measurements and layouts that depend on it
        if checkpoint_dir is None:
            checkpoint_dir = DEMO_TARGET
            draft_dir = DEMO_DRAFT if drafter in ("auto", "draft_model") else None
        target = open_checkpoint(checkpoint_dir, role="checkpoint_dir", may_convert=config.convert)
        if drafter not in ("auto", "draft_model"):
            draft_dir = None  # not needed
        kind = kind_of(draft_dir, target.dir) if draft_dir is not None else "litgpt"
        draft = None
        if draft_dir is not None and kind == "litgpt":
            draft = open_checkpoint(draft_dir, role="draft_dir", may_convert=config.convert)
        codec = TextCodec(target.dir, target.config, trust_prompt_style=config.trust_prompt_style)
        pair = check_pair(target, draft) if draft is not None else None
        placed = place(
            target,
            draft,
            accelerator=config.accelerator,
            devices=config.devices,
            num_nodes=config.num_nodes,
            placement=config.placement,
            precision=config.precision,
            draft_precision=config.draft_precision,
            draft_device=config.draft_device,
            draft_placement=config.draft_placement,
            quantize=config.quantize,
            verify_width=config.verify_width,
            compile=config.compile,
        )
        published = load_published(draft_dir, kind, placed.model) if draft_dir is not None and draft is None else None
        chosen = make_drafter(drafter, placed, pair=pair, published=published, exit_layer=config.exit_layer)
        llm = cls(placed, codec, chosen, pair, embedded, published)
        alone = placed.device.type == "cpu" and placed.world_size == 1
        if alone and config.threads is None and torch.get_num_threads() > 1:
            advice = thread_advice(placed.model, placed.verify_width)
            llm.notes += [advice] if advice is not None else []
        return llm

    def with_drafter(
        self, drafter: DrafterName | Drafter, *, exit_layer: int | None = None, verify_width: int | None = None
    ) -> SpecLLM:
        """The same loaded target with another drafter or verify_width; arguments as in `load`.

        With another width, logits may differ in their last bits. The text may then differ at a near-tie of two tokens.
        """
        width = self.verify_width if verify_width is None else verify_width
        LoadConfig(drafter=drafter, exit_layer=exit_layer, verify_width=width)  # validates the arguments
        placed = self.placed if verify_width is None else replace(self.placed, verify_width=verify_width)
        chosen = make_drafter(drafter, placed, pair=self._pair, published=self._published, exit_layer=exit_layer)
        return SpecLLM(placed, self.codec, chosen, self._pair, self._embedded, self._published)

    def compiled(self) -> SpecLLM:
        """The same weights and drafter, with compiled steps; see `load`.

        Raises:
            InputError: The steps cannot be compiled.
        """
        if any(isinstance(module, PackedLinear) for module in self.placed.model.modules()):
            raise InputError("compiled() needs weights in their original layout; load with compile=True instead.")
        placed = replace(self.placed, runner=CompiledRunner(self.placed.device))
        return SpecLLM(placed, self.codec, self.drafter, self._pair, self._embedded, self._published)

    @property
    def draft_name(self) -> str | None:
        """Name of the draft model in draft_dir, or the kind of a published drafter; None if there is neither."""
        if self.placed.draft_model is not None:
            return self.placed.draft_model.config.name
        return None if self._published is None else self._published.name

    @property
    def compile_seconds(self) -> float:
        """Seconds spent on compiling steps so far."""
        return self.placed.runner.seconds

    @property
    def runner(self) -> Runner:
        """The runner of steps, eager or compiled."""
        return self.placed.runner

    @property
    def verify_width(self) -> int:
        """The most rows that the target verifies at once."""
        return self.placed.verify_width

    def describe(self) -> str:
        """A description of the loaded pair, in a few lines for a terminal."""
        config = self.placed.model.config
        dtype = str(next(self.placed.model.parameters()).dtype).removeprefix("torch.")
        lines = [f"Target {config.name!r}, {dtype} on {self.placed.device}, verifying up to {self.verify_width} rows."]
        if self._embedded:
            lines.insert(0, "No checkpoint_dir given: this is the embedded demonstration pair.")
        lines.append("No drafter: plain decoding." if self.drafter is None else f"Drafter: {self.drafter.name}.")
        return "\n".join([*lines, *self.notes])

    @overload
    def generate(self, prompt: str, *, stream: Literal[False] = ..., **settings: Any) -> Completion: ...
    @overload
    def generate(self, prompt: str, *, stream: Literal[True], **settings: Any) -> TextStream: ...
    @overload
    def generate(self, prompt: str, *, num_samples: int, **settings: Any) -> Completion | list[Completion]: ...
    @overload
    def generate(self, prompt: Sequence[str], *, stream: Literal[False] = ..., **settings: Any) -> list[Completion]: ...

    @spelled_out(settings=GenerateConfig)
    def generate(
        self,
        prompt: str | Sequence[str],
        settings: GenerateConfig,
        *,
        stream: bool = False,
        index: int = 0,
        num_samples: int = 1,
        batch_size: int | Literal["auto"] = "auto",
    ) -> Completion | TextStream | list[Completion]:
        """Generates text with speculative decoding; the text is the target's own.

        Args:
            prompt: A prompt, to which the checkpoint's prompt style is applied; or a list of prompts, one text each.
            {settings}
            stream: Return an iterator over parts of the text instead.
            index: Index of the text. The seed and the index determine its random numbers. Several texts get consecutive
                indices from here on.
            num_samples: Number of texts for one prompt, returned as a list; they get consecutive indices from `index`.
            batch_size: The most texts that are generated at the same time; "auto" for as many as fit in memory and
                increase throughput. A text does not depend on it.

        Raises:
            InputError: A ValueError: a setting is out of range, or a prompt is too long for the model.
        """
        prompt = checked("prompt", prompt, str | Sequence[str])
        stream, index = checked("stream", stream, bool), checked("index", index, int)
        batch_size = check_batch_size(batch_size)
        num_samples = checked("num_samples", num_samples, int)
        if num_samples < 1:
            raise InputError(f"num_samples must be at least 1, got {num_samples}")
        if num_samples > 1 and (stream or not isinstance(prompt, str)):
            other = "stream=True" if stream else "a list of prompts"
            raise InputError(f"num_samples = {num_samples} needs a single prompt and cannot be used with {other}.")
        if not isinstance(prompt, str) and stream:
            raise InputError("stream=True takes one prompt, not a list; stream them one after the other.")
        if settings.seed is None:
            settings = replace(settings, seed=self.placed.share_int(int(torch.randint(2**62, ()))))
        # Checked and encoded here, so that errors are raised now and not by the stream.
        prompts = [prompt] * num_samples if isinstance(prompt, str) else list(prompt)
        texts = [self._prepare(each, settings, index + i) for i, each in enumerate(prompts)]
        if isinstance(prompt, str) and num_samples == 1:
            alone = TextStream(self._stream(texts[0]))
            if stream:
                return alone
            for _ in alone:
                pass
            assert alone.completion is not None, "a stream ends with its completion"
            return alone.completion
        completions: dict[int, Completion] = {}
        # The longest texts first, so that the time with few running texts at the end is short.
        order = sorted(range(len(texts)), key=lambda i: -texts[i].max_length)
        slots = self.slots_for(batch_size, len(texts), max((text.max_length for text in texts), default=0))
        for i, result in self._complete(((i, texts[i]) for i in order), slots):
            if isinstance(result, InputError):
                raise result
            completions[i] = result
        return [completions[i] for i in range(len(texts))]

    @overload
    def chat(self, messages: Sequence[Message], *, stream: Literal[False] = ..., **settings: Any) -> Completion: ...
    @overload
    def chat(self, messages: Sequence[Message], *, stream: Literal[True], **settings: Any) -> TextStream: ...

    @spelled_out(settings=GenerateConfig)
    def chat(
        self, messages: Sequence[Message], settings: GenerateConfig, *, stream: bool = False, index: int = 0
    ) -> Completion | TextStream:
        """Generates the next answer of a conversation. The prefix that earlier calls have read is reused.

        Args:
            messages: `[{"role": "user", "content": "Hello"}]`, alternating user and assistant, the last one from the
                user; the first may have the role system. The prompt style formats them if it accepts messages, else the
                checkpoint's chat template; see `litspec.conversation.Turns`.
            {settings}
            stream: Return an iterator over parts of the text instead.
            index: Index of the text, see `generate`.

        Raises:
            InputError: A ValueError: as for `generate`, or the messages are not a valid conversation.
        """
        stream, index = checked("stream", stream, bool), checked("index", index, int)
        if settings.seed is None:
            settings = replace(settings, seed=self.placed.share_int(int(torch.randint(2**62, ()))))
        ids = self.codec.encode_messages(messages, settings.sys_prompt)
        text = TextStream(self._stream(self._prepare(messages[-1]["content"], settings, index, ids.tolist())))
        if stream:
            return text
        for _ in text:
            pass
        assert text.completion is not None, "a stream ends with its completion"
        return text.completion

    @torch.inference_mode()
    def score(self, text: str, *, prompt: str | None = None, sys_prompt: str | None = None, logprobs: int = 0) -> Score:
        """Computes the log-probabilities of a given text under the target.

        Args:
            text: The text; no prompt style is applied to it.
            prompt: The prompt before the text, in the checkpoint's prompt style; it is not scored. Without it the text
                is scored from its second token on, or from its first after a BOS token.
            sys_prompt: See `generate`.
            logprobs: How many of the most likely tokens to return at each position.

        Raises:
            InputError: A ValueError: there is no token to score, or the text is too long for the model.
        """
        text, logprobs = checked("text", text, str), checked("logprobs", logprobs, int)
        if not 0 <= logprobs <= 100:
            raise InputError(f"logprobs must be in [0, 100], got {logprobs}")
        if prompt is None:
            ids = self.codec.encode_text(text).tolist()
            begin = 1
        else:
            ids = self.codec.encode(checked("prompt", prompt, str), sys_prompt).tolist()
            begin = len(ids)
            ids += self.codec.encode_alone(text)
        if max(ids) >= (size := self.placed.model.config.padded_vocab_size):
            raise InputError(f"The text has the token id {max(ids)}, but the model's ids are in [0, {size}).")
        if len(ids) <= begin:
            raise InputError(f"The text {text!r} has no token to score; give a longer one, or a prompt before it.")
        block_size = self.placed.model.config.block_size
        if len(ids) > block_size:
            raise InputError(f"Prompt and text have {len(ids)} tokens, but the model's block_size is {block_size}.")
        device, model = self.placed.device, self.placed.model
        cache = model.make_cache(len(ids), width=1)
        found: list[TokenLogprobs] = []
        wanted = Logprobs(logprobs)
        for start in range(0, len(ids) - 1, PREFILL_CHUNK):
            chunk = ids[start : min(start + PREFILL_CHUNK, len(ids) - 1)]
            end = start + len(chunk)
            idx = self.placed.same(torch.tensor([chunk], device=device))
            input_pos = torch.tensor([start], device=device)
            logits = model.verify(idx, input_pos, cache, kv_length=cache.bucket(end), exact=False)
            following = torch.tensor(ids[start + 1 : end + 1], device=device)
            measured = measure(logits[0].float().log_softmax(-1), None, following, logprobs)
            found += wanted.unpack(wanted.pack(measured, len(chunk)).tolist(), following.tolist())
        return Score(text, found[begin - 1 :])

    def complete(
        self, texts: Iterable[tuple[T, str, GenerateConfig, int]], *, slots: int = 1
    ) -> Iterator[tuple[T, Completion | InputError]]:
        """Generates many texts, several at a time. Each text equals that of `generate` for its prompt alone.

        Args:
            texts: For each text a name, its prompt, its settings (with a seed) and its index, see `generate`. The next
                one is requested as soon as a slot is free.
            slots: Texts that run at the same time, see `slots_for`.

        Returns:
            Names with their finished texts or errors, in the order in which the texts end.
        """

        def prepared() -> Iterator[tuple[T, _Prepared | InputError]]:
            for name, prompt, settings, index in texts:
                try:
                    yield name, self._prepare(prompt, settings, index)
                except InputError as error:
                    yield name, error

        return self._complete(prepared(), slots)

    def slots_for(self, batch_size: int | Literal["auto"], texts: int, max_length: int) -> int:
        """How many texts to generate at the same time.

        Args:
            batch_size: The most; "auto" for as many as fit in memory and increase throughput.
            texts: Number of texts.
            max_length: Tokens of the longest text, prompt and completion together.
        """
        if texts <= 1 or batch_size == 1:
            return 1
        if batch_size != "auto":
            # Each number of slots needs its own graph.
            return batch_size if self.runner.compiles else min(batch_size, texts)
        # Ranks that generate texts together must take the same decision: rank 0's memory and clock count.
        fitting = self.placed.share_int(slots_that_fit(self.placed, self.drafter, max_length))
        if self._paying is None and min(texts, fitting) > 2:
            self._paying = slots_that_pay(self.placed)
        found = max(1, min(texts, fitting, self._paying or 2))
        return 1 << (found.bit_length() - 1) if self.runner.compiles else found

    def _prepare(self, prompt: str, settings: GenerateConfig, index: int, ids: list[int] | None = None) -> _Prepared:
        """Checks and encodes a request. `ids` are given if the target reads more than the prompt."""
        if self.drafter is not None:
            check_k(settings.speculative_k, self.verify_width)
        max_new_tokens, min_new_tokens = settings.max_new_tokens, settings.min_new_tokens
        sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, settings.sampler, settings.min_p)
        ids = self.codec.encode(prompt, settings.sys_prompt).tolist() if ids is None else ids
        block_size = self.placed.model.config.block_size
        if len(ids) + max_new_tokens > block_size:
            raise InputError(
                f"The prompt's {len(ids)} tokens and max_new_tokens = {max_new_tokens} make "
                f"{len(ids) + max_new_tokens}, but the model's block_size is {block_size}; reduce one of them."
            )
        stop_tokens = self.codec.stop_tokens
        stop_ids = self._stop_ids
        tokens_stop = StopTokens(stop_tokens, ignore_first=min_new_tokens)
        vocab_size = self.placed.model.config.padded_vocab_size
        strings = None
        if settings.stop:
            special = self.codec.special_tokens
            detokenizer = self.codec.detokenizer(after=ids)
            strings = StopStrings(settings.stop, detokenizer, min_new_tokens, special=special, vocab_size=vocab_size)
        if settings.seed is None:
            raise ValueError("a seed is chosen before a text is prepared")
        rules = rules_of(settings, self.codec)
        grammar = None
        if (form := form_of(settings)) is not None:
            if self._grammars is None:
                self._grammars = Grammars(self.codec, stop_ids)
            grammar = self._grammars.make(form)
        sampler = make_sampler(
            sampling,
            seed=text_seed(settings.seed, index),
            # Compiled steps always include the ban, so that all texts share one graph.
            banned=stop_ids if min_new_tokens or self.runner.compiles else [],
            banned_until=len(ids) + min_new_tokens if min_new_tokens else 0,
            processor=LogitsProcessor(rules, ids, vocab_size, grammar) if rules or grammar else None,
            logprobs=None if settings.logprobs is None else Logprobs(settings.logprobs, settings.logprobs_mode),
        )
        stops = [stop for stop in (tokens_stop, strings, grammar) if stop is not None]
        return _Prepared(
            prompt,
            ids,
            len(ids) + max_new_tokens,
            FirstOf(*stops) if len(stops) > 1 else tokens_stop,
            strings,
            sampler,
            0 if self.drafter is None else settings.speculative_k,
            grammar,
        )

    @property
    def _stop_ids(self) -> list[int]:
        """Single tokens that end every text."""
        return [sequence[0] for sequence in self.codec.stop_tokens if len(sequence) == 1]

    def _stream(self, prepared: _Prepared) -> Generator[list[Piece] | Completion]:
        """Generates one text: yields its pieces, then its `Completion`."""
        engine = self._take_engine(prepared.max_length, 1)
        writing = None
        try:
            writing = self._add(prepared, engine)
            engine.prepare()
            writing.begin()
            while not writing.ended:
                block = engine.step()[writing.handle]
                if isinstance(block, InputError):
                    raise block
                if released := writing.push(block):
                    yield released
        finally:
            # Also after an error, or if the stream is closed or deleted before its end.
            if writing is not None:
                engine.cancel(writing.handle)
            self._idle = engine
        if released := writing.finish():
            yield released
        yield writing.completion()

    def _complete(
        self, texts: Iterator[tuple[T, _Prepared | InputError]], slots: int
    ) -> Iterator[tuple[T, Completion | InputError]]:
        """Generates texts in a number of slots; a free slot takes the next text at once."""
        engine: Engine | None = None
        running: dict[int, tuple[T, _Writing]] = {}  # by handle
        waiting: tuple[T, _Prepared] | None = None  # too long for the engine, which is replaced once it is empty
        more = True
        try:
            while True:
                while more and waiting is None and len(running) < slots:
                    if (following := next(texts, None)) is None:
                        more = False
                        break
                    name, prepared = following
                    if isinstance(prepared, InputError):
                        yield name, prepared
                    elif running and engine is not None and prepared.max_length > engine.max_length:
                        waiting = name, prepared
                    else:
                        engine = self._engine_for(prepared, slots, engine)
                        writing = self._add(prepared, engine)
                        running[writing.handle] = name, writing
                if not running:
                    if waiting is None:
                        return
                    (name, prepared), waiting = waiting, None
                    engine = self._engine_for(prepared, slots, engine)
                    writing = self._add(prepared, engine)
                    running[writing.handle] = name, writing
                assert engine is not None, "texts run in an engine"
                engine.prepare()
                for _, writing in running.values():
                    writing.begin()
                for handle, block in engine.step().items():
                    name, writing = running[handle]
                    if isinstance(block, InputError):
                        del running[handle]
                        yield name, block
                        continue
                    writing.push(block)
                    if writing.ended:
                        del running[handle]
                        writing.finish()
                        yield name, writing.completion()
        finally:
            if engine is not None:
                for handle in running:
                    engine.cancel(handle)
                self._idle = engine

    def _engine_for(self, prepared: _Prepared, slots: int, engine: Engine | None) -> Engine:
        """The current engine, or a new one if there is none or the text is too long for it."""
        if engine is not None and engine.max_length >= prepared.max_length:
            return engine
        del engine  # frees its memory first
        return self._take_engine(prepared.max_length, slots)

    def _add(self, prepared: _Prepared, engine: Engine) -> _Writing:
        choose_k = self._choose_k(prepared.speculative_k, prepared.sampler, engine)
        request = Request(
            prepared.ids, prepared.max_length, prepared.stop, prepared.sampler, choose_k, prepared.grammar
        )
        # The text continues the prompt, so its leading space is kept for every tokenizer.
        text = Pieces(self.codec.detokenizer(after=prepared.ids))
        return _Writing(prepared, request, engine.add(request), text)

    def _choose_k(self, speculative_k: int | Literal["auto"], sampler: Sampler, engine: Engine) -> SpeculativeK:
        """Makes the policy that chooses k for one text."""
        drafter = self.drafter
        if drafter is None:
            return FixedK(0)
        most = min(drafter.max_k, self.verify_width - 1)
        if speculative_k != "auto":
            return FixedK(min(speculative_k, most))
        self._drafters[id(drafter)] = drafter
        if isinstance(sampler, Rejection):
            # The text depends on k here, so k must not depend on a clock or on other texts.
            key: tuple[object, ...] = id(drafter), Rejection
            if key not in self._costs:
                self._costs[key] = modelled(self.placed, drafter, most)
            return AdaptiveK(self._costs[key], Acceptance(most))
        accepted = self._accepted.setdefault((id(drafter), sampler.batch_key), Acceptance(most))
        alone = self._timed(engine, drafter, most, sampler, 1)
        if engine.slots == 1:
            return AdaptiveK(alone, accepted)
        together = self._timed(engine, drafter, most, sampler, engine.slots)
        of = functools.cache(lambda running: alone.towards(together, (running - 1) / (engine.slots - 1)))
        return AdaptiveK(alone, accepted, lambda: (engine.running, of(engine.running)))

    def _timed(self, engine: Engine, drafter: Drafter, most: int, sampler: Sampler, count: int) -> RoundCosts:
        """Costs of rounds with `count` texts. They are measured only while the engine is empty."""
        key = id(drafter), sampler.batch_key, count
        if key not in self._costs and engine.running:
            # Other sampling settings cost nearly the same.
            similar = [costs for (*who, _, n), costs in self._costs.items() if (*who, n) == (id(drafter), count)]
            return similar[0] if similar else modelled(self.placed, drafter, most)
        if key not in self._costs:
            self._costs[key] = engine.time_rounds(drafter, most, sampler, count)
        return self._costs[key]

    def reserve(self, max_length: int, slots: int = 1) -> None:
        """Allocates the K/V cache for texts of up to `max_length` tokens, including the prompt.

        Otherwise the cache is replaced when a longer text comes. Then prompts are read again from their beginning, and
        steps are compiled again.

        Args:
            max_length: Most tokens of a text.
            slots: Texts at the same time.
        """
        self._idle = None
        engine = self._take_engine(max_length, slots)
        engine.reserve()
        self._idle = engine

    def _take_engine(self, max_length: int, slots: int) -> Engine:
        """The idle engine if it fits, else a new one."""
        with self._lock:
            engine, self._idle = self._idle, None
        if engine is not None and engine.max_length >= max_length and engine.slots == slots:
            engine.stop_ids, engine.drafter = tuple(self._stop_ids), self.drafter
            return engine
        del engine
        return Engine(self.placed, self.drafter, slots=slots, max_length=max_length, stop_ids=self._stop_ids)


@dataclass(frozen=True)
class _Prepared:
    """A text that has been checked and encoded; the fields as in `Completion` and `engine.Request`."""

    prompt: str
    ids: list[int]
    max_length: int
    stop: StopTokens | FirstOf
    strings: StopStrings | None
    sampler: Sampler
    speculative_k: int | Literal["auto"]
    grammar: Grammar | None


class _Writing:
    """A text being generated: takes blocks of tokens, returns pieces of text.

    Attributes:
        handle: Handle of the engine's request.
        ended: Whether the last block has come.

    Args:
        prepared: The text.
        request: The engine's request.
        handle: See above.
        text: Converts tokens to pieces.
    """

    def __init__(self, prepared: _Prepared, request: Request, handle: int, text: Pieces) -> None:
        self._prepared = prepared
        self._request = request
        self.handle = handle
        self._text = text
        self._token_ids: list[int] = []
        self._drafted: list[bool] = []
        self._logprobs: list[TokenLogprobs] = []
        self._blocks: list[Block] = []
        self._pieces: list[Piece] = []
        self._finish_reason: FinishReason | None = None
        self._began = self._first = self._last = 0.0

    def begin(self) -> None:
        """Starts the clock if it is not running yet."""
        self._began = self._began or time.perf_counter()

    @property
    def ended(self) -> bool:
        return self._finish_reason is not None

    def push(self, block: Block) -> list[Piece]:
        """Takes a block; returns the pieces that are now certain."""
        self._last = time.perf_counter()
        self._first = self._first or self._last
        self._blocks.append(block)
        self._token_ids += block.tokens
        self._drafted += block.drafted
        self._logprobs += block.logprobs
        self._text.push(block.tokens, block.drafted)
        self._finish_reason = block.finish_reason
        if self.ended:
            return []
        # A released token may end in characters that may belong to a stop string.
        strings = self._prepared.strings
        return self._release(self._text.char_count if strings is None else strings.safe_chars)

    def finish(self) -> list[Piece]:
        """Ends the text; returns the pieces that were held back."""
        strings = self._prepared.strings
        self._text.flush()
        if strings is not None and self._finish_reason == "length" and (kept := strings.finish()) is not None:
            self._finish_reason = "stop"
            del self._token_ids[kept:], self._drafted[kept:], self._logprobs[kept:]
        cut = strings is not None and strings.found
        return self._release(strings.safe_chars if strings is not None and cut else self._text.char_count)

    def _release(self, char_count: int) -> list[Piece]:
        released = self._text.release(min(char_count, self._text.char_count))
        self._pieces += released
        return released

    def completion(self) -> Completion:
        """The finished text."""
        assert self._finish_reason is not None, "a text that has ended has a reason"
        stats = make_stats(
            self._blocks,
            new_tokens=len(self._token_ids),
            prefill_seconds=self._first - self._began,
            decode_seconds=self._last - self._first,
            draft_seconds=self._request.draft_seconds,
            verify_seconds=self._request.verify_seconds,
        )
        whole = "".join(piece.text for piece in self._pieces)
        return Completion(
            self._prepared.prompt,
            whole,
            self._token_ids,
            self._finish_reason,
            stats,
            self._drafted,
            self._blocks,
            self._pieces,
            None if self._prepared.sampler.logprobs is None else self._logprobs,
        )
