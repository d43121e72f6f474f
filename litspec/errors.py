"""The one error that a user can mend, and how what others wrote is shown in a terminal."""

from __future__ import annotations

# C0 (but newline and tab), DEL, C1, line separators, and what turns the direction of writing.
_CONTROLS = (*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_SHOWN = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS}
_SHOWN |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}  # halves of pairs, which cannot be written


def printable(text: str) -> str:
    """A text with its control characters escaped, which a terminal would obey; newlines and tabs stay."""
    return text.translate(_SHOWN)


class InputError(ValueError):
    """A setting, file or prompt that cannot be used.

    Its message is one sentence for the person who gave it: what was wrong, the value seen, and what would be right. The
    command prints it and exits with 2; in Python it is a `ValueError` like any other. What it quotes of files and names
    may hold anything, so control characters in it are escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))
