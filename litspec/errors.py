"""`InputError`, for errors that a user can correct, and escaping of control characters for terminals."""

from __future__ import annotations

# C0 (but newline and tab), DEL, C1, line separators, and what turns the direction of writing.
_CONTROLS = (*range(0x09), *range(0x0B, 0x20), *range(0x7F, 0xA0), *range(0x2028, 0x202F), *range(0x2066, 0x206A))
_SHOWN = {code: f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" for code in _CONTROLS}
_SHOWN |= {code: f"\\u{code:04x}" for code in range(0xD800, 0xE000)}  # halves of pairs, which cannot be written


def printable(text: str) -> str:
    """Escapes the control characters of a text, so that a terminal does not obey them. Newlines and tabs stay."""
    return text.translate(_SHOWN)


class InputError(ValueError):
    """A setting, file or prompt that cannot be used.

    The message is one sentence for the user: what was wrong, the value seen, and what would be right. The command
    prints it and exits with 2. In Python it is a `ValueError`. The message may quote files and names, which can hold
    any character, so its control characters are escaped.
    """

    def __init__(self, message: str) -> None:
        super().__init__(printable(message))
