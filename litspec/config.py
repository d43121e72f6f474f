"""The arguments of `SpecLLM.load` and `SpecLLM.generate`: names, types, defaults, help and ranges, each written once.

Flags, Python signatures, the fingerprint of a job and the keys of its lines are made from these two classes. The
metadata `decides` of a field says what it affects:

    "texts"      it may change the text
    "proposals"  it changes the proposals; a text depends on them only with the rejection sampler
    "placing"    placement of the weights, and trust in files; what changes bits is read from the loaded pair
                 (`jobs.deciding.resolved`)

The metadata `flag` is the type of the flag, if it takes fewer types than the Python argument.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from litspec.arguments import checked, hints_of, shown
from litspec.errors import InputError
from litspec.types import DrafterName, DraftPlacementName, LogprobsMode, PlacementName, Precision, Quantize, SamplerName

if TYPE_CHECKING:
    from litspec.drafters.base import Drafter

Decides = Literal["texts", "proposals", "placing"]

# The commands' defaults where they differ from Python's: LitGPT's values, and a seed, so that texts are repeatable.
FLAG_DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 50, "seed": 1234}
# Settings that commands which measure or compare do not offer.
FOR_TEXTS = (
    "min_p",
    "logit_bias",
    "bad_words",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "json_schema",
    "regex",
    "grammar",
    "response_format",
    "logprobs",
    "logprobs_mode",
)
# Those of them that set the form of a text.
FORMS = ("json_schema", "regex", "grammar", "response_format")


def _about(decides: Decides, help: str, **more: Any) -> dict[str, Any]:
    return {"decides": decides, "help": help, **more}


def _check_types(config: LoadConfig | GenerateConfig) -> None:
    for name, hint in hints_of(type(config)).items():
        object.__setattr__(config, name, checked(name, getattr(config, name), hint))


@dataclass(frozen=True)
class LoadConfig:
    """What to load, on which devices, and with which drafter. The fields' metadata document them.

    Raises:
        InputError: A value of another type or out of its range.
    """

    checkpoint_dir: str | Path | None = field(
        default=None,
        metadata=_about(
            "texts",
            "Folder of the target in LitGPT's format, or its name below `checkpoints/`. Without it the embedded "
            "demonstration pair is loaded.",
            flag=str | None,
        ),
    )
    draft_dir: str | Path | None = field(
        default=None,
        metadata=_about(
            "proposals",
            "Folder of a draft model with the target's tokenizer, or of a drafter that was published for the target. "
            "The kind is recognised from the files (see `litspec.drafters.folders`).",
            flag=str | None,
        ),
    )
    _: KW_ONLY
    drafter: DrafterName | Drafter = field(
        default="auto",
        metadata=_about(
            "proposals",
            "The source of proposals: draft_model (a smaller model), prompt_lookup (the prompt and the text so far), "
            "lookup_then_model (prompt lookup where it finds a match, else the draft model), suffix (this text and "
            "earlier outputs of the loaded pair), early_exit (the target's own first layers), none, or in Python an "
            "instance of `litspec.drafters.Drafter`. auto is what draft_dir holds if it is given, else prompt_lookup.",
            flag=DrafterName,
        ),
    )
    exit_layer: int | None = field(
        default=None,
        metadata=_about("proposals", "Number of first layers that draft, for early_exit; by default a quarter."),
    )
    verify_width: int = field(
        default=8,
        metadata=_about(
            "texts",
            "The most rows that the target verifies at once, at least speculative_k + 1. A round runs the smallest "
            "sufficient number of rows among those whose results are equal to the bit on this machine.",
        ),
    )
    accelerator: str = field(
        default="auto", metadata=_about("placing", "As in Lightning Fabric: auto, cpu, cuda, mps.")
    )
    devices: int | str | Sequence[int] = field(
        default=1,
        metadata=_about("placing", "Number of devices per machine, or a list of them; auto for all.", flag=int | str),
    )
    num_nodes: int = field(default=1, metadata=_about("placing", "Number of machines."))
    placement: PlacementName = field(
        default="auto",
        metadata=_about(
            "placing",
            "Placement of the weights: single, tensor_parallel, sequential or replicate. auto is single for one "
            "device, and with devices auto also where the pair fits on one, else tensor_parallel.",
        ),
    )
    precision: Precision | None = field(
        default=None,
        metadata=_about(
            "placing",
            "Precision of the target's weights: bf16-true, 16-true or 32-true. By default bf16-true on a GPU that "
            "supports it, 32-true on a CPU.",
        ),
    )
    draft_precision: Precision | None = field(
        default=None, metadata=_about("placing", "Precision of the draft model's weights; by default the target's.")
    )
    draft_device: str | None = field(
        default=None, metadata=_about("placing", "Device of the draft model, such as cuda:1; by default the target's.")
    )
    draft_placement: DraftPlacementName = field(
        default="replicated",
        metadata=_about(
            "proposals",
            "With tensor_parallel, whether every device has the whole draft model (replicated) or the draft model is "
            "split like the target.",
        ),
    )
    quantize: Quantize | None = field(
        default=None,
        metadata=_about("texts", "Quantise the target's linear layers with bitsandbytes, as in LitGPT (CUDA only)."),
    )
    compile: bool = field(
        default=False,
        metadata=_about(
            "texts",
            "Compile the steps (`torch.compile`) before the first token. This takes seconds to minutes once per "
            "length of text, and gives more tokens per second. The text may differ from that of uncompiled steps "
            "where two tokens are nearly equal. It is the same with and without a drafter.",
        ),
    )

    convert: bool = field(
        default=False,
        metadata=_about(
            "placing",
            "Convert a folder in Hugging Face's format, in place and once, with LitGPT's converter; it then holds "
            "lit_model.pth and model_config.yaml too.",
        ),
    )
    threads: int | None = field(
        default=None,
        metadata=_about(
            "placing",
            "Threads of a CPU, for the whole process; by default as many as torch uses. On a small or busy machine 1 "
            "may be many times faster.",
        ),
    )
    trust_prompt_style: bool = field(
        default=False,
        metadata=_about("placing", "Allow prompt_style.yaml to name a class that is not LitGPT's. Its code is run."),
    )

    def __post_init__(self) -> None:
        check_drafter_choice(self.drafter)
        _check_types(self)
        for name in ("verify_width", "num_nodes", "exit_layer", "threads"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise InputError(f"{name} must be at least 1, got {value}")
        if self.checkpoint_dir is None and self.draft_dir is not None:
            raise InputError("draft_dir is given without checkpoint_dir; name the target's folder too.")


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """How to generate a text. The fields' metadata document the settings.

    Raises:
        InputError: A value of another type or out of its range.
    """

    sys_prompt: str | None = field(
        default=None, metadata=_about("texts", "System prompt, for prompt styles that have one.")
    )
    max_new_tokens: int = field(default=50, metadata=_about("texts", "The most tokens to generate."))
    min_new_tokens: int = field(
        default=0,
        metadata=_about(
            "texts", "Before this many tokens, stop tokens have probability 0 and other stops are ignored."
        ),
    )
    temperature: float = field(default=1.0, metadata=_about("texts", "Divides the logits; 0 is greedy decoding."))
    top_k: int | None = field(
        default=None, metadata=_about("texts", "Sample only from the k most likely tokens; None for all.")
    )
    top_p: float = field(
        default=1.0,
        metadata=_about(
            "texts",
            "Sample only from the most likely tokens that together have this probability, in [0, 1]. 0 is greedy, 1 "
            "takes all.",
        ),
    )
    min_p: float = field(
        default=0.0,
        metadata=_about(
            "texts",
            "Sample only from tokens with at least this share of the highest probability, in [0, 1]; 0 takes all. The "
            "order is: bias and bans, penalties, top_k, temperature, top_p, min_p.",
        ),
    )
    logit_bias: Mapping[int | str, float] | None = field(
        default=None,
        metadata=_about(
            "texts",
            "Values in [-100, 100] to add to the logits of tokens. A token is given by its id (a number, or its "
            'digits) or its text, such as {"42": -5, " the": 2.5}.',
        ),
    )
    bad_words: str | Sequence[str | Sequence[int]] | None = field(
        default=None,
        metadata=_about(
            "texts",
            "A word, or several (repeat the flag), that the text must not contain, with and without a space before it. "
            "In Python and in files also lists of token ids. After all tokens of a word but the last, the last one "
            "has probability 0.",
            flag=list[str] | None,
        ),
    )
    repetition_penalty: float = field(
        default=1.0,
        metadata=_about(
            "texts",
            "Divides the positive logits of tokens that occur in the prompt or the text, and multiplies the negative "
            "ones; 1 changes nothing.",
        ),
    )
    presence_penalty: float = field(
        default=0.0,
        metadata=_about("texts", "Subtracted from the logits of tokens that occur in the text, in [-2, 2]."),
    )
    frequency_penalty: float = field(
        default=0.0,
        metadata=_about(
            "texts", "Subtracted from the logit of a token for each time it occurs in the text, in [-2, 2]."
        ),
    )
    seed: int | None = field(
        default=None,
        metadata=_about(
            "texts",
            "Seed of the random numbers; the same seed gives the same text. In Python, without a seed one is drawn "
            "from torch's global generator.",
            flag=int,
        ),
    )
    sampler: SamplerName = field(
        default="rejection",
        metadata=_about(
            "texts",
            "rejection accepts the most proposals and keeps the target's distribution. coupled gives the same sampled "
            "text for every drafter and every k, as greedy decoding does.",
        ),
    )
    json_schema: str | Mapping[str, Any] | None = field(
        default=None,
        metadata=_about(
            "texts",
            "The text is JSON of this schema, which is an object or a file that holds one. Keys come in the schema's "
            "order, with spaces as in Python's json.dumps. This setting and the next three need the extra "
            "`structured` (llguidance).",
        ),
    )
    regex: str | None = field(
        default=None,
        metadata=_about("texts", "The whole text matches this regular expression; @FILE reads it from a file."),
    )
    grammar: str | None = field(
        default=None,
        metadata=_about(
            "texts",
            "The text follows this grammar in Lark's notation, starting with its rule `start`. @FILE reads it from a "
            "file.",
        ),
    )
    response_format: Mapping[str, Any] | None = field(
        default=None,
        metadata=_about(
            "texts",
            'The form of the text as in OpenAI\'s API: {"type": "json_object"}, or {"type": "json_schema", '
            '"json_schema": {"schema": {...}}}.',
        ),
    )
    logprobs: int | None = field(
        default=None,
        metadata=_about(
            "texts",
            "Return the log-probability of each token and of this many most likely tokens at its position, in "
            "[0, 100]; 0 for the token alone.",
        ),
    )
    logprobs_mode: LogprobsMode = field(
        default="raw",
        metadata=_about(
            "texts",
            "raw is the model's log-probability, from its unchanged logits. processed is that of the distribution from "
            "which tokens are drawn (for a greedy text, after bias, bans and penalties).",
        ),
    )
    speculative_k: int | Literal["auto"] = field(
        default="auto",
        metadata=_about(
            "proposals",
            "Number of tokens that the drafter proposes per round, 0 to verify_width - 1. auto chooses the fastest. "
            "With the rejection sampler a sampled text depends on k, so there auto uses counts only, and no times.",
        ),
    )
    stop: str | Sequence[str] | None = field(
        default=None,
        metadata=_about(
            "texts",
            "A string, or several (repeat the flag). The text ends before the first of them. A stop may name special "
            "tokens, such as <|im_end|>, which the text itself does not show.",
            flag=list[str] | None,
        ),
    )

    def __post_init__(self) -> None:
        _check_types(self)
        if self.max_new_tokens < 1:
            raise InputError(f"max_new_tokens must be at least 1, got {self.max_new_tokens}")
        if not 0 <= self.min_new_tokens <= self.max_new_tokens:
            raise InputError(
                f"min_new_tokens must be in [0, max_new_tokens = {self.max_new_tokens}], got {self.min_new_tokens}"
            )
        check_sampling(self.temperature, self.top_k, self.top_p, self.min_p)
        self._check_penalties()
        self._read_form()
        if self.logprobs is not None and not 0 <= self.logprobs <= 100:
            raise InputError(f"logprobs must be in [0, 100], or None to return none, got {self.logprobs}")
        if self.speculative_k != "auto" and self.speculative_k < 0:
            raise InputError(
                f"speculative_k must be 'auto' or a whole number of at least 0, got {self.speculative_k!r}"
            )
        stops = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        if "" in stops:
            raise InputError("A stop string is empty; give at least one character.")
        for stop in stops:
            if any("\ud800" <= char <= "\udfff" for char in stop):
                raise InputError(f"The stop string {stop!r} can never match: it contains an unpaired surrogate.")
        object.__setattr__(self, "stop", stops)

    def _read_form(self) -> None:
        """Replaces file names by the files' content, since the text depends on the content."""
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) > 1:
            raise InputError(f"{' and '.join(given)} cannot be combined; give one of them.")
        for name in ("regex", "grammar"):
            if (value := getattr(self, name)) is not None and names_file(name, value):
                content = _content(name, value[1:]).removesuffix("\n")
                if names_file(name, content):
                    # Changed so that it is not mistaken for a file name when the settings are copied.
                    content = ("\\" if name == "regex" else "\n") + content
                object.__setattr__(self, name, content)
        if isinstance(schema := self.json_schema, str):
            text = _content("json_schema", schema.removeprefix("@")) if names_file("json_schema", schema) else schema
            try:
                schema = json.loads(text)
            except ValueError as error:
                raise InputError(f"json_schema is not JSON: {error}.") from error
            if not isinstance(schema, dict):
                raise InputError(f"json_schema must be an object, got {shown(schema)}")
            object.__setattr__(self, "json_schema", schema)

    def _check_penalties(self) -> None:
        for token, bias in (self.logit_bias or {}).items():
            if not -100 <= bias <= 100:
                raise InputError(f"logit_bias must be in [-100, 100], got {bias} for {token!r}")
            if token == "":
                raise InputError("logit_bias names an empty string; give a token's id or its text.")
        words = (self.bad_words,) if isinstance(self.bad_words, str) else tuple(self.bad_words or ())
        if any(len(word) == 0 for word in words):
            raise InputError("bad_words holds an empty word; give at least one character, or one token id.")
        object.__setattr__(self, "bad_words", words)
        if not 0 < self.repetition_penalty < float("inf"):
            raise InputError(f"repetition_penalty must be above 0 (1 changes nothing), got {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -2 <= getattr(self, name) <= 2:
                raise InputError(f"{name} must be in [-2, 2] (0 changes nothing), got {getattr(self, name)}")


def names_file(name: str, value: str) -> bool:
    """Whether the value of a setting is the name of a file that holds it."""
    if name == "json_schema":
        return not value.lstrip().startswith("{")
    return name in ("regex", "grammar") and value.startswith("@")


def _content(name: str, path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not valid UTF-8"
        raise InputError(f"{name} names the file {path!r}, which cannot be read: {reason}.") from error


def check_sampling(temperature: float, top_k: int | None, top_p: float, min_p: float = 0.0) -> None:
    """Checks the ranges of temperature, top-k, top-p and min-p.

    Raises:
        InputError: A value is out of its range.
    """
    if not temperature >= 0 or temperature == float("inf"):
        raise InputError(f"temperature must be a number of at least 0 (0 is greedy), got {temperature}")
    if not 0 <= top_p <= 1:
        raise InputError(f"top_p must be in [0, 1], got {top_p}")
    if not 0 <= min_p <= 1:
        raise InputError(f"min_p must be in [0, 1], got {min_p}")
    if top_k is not None and top_k < 1:
        raise InputError(f"top_k must be at least 1, or None for all tokens, got {top_k}")


def check_drafter_choice(drafter: Any) -> None:
    """Raises InputError if `drafter` is neither a drafter's name nor a `Drafter`."""
    choices = ", ".join(get_args(DrafterName))
    if isinstance(drafter, str):
        if drafter not in get_args(DrafterName):
            raise InputError(f"drafter must be one of {choices}, got {drafter!r}")
        return
    from litspec.drafters.base import Drafter  # imported only when needed: `--help` must be fast

    if not isinstance(drafter, Drafter):
        raise InputError(
            f"drafter must be one of {choices}, or an object of a subclass of litspec.drafters.Drafter, got a "
            f"{type(drafter).__name__}"
        )


def check_k(speculative_k: int | Literal["auto"], verify_width: int) -> None:
    """Raises InputError if there are more proposals than rows to verify them."""
    if speculative_k != "auto" and speculative_k >= verify_width:
        raise InputError(
            f"speculative_k must be below verify_width, which is {verify_width}, got {speculative_k}; "
            f"load with verify_width={speculative_k + 1}"
        )


def check_batch_size(batch_size: Any) -> int | Literal["auto"]:
    """Raises InputError if `batch_size` is neither "auto" nor a positive number of texts."""
    batch_size = checked("batch_size", batch_size, int | Literal["auto"])
    if batch_size != "auto" and batch_size < 1:
        raise InputError(f"batch_size must be 'auto' or a whole number of at least 1, got {batch_size!r}")
    return batch_size


def names_of(decides: Decides) -> tuple[str, ...]:
    """The names of the settings with this value of `decides`."""
    both = (*fields(LoadConfig), *fields(GenerateConfig))
    return tuple(one.name for one in both if one.metadata["decides"] == decides)
