"""ListOps (Nangia and Bowman 2018): prefix expressions over digits, whose parse tree the model must find.

An example is a line such as ``( ( ( [MAX 2 ) 9 ) ] )`` with the value of the expression, 9, as its label.
The parentheses spell the binary tree; a model sees the tokens ``[ MAX 2 9 ]`` alone.
"""

from __future__ import annotations

from pathlib import Path

from gapped.lab.data.listops.examples import ListOps, Split
from gapped.lab.data.listops.expression import Expression, evaluate, parse
from gapped.lab.data.listops.generator import generate
from gapped.lab.data.listops.grouping import buckets
from gapped.lab.data.listops.source import COUNT, LISTOPS, MAX_TOKENS, ListOpsSource
from gapped.lab.data.listops.tokens import PADDING, VOCABULARY, decode, encode

__all__ = [
    "LISTOPS",
    "PADDING",
    "VOCABULARY",
    "Expression",
    "ListOps",
    "ListOpsSource",
    "Split",
    "buckets",
    "decode",
    "encode",
    "evaluate",
    "generate",
    "load",
    "parse",
]


def load(
    data_dir: Path | None = None,
    progress: bool = True,
    *,
    count: int = COUNT,
    seed: int = 0,
    max_tokens: int = MAX_TOKENS,
) -> ListOps:
    """The three splits, verified; of each, the expressions with fewer than `max_tokens` tokens.

    `count` training expressions are drawn under `seed` by the rule of the official set, disjoint from the
    other splits, and kept in the user's cache. Validation and test are the official ones where `data_dir`,
    ``$GAPPED_DATA`` or the cache holds their files (``valid.tsv``, ``test_d20s.tsv``); where not, they are
    drawn too, and say so: their `Split.official` is false.
    """
    return ListOpsSource(count=count, seed=seed, max_tokens=max_tokens).load(data_dir, progress, False)
