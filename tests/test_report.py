"""Statistics, coloured text and plots, compared with rounds worked by hand and with parsed output."""

from __future__ import annotations

import io
import itertools
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import matplotlib
import pytest
from checkpoints import write_checkpoint
from hypothesis import given
from hypothesis import strategies as st
from litgpt.tokenizer import Tokenizer
from pages import Page
from tokenizers import AddedToken, decoders, models
from tokenizers import Tokenizer as RustTokenizer

from litspec.__main__ import main
from litspec.engine.sequence import Block
from litspec.errors import InputError
from litspec.report import DRAFTED, OWN, Piece, Pieces, TerminalTint, make_stats, plot_acceptance, to_html
from litspec.text import Detokenizer

matplotlib.use("agg")

# The prefill's token, then rounds that propose 3, 3, 2 and 0 tokens, of which 3, 1, 0 and 0 are accepted.
BLOCKS = [
    Block([5], [False], 0, 0, 0, None),
    Block([1, 2, 3, 4], [True, True, True, False], 1, 3, 3, None),
    Block([6, 7], [True, False], 2, 3, 1, None),
    Block([8], [False], 3, 2, 0, None),
    Block([9], [False], 4, 0, 0, "length"),
]
STATS = make_stats(BLOCKS, prefill_seconds=0.25, decode_seconds=2.0, draft_seconds=0.5, verify_seconds=1.25)
NASTY = [
    Piece("<b>bold</b> &amp; <script>alert('x')</script>", True),
    Piece("[red]not red[/red] $x^2$ \\[y\\] :smile: https://x.org", False),
    Piece("\t tab\r\n  two  spaces \n\n", True),
    Piece("駱馬🦙", False),
    Piece("e\u0301", True),
    Piece("a" * 300, False),
    Piece(" ", True),
]


def joined(pieces: Sequence[Piece]) -> str:
    return "".join(piece.text for piece in pieces)


def test_the_numbers_of_hand_worked_rounds() -> None:
    assert (STATS.new_tokens, STATS.rounds, STATS.proposed, STATS.accepted) == (9, 4, 8, 4)
    assert (STATS.acceptance_rate, STATS.tokens_per_round, STATS.rounds_without_proposal) == (0.5, 2.0, 0.25)
    assert (STATS.proposed_by_position, STATS.accepted_by_position) == ([3, 3, 2], [2, 1, 1])
    assert STATS.tokens_per_round_histogram == [2, 1, 0, 1]
    assert (STATS.prefill_seconds, STATS.decode_seconds, STATS.tokens_per_second) == (0.25, 2.0, 4.0)
    assert (STATS.draft_seconds, STATS.verify_seconds) == (0.5, 1.25)


def test_a_text_of_nothing_has_no_rates() -> None:
    stats = make_stats([Block([], [], 0, 0, 0, "stop")], prefill_seconds=0.1, decode_seconds=0.0)
    assert (stats.new_tokens, stats.acceptance_rate, stats.tokens_per_round, stats.tokens_per_second) == (0, 0, 0, 0)
    assert "0 tokens" in stats.summary()


# --- pieces


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """One token for each byte."""
    return Tokenizer(write_checkpoint(tmp_path_factory.mktemp("bytes") / "model", weights={}))


@pytest.fixture(scope="module")
def byte_fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """A token for each byte, as Llama 2 spells them, and a few words."""
    words = [f"<0x{byte:02X}>" for byte in range(256)] + ["▁", "▁the", "a", "吃"]
    tokenizer = RustTokenizer(models.BPE({w: i for i, w in enumerate(words)}, [], byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True), AddedToken("<|begin|>", special=True)])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    folder = write_checkpoint(tmp_path_factory.mktemp("fallback") / "model", tokenizer=tokenizer, weights={})
    return Tokenizer(folder)


@given(st.text(max_size=12), st.data())
def test_a_character_of_several_tokens_is_one_piece_and_drafted_only_if_all_of_them_were(
    byte_level: Tokenizer, text: str, data: st.DataObject
) -> None:
    spelled = byte_level.processor.encode(text).ids
    origins = data.draw(st.lists(st.booleans(), min_size=len(spelled), max_size=len(spelled)))
    expected, at = [], 0
    for char in text:
        size = len(char.encode())
        expected.append(Piece(char, all(origins[at : at + size])))
        at += size
    pieces = Pieces(Detokenizer(byte_level))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(spelled)), max_size=4)))
    for begin, end in zip([0, *cuts], [*cuts, len(spelled)]):
        pieces.push(spelled[begin:end], origins[begin:end])
    pieces.flush()
    assert pieces.release(pieces.char_count) == expected


