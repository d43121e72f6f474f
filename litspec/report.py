"""Statistics of a text and the origin of its tokens: numbers, coloured text, plots."""

from __future__ import annotations

import html
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TextIO

from litspec.engine.sequence import Block
from litspec.errors import InputError
from litspec.types import FinishReason

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass
class Stats:
    """Counts and times of one text.

    Attributes:
        new_tokens: Tokens of the completion.
        rounds: Rounds after the prefill.
        proposed: Tokens proposed, up to the end of the text.
        accepted: Number of accepted proposals.
        acceptance_rate: accepted / proposed; 0.0 without proposals.
        tokens_per_round: Block efficiency: tokens per round, without the first token, which comes from the prefill.
        prefill_seconds: Time from the start to the first token.
        decode_seconds: Time from the first token to the last.
        tokens_per_second: Tokens after the first, per second of decoding.
        draft_seconds: Part of `decode_seconds` spent proposing (host time).
        verify_seconds: Part of `decode_seconds` spent verifying (host time).
        rounds_without_proposal: Fraction of rounds in which nothing was proposed.
        accepted_by_position: Number of accepted proposals at each position of a block.
        proposed_by_position: Number of proposals at each position of a block.
        tokens_per_round_histogram: Number of rounds with 1, 2, 3, ... tokens.
    """

    new_tokens: int = 0
    rounds: int = 0
    proposed: int = 0
    accepted: int = 0
    acceptance_rate: float = 0.0
    tokens_per_round: float = 0.0
    prefill_seconds: float = 0.0
    decode_seconds: float = 0.0
    tokens_per_second: float = 0.0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0
    rounds_without_proposal: float = 0.0
    accepted_by_position: list[int] = field(default_factory=list)
    proposed_by_position: list[int] = field(default_factory=list)
    tokens_per_round_histogram: list[int] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        """The numbers for a file, with vLLM's names.

        `tokens_per_round` becomes `mean_acceptance_length`, and its histogram `acceptance_histogram` (rounds with 0, 1,
        2, ... accepted proposals).
        """
        names = {"tokens_per_round": "mean_acceptance_length", "tokens_per_round_histogram": "acceptance_histogram"}
        return {names.get(name, name): value for name, value in asdict(self).items()}

    def summary(self) -> str:
        """One line for a terminal. Without proposals it leaves out the acceptance rate."""
        line = (
            f"{self.new_tokens} tokens: prefill {self.prefill_seconds:.2f} s, decoding {self.decode_seconds:.2f} s, "
            f"{self.tokens_per_second:.1f} tokens/s"
        )
        if not self.proposed:
            return line
        return (
            f"{line}, acceptance rate {self.acceptance_rate:.2f} ({self.accepted}/{self.proposed}), "
            f"{self.tokens_per_round:.2f} tokens per round"
        )


def make_stats(
    blocks: list[Block],
    *,
    prefill_seconds: float,
    decode_seconds: float,
    new_tokens: int | None = None,
    draft_seconds: float = 0.0,
    verify_seconds: float = 0.0,
) -> Stats:
    """Computes the statistics of one text.

    Args:
        blocks: The blocks of the text; the first one is the prefill's.
        new_tokens: Tokens of the completion if it ends before the last block does; None for the tokens of all blocks.
        prefill_seconds: See `Stats`.
        decode_seconds: See `Stats`.
        draft_seconds: See `Stats`.
        verify_seconds: See `Stats`.
    """
    rounds = blocks[1:]
    stats = Stats(
        prefill_seconds=prefill_seconds,
        decode_seconds=decode_seconds,
        draft_seconds=draft_seconds,
        verify_seconds=verify_seconds,
    )
    stats.new_tokens = sum(len(block.tokens) for block in blocks) if new_tokens is None else new_tokens
    stats.rounds = len(rounds)
    stats.proposed = sum(block.proposed for block in rounds)
    stats.accepted = sum(block.accepted for block in rounds)
    if stats.proposed:
        stats.acceptance_rate = stats.accepted / stats.proposed
    if rounds:
        stats.tokens_per_round = max(stats.new_tokens - 1, 0) / len(rounds)
        stats.rounds_without_proposal = sum(block.proposed == 0 for block in rounds) / len(rounds)
        widest = max(block.proposed for block in rounds)
        stats.proposed_by_position = [sum(block.proposed > i for block in rounds) for i in range(widest)]
        stats.accepted_by_position = [sum(block.accepted > i for block in rounds) for i in range(widest)]
        brought = [block.accepted + 1 for block in rounds]
        stats.tokens_per_round_histogram = [brought.count(n) for n in range(1, max(brought) + 1)]
    if decode_seconds > 0:
        stats.tokens_per_second = max(stats.new_tokens - 1, 0) / decode_seconds
    return stats


