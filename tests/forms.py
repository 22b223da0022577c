"""Every form of discrete choice under every pathwise estimator, as parameters of one contract.

A form draws a sample of the shape of its logits, whose entries are 0 or 1 when hard. A new estimator is
tested by being registered, a new form by a line in `FORMS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
from conftest import MEMBERS, SOFT, TAU
from torch import Tensor

import gapped


class Form(NamedTuple):
    """A way to draw, and what is to be expected of it."""

    draw: Callable[..., Tensor]
    """``draw(logits, mask=None, generator=None)``."""
    hard: bool = True
    """Whether samples are zeros and ones."""
    has_own_noise: bool = False
    """Whether noise of the gradient comes, in eager code, from a generator of its own."""
    is_random: bool = True
    """Whether two samples differ."""


# The noise of their gradients is drawn beside the category, in eager code by a generator of its own.
RAO = ("gumbel-rao", "reinmax-rao")


def make(name: str, **options: Any) -> Any:
    """An estimator at another temperature than 1, with few draws."""
    few = {"samples": 3} if name in RAO else {}
    return gapped.estimator(name, **{"tau": TAU, **few, **options})


# Those that draw such noise given the largest logit.
NOISY = ("decoupled", "gumbel-softmax", *RAO)

FORMS: dict[str, Form] = {
    **{
        f"{name}-argmax": Form(make(name, draw="argmax").sample, True, name in NOISY, False)
        for name in MEMBERS
    },
    **{f"{name}-gate": Form(make(name).gate, True, name in RAO) for name in MEMBERS},
    **{
        f"{name}-soft-gate": Form(make(name, hard=False).gate, False, name in RAO, name != "straight-through")
        for name in SOFT
    },
    "gst-auto-gate": Form(make("gst", gap="auto").gate),
    "gst-expected-gate": Form(make("gst", gap=gapped.expected_gap).gate),
    "nz-gst-gate": Form(make("gst", detach=False, gap=0.3).gate),
}

every_form = pytest.mark.parametrize("form", FORMS)
