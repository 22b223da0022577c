"""One table of defaults: every public callable is held to it, and `docs/table_of_defaults.md` shows it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

import numpy as np
import pytest
import torch
from conftest import FUNCTIONS, KINDS, assert_all_close, every_member, normal, pull, seeded
from doc_pages import ROOT
from torch import Tensor

import gapped
from gapped.cli import compare as compare_command
from gapped.registry import RECOMMENDED, resolve
from gapped.texts import DEFAULT

MODULES: list[Any] = [gapped, gapped.nn, gapped.distributions, gapped.subsets, gapped.counts]
SHARED = {
    "axis": -1,
    "backend": "auto",
    "dim": -1,
    "draw": "sample",
    "eps": 1e-10,
    "eval": "sample",
    "generator": None,
    "hard": True,
    "mask": None,
    "seeds": 5,
    "where": None,
}
"""The default of an argument of this name, wherever it stands."""
TORCHS = {"tau": 1.0, "hard": False}
"""The function `gumbel_softmax` has torch's defaults; the class has the recommended ones."""
OWN: dict[str, dict[str, Any]] = {"gumbel_softmax": TORCHS, "gapped.sampling.choose": {"draw": None}}
"""Defaults that differ. Without a `draw`, torch's `choose` takes the estimator's, which JAX's has not."""
PAGE = ROOT / "docs" / "table_of_defaults.md"


def defaults(callable_: Any) -> dict[str, Any]:
    try:
        parameters = inspect.signature(callable_).parameters.values()
    except ValueError:  # an error's class has none
        return {}
    return {each.name: each.default for each in parameters if each.default is not each.empty}


def public(module: Any) -> dict[str, Any]:
    named = {name: getattr(module, name) for name in dir(module) if not name.startswith("_")}
    return {name: each for name, each in named.items() if callable(each)}


def test_the_command_has_the_default_of_the_function() -> None:
    assert SHARED["seeds"] == compare_command.SEEDS


def require_shared(module: Any) -> None:
    for name, each in public(module).items():
        own = OWN.get(name) or OWN.get(f"{each.__module__}.{name}", {})
        for argument, value in defaults(each).items():
            if argument in SHARED:
                assert value == own.get(argument, SHARED[argument]), f"{name}: {argument}"
            if argument == "estimator":
                # A subset has estimators of its own.
                assert value == ("simple" if name == "subset" else None), name


@pytest.mark.parametrize("module", MODULES, ids=lambda module: module.__name__)
def test_an_argument_has_one_default(module: Any) -> None:
    require_shared(module)


def test_an_argument_has_the_same_default_in_jax() -> None:
    pytest.importorskip("jax", reason="needs jax, which the extra jax brings")
    import gapped.jax

    require_shared(gapped.jax)
    for name, kind in gapped.jax.estimators().items():
        theirs = defaults(gapped.estimators()[name])
        assert {key: theirs[key] for key in defaults(kind)} == defaults(kind), name


@every_member
def test_a_function_has_the_defaults_of_its_class(name: str) -> None:
    of_class = {field.name: field.default for field in fields(KINDS[name]) if field.default is not MISSING}
    if name == "gumbel-softmax":
        of_class |= TORCHS
    ours = defaults(FUNCTIONS[name])
    assert {key: value for key, value in of_class.items() if key in ours}.items() <= ours.items()


def table() -> str:
    """A row for each estimator: what its class, its text and, but for one, its function do by default."""
    lines = ["| text | class | options and their defaults |", "|---|---|---|"]
    for name, kind in gapped.estimators().items():
        own = {key: value for key, value in defaults(kind).items() if key not in ("backend", "draw", "hard")}
        options = ", ".join(f"`{key}={value}`" for key, value in own.items()) or "none"
        mark = " (the default)" if name == DEFAULT else ""
        lines.append(f"| `{name}`{mark} | `gapped.{kind.__name__}` | {options} |")
    return "\n".join(lines)


def test_the_page_shows_the_table() -> None:
    assert table() in PAGE.read_text("utf-8")


# One meaning per text, wherever it is written


