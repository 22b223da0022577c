"""Expressions as characters: 21 symbols, spaces between tokens included.

The paper's script for ListOps gives its reader strings, not lists of tokens, and a reader of strings reads
characters. ``[ MAX 2 9 ]`` is five tokens and eleven characters.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import chain

import torch

from gapped_lab.data.listops.examples import Split, padded
from gapped_lab.data.listops.language import VOCABULARY

# Padding and brackets have the ids that they have as tokens: 0, 1 and 2.
CHARACTERS = (*VOCABULARY[:3], " ", *sorted(set(chain.from_iterable(VOCABULARY[3:]))))


def spelled(split: Split) -> Split:
    """The same expressions with characters in the place of tokens, and without their trees.

    >>> from gapped_lab.data.listops.examples import stack
    >>> from gapped_lab.data.listops.language import parse
    >>> split = stack([parse("( ( ( [MAX 2 ) 9 ) ] )")], False, 1)
    >>> "".join(CHARACTERS[i] for i in spelled(split).tokens[0])
    '[ MAX 2 9 ]'
    """
    ids = {character: number for number, character in enumerate(CHARACTERS)}
    # Each token as its characters and the space that follows it.
    words = [
        bytes(ids[each] for each in f"{word} ") if number else b"" for number, word in enumerate(VOCABULARY)
    ]
    lines = [b"".join(words[token] for token in row)[:-1] for row in split.tokens.tolist()]
    lengths = [len(line) for line in lines]
    longest = max(lengths, default=0)
    return replace(
        split,
        tokens=padded(lines, longest, torch.uint8).reshape(len(lines), longest),
        lengths=torch.tensor(lengths, dtype=torch.int64),
        spans=split.spans[:, :0],
    )