class Piece(NamedTuple):
    """A part of a text with one origin.

    Attributes:
        text: Whole characters: of one token, or of several tokens that form a character together.
        drafted: Whether all of its tokens were drafted and accepted. Else the target chose at least one of them.
    """

    text: str
    drafted: bool


class _Detokenizer(Protocol):
    @property
    def settled(self) -> bool: ...

    def push(self, tokens: Sequence[int]) -> str: ...

    def flush(self) -> str: ...


class Pieces:
    """Splits a text into pieces while it is generated.

    Attributes:
        char_count: Number of characters that are certain.

    Args:
        detokenizer: A new detokenizer, which is not used elsewhere.
    """

    def __init__(self, detokenizer: _Detokenizer) -> None:
        self._detokenizer = detokenizer
        self._waiting: deque[Piece] = deque()  # certain, but not released
        self._drafted = True  # whether all tokens of the next character were drafted
        self._released = 0
        self.char_count = 0

    def push(self, tokens: Sequence[int], drafted: Sequence[bool]) -> None:
        """Takes the next tokens, and for each whether it was drafted and accepted."""
        for token, by_drafter in zip(tokens, drafted):
            self._drafted = self._drafted and by_drafter
            if text := self._detokenizer.push([token]):
                self._append(text)
                self._drafted = by_drafter  # a character may end and the next begin within this token
            if self._detokenizer.settled:
                self._drafted = True

    def flush(self) -> None:
        """Ends the text: what was held back becomes certain."""
        self._append(self._detokenizer.flush())

    def release(self, char_count: int) -> list[Piece]:
        """The pieces between the end of the last call and `char_count` characters, at most `self.char_count`.

        The last piece is split if necessary; the rest comes with the next call.
        """
        released = []
        while self._released < char_count:
            piece = self._waiting.popleft()
            room = char_count - self._released
            if len(piece.text) > room:
                self._waiting.appendleft(Piece(piece.text[room:], piece.drafted))
                piece = Piece(piece.text[:room], piece.drafted)
            self._released += len(piece.text)
            released.append(piece)
        return released

    def _append(self, text: str) -> None:
        if text:
            self._waiting.append(Piece(text, self._drafted))
            self.char_count += len(text)


# Green and magenta can be distinguished with every kind of colour vision, and are legible on light and dark grounds.
DRAFTED, OWN = "drafted and accepted", "the target's own"
_TERMINAL = {True: "green", False: "magenta"}
_RGB = {True: "#2ea043", False: "#d0409e"}
_GREY = "#808080"


class TerminalTint:
    """Writes a text to a terminal, with each piece in the colour of its origin. The characters stay unchanged.

    Attributes:
        enabled: False if the file is not a terminal, or colours are not supported or not wanted (`TERM`, `NO_COLOR`).
            The text is then written without colours.

    Args:
        file: Usually `sys.stdout`.
    """

    def __init__(self, file: TextIO) -> None:
        from rich.console import Console

        self._file = file
        self._console = Console(file=file)
        self.enabled = file.isatty() and self._console.color_system is not None and not self._console.no_color

    def write(self, pieces: Sequence[Piece]) -> None:
        """Writes pieces and flushes."""
        if not self.enabled:
            self._file.write("".join(piece.text for piece in pieces))
            self._file.flush()
            return
        from rich.segment import Segment, Segments
        from rich.style import Style

        # rich writes segments unchanged. Other text it would wrap, highlight, or parse as markup.
        segments = [Segment(piece.text, Style(color=_TERMINAL[piece.drafted])) for piece in pieces]
        self._console.print(Segments(segments), end="", crop=False)

    @staticmethod
    def write_legend(file: TextIO) -> None:
        """Writes a line that explains the colours; it names them, since the file may not be a terminal."""
        from rich.console import Console
        from rich.text import Text

        green, magenta = _TERMINAL[True], _TERMINAL[False]
        legend = Text.assemble((f"{green}: {DRAFTED}", green), ", ", (f"{magenta}: {OWN}", magenta))
        Console(file=file).print(legend, soft_wrap=True)


