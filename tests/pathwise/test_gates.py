"""Gates: the law of one uniform, and the pair of logits that they stand for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from conftest import (
    INVERSE_CDF,
    MEMBERS,
    SOFT,
    assert_all_close,
    assert_close,
    every_member,
    normal,
    pulled,
    seeded,
)
from forms import RAO
from live_bytes import saved_bytes
from torch import Tensor

import gapped
from gapped import GappedError, simplex


def pull(estimator: Any, odds: Tensor, weight: Tensor, **how: Any) -> tuple[Tensor, Tensor]:
    leaf = odds.detach().requires_grad_()
    gates = estimator.gate(leaf, generator=seeded(), **how)
    return gates.detach(), torch.autograd.grad(gates, leaf, weight)[0]


@pytest.mark.parametrize("name", INVERSE_CDF)
def test_the_law_is_one_uniform_below_the_probability(name: str) -> None:
    odds = 2 * normal(3000)
    uniform = torch.rand(3000, generator=seeded(), dtype=torch.float64)
    gates = gapped.estimator(name).gate(odds, generator=seeded())
    assert torch.equal(gates, (uniform < torch.sigmoid(odds)).double())


# A gate is a pair, whose samples `test_exact.py` and `test_replay.py` compare with closed forms.
PAIRS: list[tuple[str, dict[str, Any]]] = [
    *((name, {"hard": hard}) for name in MEMBERS for hard in (True, False) if hard or name in SOFT),
    *(("gst", {"gap": gap}) for gap in ("auto", gapped.expected_gap, 0.0, 1.0)),
    *(("gst", {"gap": 0.3, "detach": False, "hard": hard}) for hard in (True, False)),
]
TAUS: dict[str, Any] = {"one": 1.0, "cold": 0.4, "per gate": torch.linspace(1, 2, 9, dtype=torch.float64)}


@pytest.mark.parametrize(("name", "options"), PAIRS)
@pytest.mark.parametrize("draw", ["sample", "argmax"])
@pytest.mark.parametrize("tau", TAUS)
def test_a_gate_is_the_first_of_a_pair(name: str, options: dict[str, Any], draw: Any, tau: str) -> None:
    """Value and gradient are those of a sample of (logit, 0)."""
    odds, weight = 2 * normal(8, 9), normal(8, 9, seed=2)
    estimator = gapped.estimator(name, tau=TAUS[tau], draw=draw, **options)
    leaf = odds.clone().requires_grad_()
    sample = estimator.sample(torch.stack([leaf, torch.zeros_like(leaf)], -1), generator=seeded())[..., 0]
    expected = sample.detach(), torch.autograd.grad(sample, leaf, weight)[0]
    gates, gradient = pull(estimator, odds, weight)
    assert torch.equal(gates, expected[0])
    assert_close(gradient, expected[1])


@every_member
def test_in_blocks_with_a_level_per_gate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    odds, weight = normal(7, 9), normal(7, 9, seed=2)
    estimator = gapped.estimator(name, tau=torch.linspace(1, 2, 9, dtype=torch.float64))
    whole = pull(estimator, odds, weight)
    monkeypatch.setattr("gapped.simplex.BLOCK", 20)
    pieces = pull(estimator, odds, weight)
    if name in INVERSE_CDF:
        assert torch.equal(pieces[0], whole[0])
        # Where torch's vectors end decides about the last digit of an exponential.
        assert_close(pieces[1], whole[1], 1e-14)
    else:
        assert ((pieces[0] == 0) | (pieces[0] == 1)).all()
        assert ((pieces[1] / weight) > 0).all()
    with torch.no_grad():
        assert torch.equal(estimator.gate(odds, generator=seeded()), pieces[0])


@every_member
def test_one_number_is_kept_for_each_gate(name: str) -> None:
    odds = normal(1000).requires_grad_()
    assert saved_bytes(lambda: gapped.estimator(name).gate(odds)) <= odds.nbytes


def test_a_class_with_other_points_has_other_slopes() -> None:
    """Closed forms, of gates and of small batches, are those of the class that defines them."""

    class Doubled(gapped.GapMax):
        def points(self, logits: Tensor, draw: simplex.Draw) -> Any:
            points = super().points(logits, draw)
            return points._replace(points=points.points[1:], weights=2.0, product=None)

    odds, ones = normal(50), torch.ones(50).double()
    slope = torch.sigmoid(odds) * torch.sigmoid(-odds)
    assert_close(pull(Doubled(), odds, ones)[1], 2 * slope)
    logits = torch.stack([odds, torch.zeros(50)], -1).requires_grad_()
    gradient = torch.autograd.grad(Doubled().sample(logits)[:, 0].sum(), logits)[0]
    assert_close(gradient[:, 0], 2 * slope)


@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 3), (2, 0), (2, 1, 3)], ids=str)
def test_any_shape(shape: tuple[int, ...]) -> None:
    odds = torch.zeros(shape, requires_grad=True)
    gates = gapped.gate(odds)
    assert gates.shape == shape
    gates.sum().backward()
    assert odds.grad.shape == shape
    assert (odds.grad > 0).all()


@every_member
def test_masks_certain_gates_and_nan(name: str) -> None:
    inf, nan = torch.inf, torch.nan
    odds = torch.tensor([0.5, inf, -inf, nan, nan, 0.5], dtype=torch.float64)
    mask = torch.tensor([True, True, True, True, False, False])
    for hard in {True, name not in SOFT}:
        estimator = gapped.estimator(name, hard=hard)
        gates, gradient = pull(estimator, odds, torch.ones(6).double(), mask=mask)
        assert gates[[1, 2, 4, 5]].tolist() == [1.0, 0.0, 0.0, 0.0]
        assert gradient[[1, 2, 4, 5]].tolist() == [0.0] * 4
        assert gates[3].isnan()
        assert gradient[3].isnan()
        assert gradient[0] > 0


@every_member
def test_a_mask_changes_nothing_elsewhere(name: str) -> None:
    odds, weight = normal(40), normal(40, seed=2)
    mask = torch.rand(40, generator=seeded(3)) < 0.5
    gates, gradient = pull(gapped.estimator(name), odds, weight)
    masked = pull(gapped.estimator(name), odds, weight, mask=mask)
    assert torch.equal(masked[0], gates * mask)
    if name not in RAO:
        assert_close(masked[1], gradient * mask)


@every_member
def test_rare_and_nearly_certain_gates_keep_their_gradient(name: str) -> None:
    """q (1 - q) as a product of both: 1 - q alone would be 0 in float32 from a logit of 17 on."""
    odds, both = torch.tensor([-20.0, 20.0]), (torch.float32, torch.float64)
    slopes = [pull(gapped.estimator(name), odds.to(d), torch.ones(2, dtype=d))[1] for d in both]
    if name in INVERSE_CDF:
        torch.testing.assert_close(slopes[0].double(), slopes[1], rtol=1e-4, atol=0)
    assert (slopes[0] > 0).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logits": torch.zeros(3, dtype=torch.int64)}, "logits: got a tensor of dtype torch.int64"),
        ({"logits": [0.0]}, "logits: got an object of type list, expected .*log-odds"),
        ({"mask": torch.ones(4, dtype=torch.bool)}, "mask: got a tensor of shape"),
        ({"mask": torch.ones(3)}, "mask: got a tensor of dtype"),
        ({"generator": 3}, "generator: got 3"),
        ({"estimator": "gst:tau=0"}, "tau: got 0"),
        (
            {"estimator": gapped.GST(torch.ones(2))},
            r"tau: got a tensor of shape \(2,\), expected .* \(3,\), the logits' shape",
        ),
        ({"estimator": "rloo"}, "estimator: got 'rloo', expected a pathwise estimator"),
    ],
    ids=str,
)
def test_errors_are_one_line(given: dict[str, Any], message: str) -> None:
    with pytest.raises(GappedError, match=message) as caught:
        gapped.gate(**{"logits": torch.zeros(3), **given})
    assert "\n" not in str(caught.value)


def test_a_learned_temperature() -> None:
    """The derivative of sigma((phi + L)/tau) in both, by torch's autograd."""
    inputs = normal(50), torch.tensor(0.7, dtype=torch.float64)

    def written_out(odds: Tensor, tau: Tensor) -> Tensor:
        noise = simplex.gumbel(torch.stack([odds, odds], -1))
        return torch.sigmoid((odds + noise[:, 0] - noise[:, 1]) / tau)

    def ours(odds: Tensor, tau: Tensor) -> Tensor:
        return gapped.gate(odds, estimator=gapped.GumbelSoftmax(tau, hard=False))

    assert_all_close(pulled(ours, *inputs), pulled(written_out, *inputs))
    tau = inputs[1].requires_grad_()
    assert replace(gapped.GumbelSoftmax(tau), hard=False).gate(inputs[0]).requires_grad
