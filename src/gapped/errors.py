"""The one error family of the package."""

from __future__ import annotations

from typing import Any

__all__ = ["GappedError", "reject"]


class GappedError(ValueError):
    """Bad input, in one line: which argument, what came, what is accepted."""


def reject(argument: str, got: Any, accepted: str) -> GappedError:
    """The error for a bad argument, in the one form that all messages share.

    >>> reject("tau", 0, "a positive number")
    GappedError('tau: got 0, expected a positive number')
    """
    shown = got if isinstance(got, str) and " " in got else repr(got)
    return GappedError(f"{argument}: got {shown}, expected {accepted}")
