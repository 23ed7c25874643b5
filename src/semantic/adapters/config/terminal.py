r"""Sanitizing untrusted text (of models, clients, servers and files) for a terminal.

Escape sequences could clear the screen, change its title or hide text. A lone surrogate cannot be
encoded at all, and characters that override the writing direction display text in another order.
"""

import re
from typing import Final

_CONTROLS = (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
_REMOVED: Final = {code: None for code in _CONTROLS if chr(code) not in "\n\t"}
_SURROGATES: Final = dict.fromkeys(range(0xD800, 0xE000), "\ufffd")
_TABLE: Final = {**_REMOVED, **_SURROGATES}
_ESCAPED: Final = {code: f"\\u{code:04x}" for code in _TABLE}
_COLOUR: Final = re.compile(r"(\x1b\[[0-9;]*m)")


def printable(text: str) -> str:
    r"""Return the text without control characters; newlines and tabs stay.

    Example:
        >>> printable("one\n\x1b[2Jtwo")
        'one\n[2Jtwo'
    """
    return text.translate(_TABLE)


def printable_line(text: str) -> str:
    r"""Return the text without control characters and on one line, so that it cannot forge another.

    Example:
        >>> printable_line("a\nb")
        'a\\nb'
    """
    return printable(text).replace("\n", "\\n")


def escape_controls(text: str) -> str:
    r"""Return the text with control characters as JSON escapes; newlines and tabs stay.

    Example:
        >>> escape_controls("one\n\x9btwo")
        'one\n\\u009btwo'
    """
    return text.translate(_ESCAPED)


def keep_colours(text: str) -> str:
    r"""Return rendered text without control characters, except for colour sequences.

    Example:
        >>> keep_colours("\x1b[31mred\x1b[0m \x1b[2Jcleared")
        '\x1b[31mred\x1b[0m [2Jcleared'
    """
    parts = _COLOUR.split(text)
    return "".join(part if index % 2 else printable(part) for index, part in enumerate(parts))
