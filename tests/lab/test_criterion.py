"""Criteria from measured gradients: closed forms, the exact gradient, correlations, the command."""

from __future__ import annotations

from dataclasses import replace
from math import inf, isclose

import pytest
import torch
from conftest import assert_close, seeded
from scipy.optimize import minimize_scalar
from toy_tasks import CPU, toy_images

import gapped
from gapped.score.exact import Exact
from gapped_lab import criterion
from gapped_lab.criterion import CRITERIA, Correlation, correlations, held_out, scale_free, trained
from gapped_lab.fleet.estimator_groups import Grouped
from gapped_lab.recipe import recipe_from
from gapped_lab.records import Gradient, Record, read
from gapped_lab.tasks import VAEProtocol
from gapped_lab.tasks.vae import VAETask

LINE = Gradient(
    protocol="p",
    data="d",
    epoch=0,
    level="weights",
    label="a",
    tau=1.0,
    samples=10,
    images=1,
    inner=1.2,
    square=2.0,
    variance=3.0,
    exact=1.5,
    cosine=0.5,
    descent=0.5,
)


@pytest.mark.parametrize("horizon", [1, 10, inf])
def test_scale_free_error_is_that_of_the_best_multiple(horizon: float):
    def error(c: float) -> float:
        return (
            c * c * (LINE.square + LINE.variance / horizon) - 2 * c * LINE.inner + LINE.exact
        ) / LINE.exact

    assert isclose(scale_free(LINE, horizon), minimize_scalar(error).fun, rel_tol=1e-9)


def test_a_gradient_of_zero_has_no_merit():
    """No variance and a relative bias of 1: the mean squared error of always answering zero."""
    nothing = replace(LINE, inner=0.0, square=0.0, variance=0.0, cosine=0.0, descent=0.0)
    assert [scale_free(nothing, n) for n in (1, inf)] == [1.0, 1.0]
    assert isclose(CRITERIA["relative bias"](nothing), 1.0)
    assert isclose(CRITERIA["mean squared error"](nothing), 1.0)


def test_the_exact_gradient_is_the_enumerated_one(monkeypatch):
    """With one variable, the sum over its categories leaves nothing to draw."""
    monkeypatch.setattr(criterion, "IMAGES", 3)
    task = VAETask(VAEProtocol("one", 1, 4, (5,), batch=4), toy_images(), [1, 1], CPU)
    sampler = Grouped.of([gapped.GST(), gapped.RLOO(2)], 2, CPU, torch.float32)
    probe = criterion._Probe(task, sampler, seeded(0))
    x, model = probe.images[:1], task.model
    logits = model.encode(probe.images)[:1].detach()[0].requires_grad_()
    decoder = [(layer.weight[:1], layer.bias[:1]) for layer in model.decoder]

    def cost(z: torch.Tensor) -> torch.Tensor:
        return model.costs(z.unsqueeze(1), x, decoder).squeeze(1)

    (expected,) = torch.autograd.grad(gapped.expectation(cost, logits, Exact()).sum(), logits)
    assert_close(probe._exact(criterion.DRAWS)["logits"].view_as(expected), expected, 1e-4)


def test_measurements_of_an_unbiased_and_of_the_exact_direction():
    task = VAETask(VAEProtocol("one", 1, 4, (5,), batch=4), toy_images(), [1, 1], CPU)
    probe = criterion._Probe(
        task, Grouped.of([gapped.RLOO(8), gapped.Exact()], 2, CPU, torch.float32), seeded(0)
    )
    noisy, exact = probe.measure(400, criterion.DRAWS)["weights"]
    assert isclose(exact["inner"], exact["exact"], rel_tol=1e-3)
    assert exact["variance"] < 1e-9 * exact["exact"] < noisy["variance"]
    assert isclose(exact["cosine"], 1.0, rel_tol=1e-3)
    assert isclose(exact["descent"], 1.0, rel_tol=1e-2)
    assert abs(noisy["inner"] / noisy["exact"] - 1) < 0.2


def gradient(protocol: str, label: str, bias: float, cosine: float) -> Gradient:
    square = 1.5 * bias**2
    return replace(LINE, protocol=protocol, label=label, inner=1.5, square=1.5 + square, cosine=cosine)


def test_correlations_by_task_and_what_leaving_one_out_says():
    labels = "abcde"
    results = {(p, x, 1.0): float(i) for p in ("x-1", "x-2", "y-1") for i, x in enumerate(labels)}
    lines = [gradient(p, x, i, 0.1 * i) for p in ("x-1", "x-2", "y-1") for i, x in enumerate(labels)]
    table = correlations(lines, results, "weights")
    assert set(table) == set(CRITERIA)
    assert table["relative bias"]["x-1"].value == 1.0
    assert table["1 - cosine"]["y-1"].value == -1.0
    assert table["relative bias"]["x-1"].cells == 5
    values = {"good": (0.9, 0.7, 0.1), "other": (0.2, 0.2, 0.6)}
    only = {
        name: {p: Correlation(value, 0, 1, 5) for p, value in zip(("x-1", "x-2", "y-1"), own, strict=True)}
        for name, own in values.items()
    }
    assert held_out(only) == {"x": ("other", 0.2), "y": ("good", 0.1)}


def test_a_cell_that_diverged_is_the_worst():
    common = {"recipe": "r", "protocol": "p", "tau": 1.0, "epochs": 1, "task": "vae"}
    good = Record(id="1", label="a", metrics={"test_negative_elbo": 3.0}, **common)
    bad = Record(id="2", label="b", metrics={"test_negative_elbo": None}, status="diverged", **common)
    assert trained([good, bad]) == {("p", "a", 1.0): 3.0, ("p", "b", 1.0): inf}


def test_a_protocol_is_measured_once(tmp_path, monkeypatch):
    for name, value in (
        ("SAMPLES", 4),
        ("QUICK_SAMPLES", 4),
        ("DRAWS", 1),
        ("QUICK_DRAWS", 1),
        ("IMAGES", 2),
    ):
        monkeypatch.setattr(criterion, name, value)
    cells = [
        {"estimator": "gst:gap=auto", "tau": [0.5, 1.0], "label": "GST"},
        {"estimator": "reinmax", "tau": 1.0},
    ]
    table = {
        "name": "few",
        "task": "vae",
        "protocol": "digits-8x8",
        "epochs": 1,
        "train_images": 200,
        "cell": cells,
    }
    recipe = recipe_from(table, "few")
    assert list(criterion.measure_missing(recipe, tmp_path, CPU, None)) == ["digits-8x8"]
    lines = read(tmp_path, Gradient)
    assert len(lines) == 3 * 2 * len(criterion.POINTS)
    assert {(line.label, line.tau) for line in lines} == {("GST", 0.5), ("GST", 1.0), ("reinmax", 1.0)}
    assert list(criterion.measure_missing(recipe, tmp_path, CPU, None)) == []
