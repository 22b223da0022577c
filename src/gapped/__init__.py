"""gapped: categorical samples that carry a gradient.

>>> import torch, gapped
>>> logits = torch.randn(4, 10, requires_grad=True)
>>> z = gapped.sample(logits)
>>> z.sum(-1)
tensor([1., 1., 1., 1.], grad_fn=<SumBackward1>)

The names below are loaded on first use, so that what needs no torch (the command line's help, the report)
does not wait for it.
"""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path
from typing import Any

from gapped.errors import MissingExtra

# Module of each public name. The stub beside this file lists them once, for type checkers too.
_HOME = {
    alias.name: node.module
    for node in ast.parse(Path(__file__).with_suffix(".pyi").read_text("utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module is not None and node.module.startswith("gapped")
    for alias in node.names
}

__all__ = sorted(_HOME)


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'gapped' has no attribute {name!r}")
    home = _HOME[name]
    try:
        value = import_module(f"gapped.{name}") if home == "gapped" else getattr(import_module(home), name)
    except ModuleNotFoundError as problem:
        if problem.name != "torch":
            raise
        choice = 'pip install "gapped[torch]", or "gapped[jax]" for gapped.jax'
        raise MissingExtra(f"gapped.{name} needs torch: {choice}") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return __all__