def quadratic(z: Tensor) -> Tensor:
    return (z @ normal(5)) ** 2


def cost_of(text: str | None, logits: Tensor) -> Tensor:
    return gapped.expectation(quadratic, logits, text, generator=seeded())


def gates_of(text: str | None, odds: Tensor) -> Tensor:
    return gapped.gate(odds, estimator=text, generator=seeded())


def token_of(text: str | None, hidden: Tensor) -> Tensor:
    # The weight is the identity, so that the hidden vector is the logits.
    weight = torch.eye(5, dtype=hidden.dtype)
    return gapped.linear_choice(hidden, weight, estimator=text, generator=seeded()).select(weight)


USES: dict[str, Callable[[str | None, Tensor], Tensor]] = {
    "sample": lambda text, x: gapped.sample(x, estimator=text, generator=seeded()),
    "choose": lambda text, x: gapped.choose(x, estimator=text, generator=seeded()).select(torch.eye(5).to(x)),
    "layer": lambda text, x: gapped.nn.Sample(text)(x, generator=seeded()),
    "distribution": lambda text, x: gapped.distributions.OneHotCategorical(logits=x, estimator=text).rsample(
        generator=seeded()
    ),
}


@pytest.mark.parametrize("text", [None, *KINDS])
def test_a_text_is_one_estimator_in_every_use(text: str | None) -> None:
    logits, weight = normal(6, 5), normal(6, 5, seed=2)
    kind = KINDS[text or DEFAULT]
    for use in USES.values():
        leaf = logits.clone().requires_grad_()
        value = use(text, leaf)
        ours = value.detach(), torch.autograd.grad(value, leaf, weight)[0]
        assert_all_close(ours, pull(kind(), logits, weight))
    for use in (cost_of, token_of, gates_of):
        results = [use(each, logits) for each in (text, kind())]  # type: ignore[arg-type]
        assert torch.equal(*results)
    owners = [
        gapped.nn.Gate(text).estimator,
        gapped.nn.Quantizer(4, 4, codes=3, estimator=text).estimator,
        gapped.distributions.Bernoulli(logits=torch.zeros(3), estimator=text).estimator,
        resolve(text),
    ]
    assert all(owner == kind() for owner in owners)


def test_candidates_begin_with_the_default() -> None:
    assert RECOMMENDED[0] == DEFAULT


# What passes for a whole number


LOGITS = normal(5, 2, 16)
NUMBERS: dict[str, Callable[[Any], Tensor]] = {
    "counts": lambda n: gapped.counts.binomial(n(200), LOGITS, order=n(2), generator=seeded()),
    "subset": lambda n: gapped.subset(LOGITS, n(8), generator=seeded()),
    "marginals": lambda n: gapped.subsets.marginals(LOGITS, n(8)),
    "entropy": lambda n: gapped.subsets.entropy(LOGITS, n(8)),
    "choose": lambda n: gapped.choose(LOGITS, n(3), dim=n(2), generator=seeded()).index,
    "Mask": lambda n: gapped.nn.Mask(n(8), n(2), n(4))(seeded()),
    "nm_mask": lambda n: gapped.nm_mask(LOGITS, n(2), n(4), generator=seeded()),
    "subsets.expectation": lambda n: gapped.subsets.expectation(
        lambda s: s[..., 0].sum(-1), LOGITS, n(8), n(3), generator=seeded()
    ),
    **{
        kind.__name__: lambda n, kind=kind: gapped.expectation(
            lambda z: z[..., 0].sum(-1), LOGITS, kind(samples=n(3)), generator=seeded()
        )
        for kind in (gapped.RLOO, gapped.Reinforce, gapped.DoubleCV, gapped.RODEO)
    },
}


@pytest.mark.parametrize("use", NUMBERS)
def test_numpy_integers_are_whole_numbers(use: str) -> None:
    plain = NUMBERS[use](int)
    assert all(torch.equal(NUMBERS[use](kind), plain) for kind in (np.uint8, np.int32, np.int64))
    with pytest.raises(gapped.GappedError):
        NUMBERS[use](np.float64)
