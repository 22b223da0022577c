"""The recipes and workloads of the package, by name: for help texts too, which wait for no other module."""

from __future__ import annotations

import tomllib
from pathlib import Path

FIELD = "field"
"""The name of the board of the field, and of its first recipes taken together."""
ANSWERED = (
    "better", "counts-longer", "coupled-fresh", "coupled-linear", "coupled-own", "coupled-start",
    "coupled-time", "field-variance", "gap-grid", "gapmax-family", "listops-authors",
    "listops-controls", "listops-more", "listops-parser", "listops-short", "raised", "rao-fresh",
    "search", "second-look", "soft", "tuned", "without-relu", "zoo",
)  # fmt: skip
"""Recipes whose question has been answered. They are files beside the records, not part of the package."""
WORKLOAD_TITLES = {
    "tokenizer": "Codes of images: released vector quantizers beside choices of a code",
    "world-model": "A recurrent state-space model with categorical latents, on moving digits",
    "tokens": "A language model tuned by a reward of the texts that it draws",
    "router": "Mixtures of experts in a language model",
}
"""The workloads, a line each."""


def known_recipes() -> dict[str, Path]:
    """The recipes that come with the package, by name."""
    return {path.stem: path for path in sorted((Path(__file__).parent / "recipes").glob("*.toml"))}


def recipe_titles() -> dict[str, str]:
    """The subject of each of them, in a line, sorted by name."""
    recipes = sorted(known_recipes().items())
    return {name: tomllib.loads(path.read_text("utf-8"))["title"] for name, path in recipes}
