"""Comparing drawings: what must be alike in two SVG files that different versions of matplotlib drew."""

from __future__ import annotations

import re

import numpy as np


def same_drawing(one: str, other: str) -> bool:
    """All words and numbers alike, shapes to a fraction of a unit: layout differs a little by version."""

    def words(svg: str) -> list[str]:
        return re.findall(r'>([^<>]*\S[^<>]*)</(?:text|title|tspan)>|aria-label="([^"]*)"', svg)

    def shapes(svg: str) -> list[np.ndarray]:
        return [
            np.array(re.findall(r"-?\d+\.?\d*", d), dtype=float) for d in re.findall(r' d="([^"]*)"', svg)
        ]

    first, second = shapes(one), shapes(other)
    alike = len(first) == len(second) and all(
        a.shape == b.shape and np.allclose(a, b, atol=1.0) for a, b in zip(first, second, strict=True)
    )
    return alike and words(one) == words(other)
