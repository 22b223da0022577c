"""The marked blocks of the documents, by name.

A block is text between `<!-- records:NAME -->` and `<!-- /records:NAME -->`. The name is one of `BLOCKS`, or
the name of a recipe whose table it shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import bench
import vocabulary
from evidence import Evidence
from field_board import field_board, field_default
from protocols import protocols
from readme import gains, recommended, situations
from study import family, shortfalls
from template import fill
from workloads import workloads

from gapped.errors import GappedError
from gapped_lab.report.rendering import render_markdown, to_markdown

# Each makes the values of the template of its name, or the text itself where it is a table alone.
BLOCKS: dict[str, Callable[[Evidence], dict[str, Any] | str]] = {
    "readme": gains,
    "situations": situations,
    "recommended": recommended,
    "protocols": protocols,
    "shortfalls": shortfalls,
    "gapmax-family": lambda evidence: to_markdown(family(evidence)),
    "field-default": field_default,
    "field-board": field_board,
    "bench": bench.sample_tables,
    "bench-index": bench.index_tables,
    "bench-work": bench.work_tables,
    "bench-headline": bench.headline,
    "vocabulary": vocabulary.linear_choices,
    "word-model": vocabulary.word_model,
    "workloads": workloads,
}

MARKER = re.compile(r"<!-- (/?)records:([\w.-]+) -->")
BLOCK = re.compile(r"<!-- records:([\w.-]+) -->.*?<!-- /records:\1 -->", flags=re.S)


def render_block(evidence: Evidence, name: str) -> str:
    """The text of a block."""
    try:
        if name not in BLOCKS:
            return render_markdown(evidence.records, name)
        content = BLOCKS[name](evidence)
        return content if isinstance(content, str) else fill(name, content)
    except GappedError as problem:
        raise GappedError(f"records:{name}: {problem}") from None


def fill_blocks(evidence: Evidence, text: str) -> str:
    """The text with every block between markers as the records make it; the rest stays.

    A marker that opens a block must be followed by the marker that ends it.
    """
    marks = [(end == "/", name) for end, name in MARKER.findall(text)]
    names = [name for end, name in marks if not end]
    if not names or marks != [mark for name in names for mark in ((False, name), (True, name))]:
        raise GappedError("expected pairs of <!-- records:NAME --> and <!-- /records:NAME --> markers")
    return BLOCK.sub(
        lambda m: (
            f"<!-- records:{m[1]} -->\n{render_block(evidence, m[1]).strip()}\n<!-- /records:{m[1]} -->"
        ),
        text,
    )