def test_a_character_that_begins_within_a_token_comes_from_that_token_too() -> None:
    """Token "a" + half of "é", then the other half: as byte-level vocabularies have them."""
    tokenizer = RustTokenizer(models.BPE({"aÃ": 0, "©": 1, "b": 2}, []))
    tokenizer.decoder = decoders.ByteLevel()
    for first, second in itertools.product((True, False), repeat=2):
        pieces = Pieces(Detokenizer(SimpleNamespace(processor=tokenizer, backend="huggingface")))
        pieces.push([0, 1, 2], [first, second, True])
        assert pieces.release(3) == [Piece("a", first), Piece("é", first and second), Piece("b", True)]


@given(st.lists(st.tuples(st.integers(0, 261), st.booleans()), max_size=30), st.data())
@pytest.mark.parametrize("name", ["byte_level", "byte_fallback"])
def test_pieces_joined_are_the_text_of_all_tokens_however_they_are_cut(
    request: pytest.FixtureRequest, name: str, tokens: list[tuple[int, bool]], data: st.DataObject
) -> None:
    tokenizer = request.getfixturevalue(name)
    pieces = Pieces(Detokenizer(tokenizer))
    released = []
    for token, drafted in tokens:
        pieces.push([token], [drafted])
        released += pieces.release(data.draw(st.integers(len(joined(released)), pieces.char_count)))
    pieces.flush()
    released += pieces.release(pieces.char_count)
    assert joined(released) == tokenizer.processor.decode([token for token, _ in tokens])
    assert all(piece.text for piece in released)
    if len({drafted for _, drafted in tokens}) == 1:
        assert all(piece.drafted == tokens[0][1] for piece in released)


# --- HTML


def test_html_shows_each_character_and_runs_nothing_from_the_text() -> None:
    page = Page(to_html(NASTY, [True, False], STATS, "length"))
    assert "".join(text for text, _ in page.texts[0]) == joined(NASTY)
    assert set(page.tags) == {"div", "pre", "span"}


def test_html_tints_by_origin_with_a_legend_and_numbers() -> None:
    page = Page(to_html([Piece("a ", True), Piece("b", False), Piece("c", True)], [True, False, True], STATS, "stop"))
    (a, green), (b, magenta), (c, again) = page.texts[0]
    assert (a, b, c) == ("a ", "b", "c")
    assert green == again != magenta
    expected = [f"2 {DRAFTED}", f"1 {OWN}", "9 tokens, ended at a stop", "50% (4 of 8)", "2.00 tokens per round"]
    assert all(said in page.rest for said in [*expected, "4.0 tokens/s"])
    none = Page(to_html([], [], make_stats(BLOCKS[:1], prefill_seconds=1, decode_seconds=0), "stop"))
    assert "nothing was proposed" in none.rest and "(no text)" in none.texts[0][0][0]


