"""Draws the embedded pair's text, tinted as `litspec generate --show_acceptance` tints it.

python scripts/picture.py --out_file scripts/tinted.svg
"""

from __future__ import annotations

import argparse
import io
from pathlib import Path

from rich.console import Console
from rich.text import Text

from litspec import SpecLLM
from litspec.report import DRAFTED, OWN

COLORS = {True: "green", False: "magenta"}  # as in a terminal
WIDTH = 92  # columns


def picture(prompt: str, max_new_tokens: int, seed: int) -> str:
    """An SVG of a terminal after the command.

    Args:
        prompt: See `SpecLLM.generate`.
        max_new_tokens: Likewise.
        seed: Likewise.
    """
    out = SpecLLM.load().generate(prompt, max_new_tokens=max_new_tokens, temperature=0.8, top_k=50, seed=seed)
    console = Console(record=True, width=WIDTH, file=io.StringIO(), force_terminal=True, color_system="truecolor")
    console.print(
        Text(
            f'$ litspec generate --prompt "{prompt}" --max_new_tokens {max_new_tokens} --show_acceptance', style="bold"
        )
    )
    legend = [(f"{COLORS[True]}: {DRAFTED}", COLORS[True]), ", ", (f"{COLORS[False]}: {OWN}", COLORS[False])]
    console.print(Text.assemble(*legend))
    console.print(Text.assemble(*((piece.text, COLORS[piece.drafted]) for piece in out.pieces)))
    # Without the times, which are another machine's.
    stats = out.stats
    console.print(
        f"{stats.new_tokens} tokens, acceptance rate {stats.acceptance_rate:.2f} ({stats.accepted}/{stats.proposed}), "
        f"{stats.tokens_per_round:.2f} tokens per round",
        style="dim",
        highlight=False,
    )
    return console.export_svg(title="litspec", unique_id="litspec")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompt", default="It was a truth", help="what the text goes on from")
    parser.add_argument("--max_new_tokens", type=int, default=120, help="length of the text")
    parser.add_argument("--seed", type=int, default=1234, help="of the text")
    parser.add_argument("--out_file", type=Path, required=True, help="where the SVG goes")
    given = parser.parse_args()
    given.out_file.write_text(picture(given.prompt, given.max_new_tokens, given.seed), encoding="utf-8")


if __name__ == "__main__":
    main()
