"""Hashes of samples and gradients on a CPU, and of run ids: `python tests/golden.py` writes them anew.

A refactoring reproduces every one of them. A hash that changes is a change of results: it needs a reason and
a line in the changelog. Sums inside the estimators depend on torch's version and the processor's vector
width, so the file names both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

import gapped
from gapped_lab.recipe import load_recipe
from gapped_lab.recipe_files import known_recipes

FILE = Path(__file__).with_name("golden.json")
_DTYPES = (torch.float32, torch.bfloat16)
_FORMS = ("plain", "masked", "dim=0")
# Options that have another default than these hashes were made with.
_OPTIONS = {
    "double-cv": "alpha=1.0",
    "gst": "tau=1.0,gap=1.0",
    "gumbel-rao": "tau=1.0,samples=100",
    "gumbel-softmax": "tau=1.0",
    "reinmax-rao": "samples=100",
    "rloo": "samples=2",
}
_GST = gapped.GST(0.85, gap="auto")
# Two categories: DisARM has no others.
_BINARY = ("disarm",)


def platform() -> dict[str, str]:
    """The environment that the last bits of a result depend on."""
    return {"torch": torch.__version__.split("+")[0], "cpu": torch.backends.cpu.get_cpu_capability()}


def hashes() -> dict[str, str]:
    """The hash of each sample with its gradient, by a name that says what was drawn."""
    return {name: _digest(*tensors) for name, tensors in (*_pathwise(), *_score(), *_uses())}


def recipes() -> dict[str, Path]:
    """Every recipe that published runs come from: of the laboratory, and those beside the records."""
    answered = (FILE.parents[1] / "results" / "answered").glob("*.toml")
    return dict(sorted({**known_recipes(), **{path.stem: path for path in answered}}.items()))


def specs() -> dict[str, list[str]]:
    """The ids of the runs of each recipe, in order."""
    return {name: [entry.spec.id for entry in load_recipe(path).entries] for name, path in recipes().items()}


def run_ids() -> dict[str, str]:
    """The number of runs of each recipe, and a hash of their ids."""
    return {name: f"{len(own)} {_hash(' '.join(own).encode())}" for name, own in specs().items()}


def _digest(*tensors: Tensor) -> str:
    # Integers, for bfloat16 has no bytes in numpy.
    integers = (each.detach().contiguous().view(torch.uint8).numpy().tobytes() for each in tensors)
    return _hash(b"".join(integers))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def _generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _normal(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=_generator(seed)).to(dtype)


def _gradient(value: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    weights = _normal(3, *value.shape, dtype=value.dtype)
    return (value, *torch.autograd.grad((value * weights).sum(), inputs))


def _pathwise() -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    for name in gapped.estimators("pathwise"):
        for dtype in _DTYPES:
            for form in _FORMS:
                logits = _normal(1, 7, 6, dtype=dtype).requires_grad_()
                mask = _normal(2, 7, 6) > -1 if form == "masked" else None
                dim = 0 if form == "dim=0" else -1
                estimator = gapped.estimator(f"{name}:{_OPTIONS.get(name, '')}")
                assert isinstance(estimator, gapped.Pathwise)
                sample = estimator.sample(logits, dim=dim, mask=mask, generator=_generator(4))
                yield f"{name} {dtype} {form}", _gradient(sample, logits)


def _score() -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    for name in gapped.estimators("score"):
        categories = 2 if name in _BINARY else 4
        for dtype in _DTYPES:
            for form in _FORMS[: 1 if name in _BINARY else 2]:
                logits = _normal(1, 5, 3, categories, dtype=dtype).requires_grad_()
                mask = _normal(2, 5, 3, categories) > -1 if form == "masked" else None
                target = _normal(5, 3, categories, dtype=dtype)
                with torch.random.fork_rng():
                    torch.manual_seed(6)  # trainable estimators draw their weights from torch's generator
                    estimator = gapped.estimator(f"{name}:{_OPTIONS.get(name, '')}")
                cost = gapped.expectation(
                    lambda z, target=target: (z - target).square().sum((-1, -2)),
                    logits,
                    estimator,
                    mask=mask,
                    generator=_generator(4),
                )
                yield f"{name} {dtype} {form}", _gradient(cost, logits)


def _uses() -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    for dtype in _DTYPES:
        logits = _normal(1, 5, 8, dtype=dtype).requires_grad_()
        table = _normal(2, 8, 4, dtype=dtype).requires_grad_()
        # Eighths: every product and sum of the layer is exact in float32, in whatever order it is added.
        hidden = (_normal(3, 5, 4) * 8).round().div(8).to(dtype).requires_grad_()
        weight = (_normal(4, 8, 4) * 8).round().div(8).to(dtype).requires_grad_()
        choice = gapped.GST(0.5, gap=1.0).choose(logits, generator=_generator(5))
        yield f"select {dtype}", _gradient(choice.select(table), logits, table)
        yield f"choice gate {dtype}", _gradient(choice.gate(), logits)
        yield f"subset {dtype}", _gradient(gapped.subset(logits, 3, generator=_generator(5)), logits)
        gates = gapped.GST(1.0, gap="auto").gate(logits, generator=_generator(5))
        yield f"gate {dtype}", _gradient(gates, logits)
        mask = gapped.nm_mask(logits, 2, 4, generator=_generator(5))
        yield f"nm_mask {dtype}", _gradient(mask, logits)
        token = _GST.choose_linear(hidden, weight, generator=_generator(5))
        yield f"linear_choice {dtype}", _gradient(token.select(weight), hidden, weight)


if __name__ == "__main__":
    content = {"platform": platform(), "hashes": hashes(), "runs": run_ids()}
    FILE.write_text(json.dumps(content, indent=1) + "\n")
