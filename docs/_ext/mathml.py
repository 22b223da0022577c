"""Formulas as MathML, made while the pages are built: they need no script and no network."""

from __future__ import annotations

import re
from html import unescape
from itertools import pairwise
from typing import Any
from xml.etree import ElementTree

from docutils import nodes
from latex2mathml.converter import convert_to_element
from sphinx.application import Sphinx
from sphinx.util import logging

logger = logging.getLogger(__name__)
# What the translator lacks, in its own words.
SPELLINGS = {r"\\operatorname\b": r"\\mathrm", r"\\arg\b": r"\\mathrm{arg}\\,", r"\{aligned\}": "{split}"}


def render(node: nodes.Element, display: str) -> str:
    """The formula of a node; one that cannot be translated is a warning, and so an error of the build."""
    text = node.astext()
    for there, here in SPELLINGS.items():
        text = re.sub(there, here, text)
    try:
        made = convert_to_element(text, display=display)
    except Exception as problem:
        logger.warning("formula %r: %s: %s", text, type(problem).__name__, problem, location=node)
        return ""
    for element in made.iter():
        element.text = unescape(element.text or "") or None
        if element.text == "∞":  # a number, without an operator's space around it
            element.tag = "mi"
        if element.text == "~":  # what the translator makes of a relation
            element.tag, element.text = "mo", "∼"
    for row in list(made.iter()):
        for place, (name, operand) in reversed(list(enumerate(pairwise(row)))):
            if name.tag == "mi" and len(name.text or "") > 1 and operand.tag in ("mi", "msub", "msup"):
                row.insert(place + 1, ElementTree.Element("mspace", width="0.17em"))  # log p, not logp
    # A command that the translator does not know comes out as its own name, an alignment as an ampersand.
    unknown = [element.text for element in made.iter() if re.search(r"[\\&]", element.text or "")]
    if unknown:
        logger.warning("formula %r: cannot translate %s", text, ", ".join(unknown), location=node)
    return ElementTree.tostring(made, encoding="unicode")


def inline(translator: Any, node: nodes.math) -> None:
    translator.body.append(render(node, "inline"))
    raise nodes.SkipNode


def block(translator: Any, node: nodes.math_block) -> None:
    translator.body.append(f'<div class="formula">{render(node, "block")}</div>')
    raise nodes.SkipNode


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_html_math_renderer("mathml", inline_renderers=(inline, None), block_renderers=(block, None))
    return {"parallel_read_safe": True, "parallel_write_safe": True}
