"""What to take: an estimator where nothing is known yet, and a temperature for each.

The recipe `defaults` trains them on many tasks, and its records decide. The shortfall of a cell on a task is
how far its mean result lies above that of the best cell there, as a part of the latter. Each estimator has
the temperature with the lowest mean shortfall, and the default is the estimator whose own is the lowest.
Tasks whose logits pass a ReLU are left out. The documentation derives both from the records, or fails.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from gapped.texts import DEFAULT, DEFAULT_TAU
from gapped_lab.estimator_text import options_of, parse

CANDIDATES = (
    DEFAULT,
    "gst:gap=1.0",
    "gumbel-rao:samples=10",
    "gumbel-softmax",
    "reinmax",
    "straight-through",
)
"""What commands compare unless told otherwise."""

TEMPERATURES: Mapping[str, float] = MappingProxyType(
    {
        DEFAULT: DEFAULT_TAU,
        "gst": 0.5,
        "gumbel-rao": 0.7,
        "gumbel-softmax": 0.7,
        "reinmax": 1.0,
        "straight-through": 1.0,
        # Not in that recipe: the better of two in the recipe `zoo`.
        "decoupled": 1.0,
        # Not tuned.
        "mve": 1.0,
        "reinmax-rao": 1.0,
    }
)

# A temperature that changes nothing but the variance, as that of a control variate.
_NEUTRAL = 0.5


def temperature(text: str, tau: float | None = None) -> float | None:
    """The temperature that an estimator's text leaves open: `tau`, or by default the recommended one.

    None where the text names a temperature, or the estimator has none.

    >>> temperature("reinmax"), temperature("gst", 0.7), temperature("gst:tau=2"), temperature("rloo")
    (1.0, 0.7, None, None)
    >>> temperature("gst:gap=auto"), temperature("gst:gap=1.2")
    (0.85, 0.5)
    """
    name, options = parse(text)
    if "tau" in options or "tau" not in options_of(name):
        return None
    if tau is not None:
        return tau
    kind = DEFAULT if (name, options.get("gap")) == ("gst", "auto") else name
    return TEMPERATURES.get(kind, _NEUTRAL)