def to_html(pieces: Sequence[Piece], drafted: Sequence[bool], stats: Stats, finish_reason: FinishReason) -> str:
    """HTML for a notebook: the text with its pieces coloured by origin, and the statistics below it.

    Args: as the fields of `llm.Completion`.

    Background colours are translucent and the text keeps the notebook's colour, so that it is legible in light and dark
    themes. Styles are inline, since notebooks remove style sheets from untrusted outputs.
    """

    def tinted(text: str, by_drafter: bool, more: str = "") -> str:
        # HTML parsers convert a carriage return to a line feed unless it is escaped.
        text = html.escape(text).replace("\r", "&#13;")
        return f'<span style="background-color:{_RGB[by_drafter]}47;border-radius:3px{more}">{text}</span>'

    text = "".join(tinted(*piece) for piece in pieces) or '<span style="opacity:.6">(no text)</span>'
    chip = ";padding:1px 6px;white-space:nowrap"
    legend = tinted(f"{sum(drafted)} {DRAFTED}", True, chip)
    legend += tinted(f"{len(drafted) - sum(drafted)} {OWN}", False, chip)
    ending = {"stop": "ended at a stop", "length": "ended at the length limit"}[finish_reason]
    rate = f"acceptance rate {stats.acceptance_rate:.0%} ({stats.accepted} of {stats.proposed})"
    numbers = [
        f"{stats.new_tokens} tokens, {ending}",
        rate if stats.proposed else "nothing was proposed",
        f"{stats.tokens_per_round:.2f} tokens per round",
        f"{stats.tokens_per_second:.1f} tokens/s",
    ]
    items = "".join(f'<span style="white-space:nowrap">{number}</span>' for number in numbers)
    # A <pre> keeps white space, and notebooks do not render formulas between dollar signs in it.
    return (
        '<div class="litspec-completion" style="max-width:60em;padding:4px 0">'
        '<pre class="litspec-text" dir="auto" style="white-space:pre-wrap;overflow-wrap:anywhere;margin:0;padding:0;'
        'border:0;background:none;color:inherit;font-family:inherit;font-size:inherit;line-height:1.6">'
        f"{text}</pre>"
        '<div class="litspec-numbers" style="display:flex;flex-wrap:wrap;align-items:baseline;gap:4px 14px;'
        'margin-top:8px;font-size:85%;line-height:1.5;font-variant-numeric:tabular-nums">'
        f"{legend}{items}</div></div>"
    )


def plot_acceptance(blocks: Sequence[Block], stats: Stats) -> Figure:
    """Plots acceptance by position in the block, and tokens per round along the text.

    The background is transparent and the labels are grey, so that the figure is legible in light and dark themes.

    Raises:
        InputError: matplotlib is not installed.
    """
    try:
        import matplotlib
        from matplotlib import pyplot
        from matplotlib.ticker import MaxNLocator, PercentFormatter
    except ModuleNotFoundError as error:
        raise InputError('plot() needs matplotlib; install it with: pip install "litspec[notebook]"') from error
    style: dict[Any, Any] = {"axes.spines.top": False, "axes.spines.right": False, "figure.facecolor": "none"}
    style |= dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), _GREY)
    style |= {"axes.facecolor": "none", "savefig.facecolor": "auto", "axes.titlesize": "medium"}
    with matplotlib.rc_context(style):
        figure = pyplot.figure(figsize=(10, 3.2), layout="constrained")
        by_position, along = figure.subplots(1, 2, width_ratios=(2, 3))

        positions = range(1, len(stats.proposed_by_position) + 1)
        rates = [a / p for a, p in zip(stats.accepted_by_position, stats.proposed_by_position)]
        bars = by_position.bar(positions, rates, color=_RGB[True], alpha=0.5, width=0.7)
        counts = [f"{a}/{p}" for a, p in zip(stats.accepted_by_position, stats.proposed_by_position)]
        by_position.bar_label(bars, counts, padding=2, fontsize="small")
        by_position.set(
            title="Acceptance by position in the block" if rates else "Nothing was proposed",
            xlabel="Position in the block (proposals)",
            ylabel="Accepted (% of proposed)",
            xticks=positions,
            ylim=(0, 1.08),
        )
        by_position.yaxis.set_major_formatter(PercentFormatter(1, symbol=""))

        brought = [block.accepted + 1 for block in blocks[1:]]
        edges = list(accumulate(brought, initial=1))  # the first token comes from the prefill
        if brought:
            along.stairs([1] * len(brought), edges, fill=True, color=_RGB[False], alpha=0.5, label=OWN)
            along.stairs(brought, edges, baseline=1, fill=True, color=_RGB[True], alpha=0.5, label=DRAFTED)
            mean = stats.tokens_per_round
            along.axhline(mean, color=_GREY, linestyle="--", linewidth=1.5, label=f"mean {mean:.2f}")
            figure.legend(*along.get_legend_handles_labels(), loc="outside lower right", ncols=3, frameon=False)
        along.set(
            title="Tokens per round along the text",
            xlabel="Position in the text (tokens)",
            ylabel="Tokens per round",
            xlim=(0, edges[-1]),
            ylim=(0, max(brought, default=1) + 0.5),
        )
        for axis in (along.xaxis, along.yaxis):
            axis.set_major_locator(MaxNLocator(integer=True))
    if "inline" in matplotlib.get_backend():
        pyplot.close(figure)  # else a notebook would show it twice
    return figure
