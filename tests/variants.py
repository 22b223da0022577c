"""Every registered pathwise estimator as a test parameter, and options that change its arithmetic."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from conftest import DTYPES, MEMBERS, SOFT, TAU
from torch import Tensor

import gapped

K = 5
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "nz-gst": ("gst", {"detach": False, "gap": 1.0}),
    "nz-gst-expected": ("gst", {"detach": False, "gap": gapped.expected_gap}),
    "gst-expected": ("gst", {"gap": gapped.expected_gap}),
    "gst-1": ("gst", {"gap": 1.0}),
    "gumbel-rao-1": ("gumbel-rao", {"samples": 1}),
    "decoupled-warm": ("decoupled", {"tau_forward": 3.0}),
}
# With one sample Gumbel-Rao's surrogate is one softmax, so that its gradient follows from its value.
SINGLE: dict[str, dict[str, Any]] = {"gumbel-rao": {"samples": 1}, "reinmax-rao": {"samples": 1}}

every_variant = pytest.mark.parametrize("name", [*MEMBERS, *VARIANTS])
every_soft_variant = pytest.mark.parametrize("name", [*SOFT, *VARIANTS])
every_kind_of_sample = pytest.mark.parametrize(
    ("name", "hard"),
    [(name, True) for name in (*MEMBERS, *VARIANTS)] + [(name, False) for name in (*SOFT, *VARIANTS)],
)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def make(name: str, **options: Any) -> Any:
    """A member or a variant, at another temperature than 1."""
    member, own = VARIANTS.get(name, (name, {}))
    return gapped.estimator(member, **{"tau": TAU, **own, **options})


def make_single(name: str, **options: Any) -> Any:
    """A member with one softmax as its surrogate."""
    return gapped.estimator(name, **{**SINGLE.get(name, {}), **options})


def levels_per_row(name: str, *rows: int) -> dict[str, Tensor]:
    """A value for each row of those options that may be tensors and are numbers."""
    kind = make(name)
    levels = [each for each in kind.levels if isinstance(getattr(kind, each), int | float)]
    return {each: torch.linspace(1.0, 2.0, torch.Size(rows).numel()).double().view(rows) for each in levels}
