"""Text that anybody may have written, made fit to be shown and to name files."""

from __future__ import annotations

import re

__all__ = ["file_name", "printable"]


def printable(text: str) -> str:
    r"""The text with escapes for what does not print: it cannot move the cursor, end a line or turn round.

    >>> printable("plain τ"), printable("\x1b[31mred\n")
    ('plain τ', '\\x1b[31mred\\n')
    """
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def file_name(text: str) -> str:
    """A name for a file or folder, on any system, that stays where it is put.

    >>> file_name("gst:gap=1.2"), file_name("../../x"), file_name(".."), file_name("vae-30x10")
    ('gst_gap=1.2', '_.._x', '_', 'vae-30x10')
    """
    return re.sub(r"[^\w.,=+() -]", "_", text)[:100].strip(". ") or "_"
