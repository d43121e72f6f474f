"""`SpecLLM`: load a pair, text in, a `Completion` or a stream out."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from litspec.arguments import checked, spelled_out
from litspec.checkpoint import PairReport, check_pair, open_checkpoint
from litspec.config import GenerateConfig, LoadConfig, check_k
from litspec.demo import DEMO_DRAFT, DEMO_TARGET
from litspec.drafters import AdaptiveK, Drafter, FixedK, SpeculativeK, make_drafter
from litspec.drafters.folders import kind_of, load_published
from litspec.drafters.speculative_k import Acceptance, RoundCosts
from litspec.engine.costs import modelled
from litspec.engine.engine import Engine, Request
from litspec.engine.runner import CompiledRunner, Runner
from litspec.engine.sequence import Block
from litspec.engine.target import Placed
from litspec.errors import InputError
from litspec.logits import LogitsProcessor, rules_of
from litspec.model.packed import PackedLinear
from litspec.placement import place
from litspec.report import Piece, Pieces, Stats, make_stats, plot_acceptance, to_html
from litspec.sampling import Rejection, Sampler, Sampling, make_sampler
from litspec.stopping import FirstOf, StopStrings, StopTokens
from litspec.text import TextCodec
from litspec.types import DrafterName, FinishReason

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Completion:
    """A finished text. In a notebook it shows itself, each token tinted by where it came from.

    Attributes:
        prompt: As it was given, before the prompt style.
        text: The completion. With a stop string it ends before it, perhaps in the middle of the last token.
        token_ids: Its tokens: the shortest run that decodes to (at least) the text.
        finish_reason: "stop" or "length".
        stats: Counts and times.
        drafted: For each token, whether a drafter proposed it (else it is the target's own).
        blocks: What each round committed, the prefill first.
        pieces: The text, cut where its origin may change; joined they are the text.
    """

    prompt: str
    text: str
    token_ids: list[int]
    finish_reason: FinishReason
    stats: Stats
    drafted: list[bool] = field(repr=False)
    blocks: list[Block] = field(repr=False)
    pieces: list[Piece] = field(default_factory=list, repr=False)

    def __str__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return to_html(self.pieces, self.drafted, self.stats, self.finish_reason)

    def plot(self) -> Figure:
        """Acceptance by position in the block and tokens per round along the text, with matplotlib.

        Raises:
            InputError: Without matplotlib.
        """
        return plot_acceptance(self.blocks, self.stats)


def text_seed(seed: int, index: int) -> int:
    """The seed of the index-th text of many: a hash, so that adding a text changes no other's."""
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


class TextStream(Iterator[str]):
    """Pieces of a text as they are committed: whole characters, and nothing that a stop takes back.

    Attributes:
        completion: The finished text; None until the stream has ended.
        latest: What the stream gave last, cut by where it came from.
    """

    def __init__(self, parts: Iterator[list[Piece] | Completion]) -> None:
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
    """A target and who drafts for it, ready to generate. Made by `SpecLLM.load`.

    Attributes:
        placed: The target on its devices.
        codec: The target's tokenizer and prompt style.
        drafter: Who drafts; None for plain decoding.
        notes: What is worth knowing about the loaded pair, as sentences.
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
        self._idle: Engine | None = None  # the last text's, kept for its memory and its prompt
        # What rounds cost, and how many proposals were accepted so far, by drafter and how tokens are chosen.
        self._costs: dict[tuple[object, ...], RoundCosts] = {}
        self._accepted: dict[tuple[object, ...], Acceptance] = {}
        self._drafters: dict[int, Drafter] = {}  # by id, which is then no other's
        self._lock = threading.Lock()

    @classmethod
    @spelled_out(config=LoadConfig)
    def load(cls, config: LoadConfig) -> SpecLLM:
        """Loads a target and its drafter.

        Args:
            {config}

        Raises:
            InputError: A ValueError; a sentence about a folder, file or setting that cannot be used.
        """
        checkpoint_dir, draft_dir, drafter = config.checkpoint_dir, config.draft_dir, config.drafter
        embedded = checkpoint_dir is None
        if checkpoint_dir is None:
            checkpoint_dir = DEMO_TARGET
            draft_dir = DEMO_DRAFT if drafter in ("auto", "draft_model") else None
        target = open_checkpoint(checkpoint_dir, role="checkpoint_dir")
        if drafter not in ("auto", "draft_model"):
            draft_dir = None  # not needed, so not read
        kind = kind_of(draft_dir, target.dir) if draft_dir is not None else "litgpt"
        draft = open_checkpoint(draft_dir, role="draft_dir") if draft_dir is not None and kind == "litgpt" else None
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
        return cls(placed, codec, chosen, pair, embedded, published)

    def with_drafter(
        self, drafter: DrafterName | Drafter, *, exit_layer: int | None = None, verify_width: int | None = None
    ) -> SpecLLM:
        """The same target, loaded once, with another drafter or another width; arguments as in `load`.

        At another width the text may differ in its last bits, hence where two tokens are nearly equal.
        """
        width = self.verify_width if verify_width is None else verify_width
        LoadConfig(drafter=drafter, exit_layer=exit_layer, verify_width=width)  # checks them
        placed = self.placed if verify_width is None else replace(self.placed, verify_width=verify_width)
        chosen = make_drafter(drafter, placed, pair=self._pair, published=self._published, exit_layer=exit_layer)
        return SpecLLM(placed, self.codec, chosen, self._pair, self._embedded, self._published)

    def compiled(self) -> SpecLLM:
        """The same weights and the same kind of drafter, with compiled steps; see `load`.

        Raises:
            InputError: Where that is not possible.
        """
        if any(isinstance(module, PackedLinear) for module in self.placed.model.modules()):
            raise InputError("compiled() needs weights as they are in the file; load with compile=True instead.")
        placed = replace(self.placed, runner=CompiledRunner(self.placed.device))
        return SpecLLM(placed, self.codec, self.drafter, self._pair, self._embedded, self._published)

    @property
    def draft_name(self) -> str | None:
        """The model that draft_dir holds, or the kind of a published drafter; None where there is neither."""
        if self.placed.draft_model is not None:
            return self.placed.draft_model.config.name
        return None if self._published is None else self._published.name

    @property
    def compile_seconds(self) -> float:
        """What building compiled steps took until now."""
        return self.placed.runner.seconds

    @property
    def runner(self) -> Runner:
        """What runs the steps, as they are or compiled."""
        return self.placed.runner

    @property
    def verify_width(self) -> int:
        """The most rows that the target verifies at once."""
        return self.placed.verify_width

    def describe(self) -> str:
        """What is loaded, in a few lines for a terminal."""
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
    def generate(self, prompt: Sequence[str], *, stream: Literal[False] = ..., **settings: Any) -> list[Completion]: ...

    @spelled_out(settings=GenerateConfig)
    def generate(
        self, prompt: str | Sequence[str], settings: GenerateConfig, *, stream: bool = False, index: int = 0
    ) -> Completion | TextStream | list[Completion]:
        """Generates the target's own text, sooner.

        Args:
            prompt: A prompt, to which the checkpoint's prompt style is applied; or several, one text each.
            {settings}
            stream: Return an iterator of pieces of the text instead.
            index: Of this text among many: with the seed it makes the text's own random stream. The texts of a list are
                counted on from it.

        Raises:
            InputError: A ValueError; for a setting out of range, or a prompt too long for the model.
        """
        prompt = checked("prompt", prompt, str | Sequence[str])
        stream, index = checked("stream", stream, bool), checked("index", index, int)
        if not isinstance(prompt, str) and stream:
            raise InputError("stream=True takes one prompt, not a list; stream them one after the other.")
        if settings.seed is None:
            settings = replace(settings, seed=self.placed.share_int(int(torch.randint(2**62, ()))))
        prompts = [prompt] if isinstance(prompt, str) else list(prompt)
        # Checked and encoded now, so that a mistake shows here and not at the first piece.
        streams = [TextStream(self._begin(text, settings, index + i)) for i, text in enumerate(prompts)]
        if stream:
            return streams[0]
        completions = []
        for text in streams:
            for _ in text:
                pass
            completions.append(text.completion)
        return completions[0] if isinstance(prompt, str) else completions

    def _begin(self, prompt: str, settings: GenerateConfig, index: int) -> Iterator[list[Piece] | Completion]:
        """Checks a request; the pieces of its text, then its `Completion`, come as they are asked for."""
        if self.drafter is not None:
            check_k(settings.speculative_k, self.verify_width)
        max_new_tokens, min_new_tokens = settings.max_new_tokens, settings.min_new_tokens
        sampling = Sampling(settings.temperature, settings.top_k, settings.top_p, settings.sampler, settings.min_p)
        speculative_k = 0 if self.drafter is None else settings.speculative_k
        ids = self.codec.encode(prompt, settings.sys_prompt).tolist()
        block_size = self.placed.model.config.block_size
        if len(ids) + max_new_tokens > block_size:
            raise InputError(
                f"The prompt's {len(ids)} tokens and max_new_tokens = {max_new_tokens} make "
                f"{len(ids) + max_new_tokens}, but the model's block_size is {block_size}; shorten one of them."
            )
        stop_tokens = self.codec.stop_tokens
        stop_ids = [sequence[0] for sequence in stop_tokens if len(sequence) == 1]
        tokens_stop = StopTokens(stop_tokens, ignore_first=min_new_tokens)
        vocab_size = self.placed.model.config.padded_vocab_size
        strings = None
        if settings.stop:
            special = self.codec.special_tokens
            detokenizer = self.codec.detokenizer(after=ids)
            strings = StopStrings(settings.stop, detokenizer, min_new_tokens, special=special, vocab_size=vocab_size)
        rules = rules_of(settings, self.codec)
        sampler = make_sampler(
            sampling,
            seed=text_seed(settings.seed, index),
            # Compiled steps hold what bans them in any case, so that all texts share them.
            banned=stop_ids if min_new_tokens or self.runner.compiles else [],
            banned_until=len(ids) + min_new_tokens if min_new_tokens else 0,
            processor=LogitsProcessor(rules, ids, vocab_size) if rules else None,
        )
        return self._run(
            prompt,
            ids,
            max_length=len(ids) + max_new_tokens,
            stop_ids=stop_ids,
            stop=tokens_stop if strings is None else FirstOf(tokens_stop, strings),
            strings=strings,
            sampler=sampler,
            speculative_k=speculative_k,
        )

    def _run(
        self,
        prompt: str,
        ids: list[int],
        *,
        max_length: int,
        stop_ids: list[int],
        stop: StopTokens | FirstOf,
        strings: StopStrings | None,
        sampler: Sampler,
        speculative_k: int | Literal["auto"],
    ) -> Iterator[list[Piece] | Completion]:
        engine = self._take_engine(max_length, stop_ids)
        handle = None
        try:
            choose_k = self._choose_k(speculative_k, sampler, engine)
            request = Request(ids, max_length, stop, sampler, choose_k)
            handle = engine.add(request)
            engine.prepare()
            began = first = time.perf_counter()
            # The text goes on from the prompt: a space that begins it is kept, whatever the tokenizer.
            text = Pieces(self.codec.detokenizer(after=ids))
            token_ids: list[int] = []
            drafted: list[bool] = []
            blocks: list[Block] = []
            pieces: list[Piece] = []
            while not blocks or blocks[-1].finish_reason is None:
                block = engine.step()[handle]
                if isinstance(block, InputError):
                    raise block
                if not blocks:
                    first = time.perf_counter()
                blocks.append(block)
                token_ids += block.tokens
                drafted += block.drafted
                text.push(block.tokens, block.drafted)
                if block.finish_reason is None:
                    # A released token may end in characters that are still held for a stop string.
                    sure = text.char_count if strings is None else min(text.char_count, strings.safe_chars)
                    if released := text.release(sure):
                        pieces += released
                        yield released
            ended = time.perf_counter()
        finally:
            # Also after an error, and where a stream is closed or forgotten before its end.
            if handle is not None:
                engine.cancel(handle)
            self._idle = engine
        finish_reason = blocks[-1].finish_reason
        text.flush()
        if strings is not None and finish_reason == "length" and (kept := strings.finish()) is not None:
            finish_reason = "stop"
            del token_ids[kept:], drafted[kept:]
        if released := text.release(strings.safe_chars if strings is not None and strings.found else text.char_count):
            pieces += released
            yield released
        stats = make_stats(
            blocks,
            new_tokens=len(token_ids),
            prefill_seconds=first - began,
            decode_seconds=ended - first,
            draft_seconds=request.draft_seconds,
            verify_seconds=request.verify_seconds,
        )
        whole = "".join(piece.text for piece in pieces)
        yield Completion(prompt, whole, token_ids, finish_reason, stats, drafted, blocks, pieces)

    def _choose_k(self, speculative_k: int | Literal["auto"], sampler: Sampler, engine: Engine) -> SpeculativeK:
        """The choice of k for one text."""
        if self.drafter is None:
            return FixedK(0)
        most = min(self.drafter.max_k, self.verify_width - 1)
        if speculative_k != "auto":
            return FixedK(min(speculative_k, most))
        self._drafters[id(self.drafter)] = self.drafter
        if isinstance(sampler, Rejection):
            # The text depends on k here, so neither a clock nor another text may decide it.
            key: tuple[object, ...] = id(self.drafter), Rejection
            if key not in self._costs:
                self._costs[key] = modelled(self.placed, self.drafter, most)
            return AdaptiveK(self._costs[key], Acceptance(most))
        key = id(self.drafter), sampler.kind
        if key not in self._costs:
            self._costs[key] = engine.time_rounds(self.drafter, most, sampler)
        return AdaptiveK(self._costs[key], self._accepted.setdefault(key, Acceptance(most)))

    def reserve(self, max_length: int) -> None:
        """Makes room for texts of up to `max_length` tokens, prompt included, before the first of them.

        A cache is else replaced by a larger one as texts grow, which then reads again what prompts have in common, and
        for which steps are compiled again.
        """
        with self._lock:
            self._idle = Engine(self.placed, self.drafter, max_length=max_length)
        if self.drafter is not None:
            self.drafter.reserve(max_length, self.placed.runner)

    def _take_engine(self, max_length: int, stop_ids: list[int]) -> Engine:
        """The idle engine where its cache is large enough, else a new one."""
        with self._lock:
            engine, self._idle = self._idle, None
        if engine is not None and engine.max_length >= max_length:
            engine.stop_ids, engine.drafter = tuple(stop_ids), self.drafter
            return engine
        del engine
        return Engine(self.placed, self.drafter, max_length=max_length, stop_ids=stop_ids)