def luminance(rgb: Sequence[float]) -> float:
    """Relative luminance as WCAG 2 defines it, of channels in [0, 1]."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in rgb]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(front: str, back: Sequence[float]) -> float:
    light, dark = sorted((luminance(matplotlib.colors.to_rgb(front)), luminance(back)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize(("ink", "ground"), [("#000000", "#ffffff"), ("#dddddd", "#111111"), ("#d4d4d4", "#383838")])
def test_tinted_text_is_legible_in_light_and_dark(ink: str, ground: str) -> None:
    page = Page(to_html([Piece("a", True), Piece("b", False)], [True, False], STATS, "stop"))
    for _, tint in page.texts[0]:
        *rgb, alpha = matplotlib.colors.to_rgba(tint)
        blend = [alpha * c + (1 - alpha) * g for c, g in zip(rgb, matplotlib.colors.to_rgb(ground))]
        assert contrast(ink, blend) > 4.5  # WCAG 2's minimum for text
    figure = plot_acceptance(BLOCKS, STATS)
    letters = figure.axes[0].xaxis.label.get_color()
    assert contrast(letters, matplotlib.colors.to_rgb(ground)) > 2.9
    matplotlib.pyplot.close(figure)


# --- plots


def test_the_plot_shows_the_numbers_and_names_their_units() -> None:
    figure = plot_acceptance(BLOCKS, STATS)
    by_position, along = figure.axes
    assert [bar.get_height() for bar in by_position.patches] == [2 / 3, 1 / 3, 1 / 2]
    assert [text.get_text() for text in by_position.texts] == ["2/3", "1/3", "1/2"]
    own, drafted = (patch.get_data() for patch in along.patches)
    assert own.edges.tolist() == drafted.edges.tolist() == [1, 5, 7, 8, 9]
    assert (own.values.tolist(), drafted.values.tolist()) == ([1, 1, 1, 1], [4, 2, 1, 1])
    assert along.lines[0].get_ydata() == [2.0, 2.0]
    for axes in figure.axes:
        assert re.search(r"\((tokens|proposals)\)", axes.get_xlabel())
    assert "%" in by_position.get_ylabel() and along.get_ylabel() == "Tokens per round"
    figure.savefig(io.BytesIO())
    matplotlib.pyplot.close(figure)


@pytest.mark.parametrize("blocks", [BLOCKS[:1], [BLOCKS[0], BLOCKS[4]], [Block([], [], 0, 0, 0, "stop")]])
def test_a_text_without_proposals_can_be_plotted(blocks: list[Block]) -> None:
    figure = plot_acceptance(blocks, make_stats(blocks, prefill_seconds=0.1, decode_seconds=0.1))
    figure.savefig(io.BytesIO())
    assert figure.axes[0].get_title() == "Nothing was proposed"
    matplotlib.pyplot.close(figure)


def test_a_plot_without_matplotlib_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(InputError, match=r'pip install "litspec\[notebook\]"'):
        plot_acceptance(BLOCKS, STATS)


# --- terminal


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name in ("NO_COLOR", "FORCE_COLOR", "COLORTERM", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "40")
    return Terminal()


def test_a_terminal_gets_the_text_unchanged_between_colours(terminal: Terminal) -> None:
    tint = TerminalTint(terminal)
    assert tint.enabled
    tint.write(NASTY[:3])
    tint.write(NASTY[3:])
    assert re.sub(r"\x1b\[\d*m", "", terminal.getvalue()) == joined(NASTY)
    assert terminal.getvalue().startswith("\x1b[32m<b>bold</b>")  # green
    assert "\x1b[35m駱馬🦙\x1b[0m" in terminal.getvalue()  # magenta, and back
    assert terminal.getvalue().endswith("\x1b[0m")


@pytest.mark.parametrize(("variable", "value"), [("NO_COLOR", "1"), ("TERM", "dumb")])
def test_a_terminal_that_wants_no_colours_gets_none(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    tint = TerminalTint(terminal)
    tint.write(NASTY)
    assert not tint.enabled and terminal.getvalue() == joined(NASTY)


def test_a_pipe_gets_no_colours_even_where_they_are_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    pipe = io.StringIO()
    TerminalTint(pipe).write(NASTY)
    assert pipe.getvalue() == joined(NASTY)


def test_the_command_tints_in_a_terminal_and_explains_the_colours(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    write_checkpoint(tmp_path / "model", seed=1)
    command = ["generate", "--checkpoint_dir", str(tmp_path / "model"), "--prompt", "abcabc", "--max_new_tokens", "40"]
    with pytest.raises(SystemExit):
        main(command)
    plain, _ = capsys.readouterr()
    with pytest.raises(SystemExit):
        main([*command, "--show_acceptance", "true"])
    piped, said = capsys.readouterr()
    assert piped == plain and DRAFTED not in said
    monkeypatch.setattr(sys, "stdout", terminal)
    with pytest.raises(SystemExit):
        main([*command, "--show_acceptance"])
    monkeypatch.undo()
    _, said = capsys.readouterr()
    assert "\x1b[35m" in terminal.getvalue()
    assert re.sub(r"\x1b\[\d*m", "", terminal.getvalue()) == plain
    assert f"green: {DRAFTED}, magenta: {OWN}" in said
