"""What passes for a whole number, wherever one is taken."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from conftest import normal, seeded
from torch import Tensor

import gapped

LOGITS = normal(5, 2, 16)
USES: dict[str, Callable[[Any], Tensor]] = {
    "counts": lambda n: gapped.counts.binomial(n(200), LOGITS, order=n(2), generator=seeded()),
    "subset": lambda n: gapped.subset(LOGITS, n(8), generator=seeded()),
    "marginals": lambda n: gapped.subsets.marginals(LOGITS, n(8)),
    "entropy": lambda n: gapped.subsets.entropy(LOGITS, n(8)),
    "choose": lambda n: gapped.choose(LOGITS, n(3), dim=n(2), generator=seeded()).index,
    "Mask": lambda n: gapped.nn.Mask(n(8), n(2), n(4))(seeded()),
    "nm_mask": lambda n: gapped.nm_mask(LOGITS, n(2), n(4), generator=seeded()),
    "subsets.expectation": lambda n: gapped.subsets.expectation(
        lambda s: s[..., 0].sum(-1), LOGITS, n(8), n(3), generator=seeded()
    ),
    **{
        kind.__name__: lambda n, kind=kind: gapped.expectation(
            lambda z: z[..., 0].sum(-1), LOGITS, kind(samples=n(3)), generator=seeded()
        )
        for kind in (gapped.RLOO, gapped.Reinforce, gapped.DoubleCV, gapped.RODEO)
    },
}


@pytest.mark.parametrize("use", USES)
def test_numpy_integers_are_whole_numbers(use: str) -> None:
    plain = USES[use](int)
    assert all(torch.equal(USES[use](kind), plain) for kind in (np.uint8, np.int32, np.int64))
    with pytest.raises(gapped.GappedError):
        USES[use](np.float64)
