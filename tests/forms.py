"""Every form of discrete choice under every pathwise estimator, as parameters of one contract.

A form draws a sample of the shape of its logits, whose entries are 0 or 1 when hard. A new estimator is
tested by being registered, a new form by a line in `FORMS`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from conftest import MEMBERS, SOFT, TAU
from torch import Tensor
from variants import VARIANTS
from variants import make as variant

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
    total: int | None = 1
    """The sum of a row, which has the gradient zero; None for gates, which have none."""
    may_be_still: bool = False
    """Whether a row may have no gradient: within its gap NZ-GST moves none, and a subset may hold all."""


# The noise of their gradients is drawn beside the category, in eager code by a generator of its own.
RAO = ("gumbel-rao", "reinmax-rao")


def make(name: str, **options: Any) -> Any:
    """An estimator at another temperature than 1, with few draws."""
    few = {"samples": 3} if name in RAO else {}
    return gapped.estimator(name, **{"tau": TAU, **few, **options})


def chosen(**options: Any) -> Callable[..., Tensor]:
    """The zeros and ones of drawn categories, by their rows of a table."""

    def draw(logits: Tensor, **how: Any) -> Tensor:
        categories = logits.shape[-1]
        few = {"k": min(options["k"], categories)} if "k" in options else {}
        table = torch.eye(categories, dtype=logits.dtype, device=logits.device)
        rows = gapped.choose(logits, **{**options, **few}, **how).select(table)
        return rows.sum(-2) if few else rows

    return draw


def weighted(logits: Tensor, **how: Any) -> Tensor:
    """The weights of two categories, at their places."""
    choices = gapped.choose(logits, k=min(2, logits.shape[-1]), **how)
    weights = choices.weights()
    return torch.zeros_like(logits).scatter(-1, choices.index, weights)


def subset(*options: Any, **more: Any) -> Callable[..., Tensor]:
    return lambda logits, **how: gapped.subset(logits, min(2, logits.shape[-1]), *options, **more, **how)


# Those that draw such noise given the largest logit.
NOISY = ("decoupled", "gumbel-softmax", *RAO)

GATES: dict[str, Form] = {
    **{f"{name}-gate": Form(make(name).gate, True, name in RAO, total=None) for name in MEMBERS},
    **{
        f"{name}-soft-gate": Form(
            make(name, hard=False).gate, False, name in RAO, name != "straight-through", None
        )
        for name in SOFT
    },
    "gst-auto-gate": Form(make("gst", gap="auto").gate, total=None),
    "gst-expected-gate": Form(make("gst", gap=gapped.expected_gap).gate, total=None),
    "nz-gst-gate": Form(make("gst", detach=False, gap=0.3).gate, total=None, may_be_still=True),
}
SEVERAL: dict[str, Form] = {
    "choices": Form(chosen(k=2), total=2, may_be_still=True),
    "choices-weights": Form(weighted, False, may_be_still=True),
    "choices-straight-through": Form(chosen(k=2, estimator="straight-through"), total=2, may_be_still=True),
    "choices-gst": Form(chosen(k=2, estimator="gst:gap=1"), total=2, may_be_still=True),
    "choices-sequential": Form(chosen(k=2, law="sequential"), total=2, may_be_still=True),
    "choices-argmax": Form(chosen(k=2, draw="argmax"), True, False, False, 2, True),
    "subset": Form(subset(0.7), total=2, may_be_still=True),
    "subset-gst": Form(subset(0.7, estimator="gst:gap=1"), total=2, may_be_still=True),
    "subset-soft": Form(subset(0.7, False), False, is_random=False, total=2, may_be_still=True),
}
FORMS: dict[str, Form] = {
    **{
        name: Form(variant(name).sample, True, "rao" in name, may_be_still=name.startswith("nz-"))
        for name in (*MEMBERS, *VARIANTS)
    },
    **{
        f"{name}-soft": Form(
            variant(name, hard=False).sample,
            False,
            "rao" in name,
            name != "straight-through",
            may_be_still=name.startswith("nz-"),
        )
        for name in (*SOFT, *VARIANTS)
    },
    **{
        f"{name}-argmax": Form(make(name, draw="argmax").sample, True, name in NOISY, False)
        for name in MEMBERS
    },
    **{f"{name}-choice": Form(chosen(estimator=make(name)), True, name in RAO) for name in MEMBERS},
    **GATES,
    **SEVERAL,
}
COMPILED = [name for name in FORMS if name.endswith("-argmax") and name != "choices-argmax"]
COMPILED += [*GATES, "choices", "choices-weights", "choices-sequential", "subset-gst"]
"""Forms of which a compiled program is tested here; of plain samples it is in `test_transforms.py`."""

every_form = pytest.mark.parametrize("form", FORMS)
