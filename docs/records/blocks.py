"""The marked blocks of the documents, by name.

A block is text between `<!-- records:NAME -->` and `<!-- /records:NAME -->`. The name is one of `BLOCKS`, or
that of a recipe whose table it shows.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import answer
import beyond
import paper_blocks
import speed
import tree_blocks
import vocabulary_blocks
from claims import claims
from conclusions import conclusions
from decomposition import decomposition
from evidence import Evidence
from field_again import counts_again, rao_again
from field_board import field_board, field_default, field_status
from field_lessons import field_lessons
from field_variance import coupled_time, field_variance
from parser_start import parser_start
from template import fill
from variance import variance

from gapped.errors import GappedError
from gapped_lab.report.rendering import render_markdown

# Each makes the values of the template of its name, or the text itself where there is no sentence in it.
BLOCKS: dict[str, Callable[[Evidence], dict[str, Any] | str]] = {
    "claims": claims,
    "agreement": paper_blocks.agreement,
    "listops-agreement": paper_blocks.listops_agreement,
    "failing": paper_blocks.failing,
    "second-look": paper_blocks.second_look,
    "coupled-findings": paper_blocks.coupled_findings,
    "mixed-findings": paper_blocks.mixed_findings,
    "protocols": paper_blocks.protocols,
    "coupled-own": paper_blocks.coupled_own,
    "efficiency-notes": paper_blocks.efficiency_notes,
    "latent-trees": paper_blocks.latent_trees,
    "parser-start": parser_start,
    "parser-training": tree_blocks.parser_training,
    "tree-controls": tree_blocks.tree_controls,
    "tree-authors": tree_blocks.tree_authors,
    "tree-short": tree_blocks.tree_short,
    "advantage": beyond.advantage,
    "best-temperatures": beyond.best_temperatures,
    "gap-grid-best": beyond.gap_grid,
    "better": beyond.better,
    "tuned": beyond.tuned,
    "soft": beyond.soft,
    "conclusions": conclusions,
    "default": answer.default,
    "default-limits": answer.default,
    "shortfalls": answer.shortfalls,
    "when": answer.when,
    "field-status": field_status,
    "field-default": field_default,
    "field-lessons": field_lessons,
    "counts-again": counts_again,
    "rao-again": rao_again,
    "field-board": field_board,
    "field-variance-ratio": field_variance,
    "coupled-time": coupled_time,
    "variance-ranges": variance,
    "variance-terms": decomposition,
    "speed": speed.speed,
    "bench": speed.bench_tables,
    "bench-index": speed.bench_index_tables,
    "bench-work": speed.bench_work,
    "bench-headline": speed.bench_headline,
    "vocabulary": vocabulary_blocks.vocabulary,
    "word-model": vocabulary_blocks.word_model,
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


def filled(evidence: Evidence, text: str) -> str:
    """The text with every block between markers as the records make it; the rest stays.

    Every marker that opens a block must be followed by the one that ends it.
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
