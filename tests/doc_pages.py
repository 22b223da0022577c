"""The pages of the documentation: their fenced blocks, the commands in them, and when drawings are alike."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import numpy as np

ROOT = Path(__file__).parents[1]
EXAMPLE_PAGES = sorted((ROOT / "docs" / "examples").glob("*.md"))
PAGES = [
    *(ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "results" / "answered" / "README.md"),
    *sorted((ROOT / "docs").glob("*.md")),
    *EXAMPLE_PAGES,
]


class Block(NamedTuple):
    """A fenced block of a page."""

    where: str
    language: str
    code: str


def blocks_of(text: str, name: str = "page") -> list[Block]:
    matches = re.finditer(r"^```(\w*)\n(.*?)^```$", text, flags=re.M | re.S)
    return [Block(f"{name}:{text[: m.start()].count(chr(10)) + 1}", m[1], m[2]) for m in matches]


def blocks(*languages: str) -> list[Block]:
    """The blocks of all pages in one of these languages."""
    pages = [blocks_of(page.read_text(encoding="utf-8"), page.name) for page in PAGES]
    return [block for page in pages for block in page if block.language in languages]


def commands_in(block: Block, program: str) -> list[list[str]]:
    """The arguments of each call of `program` in a shell block; paths of the repository are absolute."""
    lines = block.code.replace("\\\n", " ").splitlines()
    calls = [shlex.split(line, comments=True) for line in lines]
    return [
        [str(ROOT / word) if word.startswith("results/answered/") else word for word in call[1:]]
        for call in calls
        if call and Path(call[0]).name == program
    ]


SHELL = blocks("bash", "sh", "console", "shell")
# Every call of `gapped`, with the place where it stands.
CALLS = [(block.where, call) for block in SHELL for call in commands_in(block, "gapped")]


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
