"""The distributions beside torch's: attributes, masks, divergences, gradients of samples, certain gates."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from conftest import assert_all_close, assert_close, assert_one_hot, every_member, normal, pulled, seeded
from torch import Tensor
from torch import distributions as td

import gapped
from gapped.distributions import Bernoulli, OneHotCategorical

K = 4
LOGITS = normal(3, 2, K)
MASK = torch.tensor([True, False, True, True])
OTHER = normal(3, 2, K, seed=9)
COLUMNS = torch.tensor([0, 2, 3])


class Kind(NamedTuple):
    """One of our distributions, and what is to be compared with it."""

    ours: Any
    theirs: Any
    probs: Callable[[Tensor], Tensor]
    draw: Callable[..., Tensor]
    """The sample of an estimator, for logits and a mask."""
    is_event: bool
    """Whether the last axis is that of an event."""


KINDS = {
    "categorical": Kind(
        OneHotCategorical,
        td.OneHotCategorical,
        lambda x: torch.softmax(x, -1),
        lambda estimator, x, mask: estimator.sample(x, mask=mask),
        True,
    ),
    "bernoulli": Kind(
        Bernoulli, td.Bernoulli, torch.sigmoid, lambda estimator, x, mask: estimator.gate(x, mask=mask), False
    ),
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
every_parameter = pytest.mark.parametrize("given", ["logits", "probs"])


def parameter(kind: Kind, given: str) -> Tensor:
    return LOGITS if given == "logits" else kind.probs(LOGITS)


def reference(logits: Tensor = LOGITS) -> td.OneHotCategorical:
    return td.OneHotCategorical(logits=logits)


@every_kind
@every_parameter
@pytest.mark.parametrize(
    "quantity",
    ["mean", "variance", "mode", "probs", "logits", "batch_shape", "event_shape", "param_shape"],
)
def test_attributes_equal_torchs(kind: Kind, given: str, quantity: str) -> None:
    ours, theirs = (
        getattr(each(**{given: parameter(kind, given)}), quantity) for each in (kind.ours, kind.theirs)
    )
    if isinstance(theirs, torch.Size):
        assert ours == theirs
    else:
        assert_close(ours, theirs)


@every_kind
@every_parameter
def test_log_prob_and_entropy_equal_torchs_with_their_gradients(kind: Kind, given: str) -> None:
    value = kind.theirs(logits=LOGITS).sample()
    for quantity in (lambda d: d.log_prob(value).sum(), lambda d: d.entropy().sum()):
        uses = (lambda x, each=each: quantity(each(**{given: x})) for each in (kind.ours, kind.theirs))  # noqa: B023
        assert_all_close(*(pulled(use, parameter(kind, given)) for use in uses))


@every_member
def test_the_gradient_through_the_sample_of_a_log_ratio(name: str) -> None:
    """log q(z) - log p(z), both differentiated in the sample: each log-probability counts, drawn or not."""
    prior = torch.log_softmax(normal(K, seed=3), -1)

    def cost(logits: Tensor, written_out: bool) -> Tensor:
        q = OneHotCategorical(logits=logits, estimator=gapped.estimator(name))
        z = q.rsample(generator=seeded())
        if written_out:
            return (z * (torch.log_softmax(logits, -1) - prior)).sum(-1)
        return q.log_prob(z) - OneHotCategorical(logits=prior).log_prob(z)

    assert_all_close(*(pulled(partial(cost, written_out=each), LOGITS) for each in (False, True)))


def test_the_derivative_of_log_prob_by_the_sample() -> None:
    value = torch.tensor([1.0, 0, 0, 0], dtype=torch.float64, requires_grad=True)
    for mask in (None, MASK):
        d = OneHotCategorical(logits=LOGITS[0, 0], mask=mask)
        (slope,) = torch.autograd.grad(d.log_prob(value), value)
        expected = torch.log_softmax(LOGITS[0, 0] if mask is None else LOGITS[0, 0][mask], -1)
        assert_close(slope if mask is None else slope[mask], expected)
        assert mask is None or slope[~mask] == 0


@every_kind
@pytest.mark.parametrize("count", [1, 2, 3])
def test_positional_arguments_are_torchs(kind: Kind, count: int) -> None:
    arguments = (torch.tensor([0.2, 0.8]).double(), None, False)[:count]
    ours, theirs = kind.ours(*arguments), kind.theirs(*arguments)
    assert_close(ours.probs, theirs.probs)
    assert ours._validate_args == theirs._validate_args


def test_torchs_default_of_validation_is_followed() -> None:
    td.Distribution.set_default_validate_args(False)
    try:
        assert OneHotCategorical(logits=torch.tensor([0.0, torch.nan])).probs.isnan().any()
    finally:
        td.Distribution.set_default_validate_args(__debug__)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_rounded_once(dtype: torch.dtype) -> None:
    """Normalised in half precision, probabilities of 50,000 categories would be off by 3%."""
    logits = normal(50_000).to(dtype)
    exact = torch.log_softmax(logits.double(), -1)
    d, eps = OneHotCategorical(logits=logits), torch.finfo(dtype).eps
    assert d.probs.dtype == d.logits.dtype == d.rsample().dtype == d.entropy().dtype == dtype
    regular = exact.exp() > torch.finfo(dtype).tiny
    torch.testing.assert_close(d.probs[regular].double(), exact.exp()[regular], rtol=eps, atol=0)
    torch.testing.assert_close(d.logits.double(), exact, rtol=eps, atol=0)
    entropy = -(exact.exp() * exact).sum()
    torch.testing.assert_close(d.entropy().double(), entropy, rtol=eps, atol=0)
    value = torch.zeros_like(logits)
    value[7] = 1
    torch.testing.assert_close(d.log_prob(value).double(), exact[7], rtol=eps, atol=0)


@pytest.mark.parametrize("kind", [OneHotCategorical, Bernoulli])
@pytest.mark.filterwarnings("error::torch.jit.TracerWarning", "ignore:.*torch.jit.trace:DeprecationWarning")
def test_a_trace_of_the_law_warns_of_nothing(kind: Any) -> None:
    def enumerated(logits: Tensor) -> Tensor:
        law = kind(logits=logits, validate_args=False)
        return law.log_prob(law.enumerate_support())

    trace = torch.jit.trace(enumerated, (torch.zeros_like(LOGITS),))
    assert_close(trace(LOGITS), enumerated(LOGITS))


@every_kind
@pytest.mark.parametrize("expand", [True, False])
def test_the_support_is_enumerated_as_torchs_is(kind: Kind, expand: bool) -> None:
    ours, theirs = (each(logits=LOGITS).enumerate_support(expand) for each in (kind.ours, kind.theirs))
    assert_close(ours, theirs.to(ours.dtype))
    assert kind.ours.has_enumerate_support


@every_kind
@every_member
@pytest.mark.parametrize("sample_shape", [(), (5,), (2, 3)], ids=str)
@pytest.mark.parametrize("mask", [None, MASK], ids=["free", "masked"])
def test_rsample_is_the_estimator(
    kind: Kind, name: str, sample_shape: tuple[int, ...], mask: Tensor | None
) -> None:
    """An equal seed gives the estimator's own sample or gates, and their gradient, on the expanded logits.

    Normalising first changes no estimator: all of them ignore a constant added to the logits.
    """
    estimator = gapped.estimator(name)
    draws = (
        lambda x: kind.ours(logits=x, estimator=estimator, mask=mask).rsample(sample_shape),
        lambda x: kind.draw(estimator, x.expand(*sample_shape, 3, 2, K), mask),
    )
    (ours, slope), (theirs, expected) = (pulled(draw, LOGITS + 7 * kind.is_event) for draw in draws)
    assert ours.shape == (*sample_shape, 3, 2, K)
    assert torch.equal(ours, theirs)
    assert_close(slope, expected)


@every_kind
def test_samples_are_hard_and_carry_no_gradient(kind: Kind) -> None:
    logits = LOGITS.clone().requires_grad_()
    d = kind.ours(logits=logits, mask=MASK, estimator=gapped.GST(hard=False))
    sample = d.sample((1_000,), generator=seeded())
    assert sample.shape == (1_000, 3, 2, K)
    assert not sample.requires_grad
    assert ((sample == 0) | (sample == 1)).all()
    assert (sample[..., ~MASK] == 0).all()
    if kind.is_event:
        assert_one_hot(sample)
    assert kind.ours.has_rsample
    assert kind.ours(logits=LOGITS).estimator == gapped.GapMax()
    assert d.rsample().requires_grad


def test_masking_equals_deleting() -> None:
    logits = LOGITS.clone()
    logits[..., ~MASK] = 30.0
    d, small = OneHotCategorical(logits=logits, mask=MASK), reference(LOGITS[..., COLUMNS])
    for quantity in ("mean", "variance", "mode", "probs"):
        ours = getattr(d, quantity)
        assert_close(ours[..., COLUMNS], getattr(small, quantity))
        assert (ours[..., ~MASK] == 0).all()
    assert_close(d.entropy(), small.entropy())
    corners = torch.eye(K, dtype=torch.float64)
    log_prob = torch.stack([d.log_prob(corner.expand(3, 2, K)) for corner in corners], -1)
    assert_close(log_prob[..., COLUMNS], torch.log_softmax(LOGITS[..., COLUMNS], -1))
    assert (log_prob[..., ~MASK] == -math.inf).all()


@pytest.mark.parametrize("quantity", ["entropy", "log_prob", "rsample", "divergence"])
def test_masked_gradients_are_zero_and_the_others_finite(quantity: str) -> None:
    logits = LOGITS.clone().requires_grad_()
    d = OneHotCategorical(logits=logits, mask=MASK)
    torch.manual_seed(0)
    result = {
        "entropy": lambda: d.entropy().sum(),
        "log_prob": lambda: d.log_prob(d.sample()).sum(),
        "rsample": lambda: (d.rsample() * normal(3, 2, K, seed=2)).sum(),
        "divergence": lambda: td.kl_divergence(d, OneHotCategorical(logits=OTHER, mask=MASK)).sum(),
    }[quantity]()
    result.backward()
    assert (logits.grad[..., ~MASK] == 0).all()
    assert torch.isfinite(logits.grad).all()
    assert (logits.grad[..., COLUMNS].abs().amax(-1) > 1e-6).all()


@pytest.mark.parametrize("quantity", ["rsample", "entropy"])
@pytest.mark.parametrize(
    ("parameter", "rows"),
    [("probs", [[0.0, 0.25, 0.75]]), ("logits", [[-torch.inf] * 3, [0.0, 1.0, 2.0]])],
)
def test_the_gradient_of_what_cannot_be_drawn_is_zero(parameter: str, rows: list[Any], quantity: str) -> None:
    """A probability of zero, and a row without categories."""
    leaf = torch.tensor(rows, requires_grad=True)
    result = getattr(OneHotCategorical(**{parameter: leaf}), quantity)()
    (result * torch.arange(3.0) if quantity == "rsample" else result).sum().backward()
    assert leaf.grad.isfinite().all()
    assert leaf.grad.abs().max() > 0.1
    impossible = 0 if parameter == "logits" else (..., 0)
    assert not leaf.grad[impossible].any()


@every_kind
def test_expand_keeps_everything_and_works_inside_independent(kind: Kind) -> None:
    """The class too: other libraries add their methods by a mix-in, and Pyro expands what it is given."""

    class Mixed(kind.ours):  # type: ignore[misc]
        pass

    mask = torch.rand(3, 1, K, generator=seeded(3)) < 0.6
    mask[..., 0] = True
    d = Mixed(logits=LOGITS, mask=mask, estimator=gapped.GumbelRao(samples=2))
    shape, wide = d.batch_shape, d.expand((5, *d.batch_shape))
    assert type(wide) is Mixed
    assert wide.batch_shape == (5, *shape)
    assert wide.event_shape == d.event_shape
    assert wide.estimator == d.estimator
    assert_close(wide.entropy(), d.entropy().expand(5, *shape))
    assert_close(wide.probs, d.probs.expand(5, 3, 2, K))
    sample = wide.rsample((7,), generator=seeded())
    assert sample.shape == (7, 5, 3, 2, K)
    assert (sample[..., ~mask.expand(3, 2, K)] == 0).all()
    joint, plain = (td.Independent(each(logits=LOGITS), 1) for each in (kind.ours, kind.theirs))
    value = joint.rsample((4,))
    assert_close(joint.log_prob(value), plain.log_prob(value))
    assert_close(td.kl_divergence(joint, joint), torch.zeros(joint.batch_shape, dtype=torch.float64))


@every_kind
@pytest.mark.parametrize("places", ["ours ours", "ours theirs", "theirs ours"])
def test_divergences_equal_torchs(kind: Kind, places: str) -> None:
    """Broadcast, too."""
    first, second = (getattr(kind, place) for place in places.split())
    for p, q in ((LOGITS, OTHER), (LOGITS, OTHER[0]), (LOGITS[:, :1], OTHER[0])):
        laws = (kind.theirs(logits=each) for each in torch.broadcast_tensors(p, q))
        assert_close(td.kl_divergence(first(logits=p), second(logits=q)), td.kl_divergence(*laws))


def test_divergences_with_masks() -> None:
    """Deleting what neither allows; infinite where the first allows more than the second."""
    masked, other = OneHotCategorical(logits=LOGITS, mask=MASK), OneHotCategorical(logits=OTHER, mask=MASK)
    expected = td.kl_divergence(reference(LOGITS[..., COLUMNS]), reference(OTHER[..., COLUMNS]))
    assert_close(td.kl_divergence(masked, other), expected)
    p, log_q = masked.probs, torch.log_softmax(OTHER, -1)
    to_free = (p * (torch.where(p > 0, p, 1).log() - log_q)).sum(-1)
    assert_close(td.kl_divergence(masked, OneHotCategorical(logits=OTHER)), to_free)
    assert_close(td.kl_divergence(masked, reference(OTHER)), to_free)
    assert (td.kl_divergence(OneHotCategorical(logits=LOGITS), other) == math.inf).all()


@every_kind
@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"logits": None}, "give either probs or logits"),
        ({"probs": torch.full((3, 2, K), 0.25)}, "give either probs or logits"),
        ({"logits": torch.tensor([1])}, "logits: got a tensor of dtype torch.int64"),
        ({"mask": torch.ones(K)}, "mask: got .*, expected "),
        ({"mask": torch.ones(K + 1, dtype=torch.bool)}, "mask: got .*, expected "),
        ({"logits": None, "probs": [0.5, 0.5]}, "probs: got an object of type list"),
        ({"logits": None, "probs": torch.tensor([1])}, "probs: got a tensor of dtype torch.int64"),
        ({"estimator": gapped.RLOO()}, "estimator: got RLOO.*, expected a pathwise estimator"),
    ],
    ids=str,
)
def test_bad_arguments(kind: Kind, given: dict[str, Any], message: str) -> None:
    with pytest.raises(gapped.GappedError, match=message):
        kind.ours(**{"logits": LOGITS, **given})


@every_kind
@pytest.mark.parametrize(
    "value", [torch.full((3, 2, K), 0.25), torch.ones(3, 2, K + 1)], ids=["soft", "shape"]
)
def test_values_are_validated_as_torch_does(kind: Kind, value: Tensor) -> None:
    for each in (kind.ours, kind.theirs):
        with pytest.raises(ValueError, match=r"value|shape|support|broadcast"):
            each(logits=LOGITS, validate_args=True).log_prob(value)


def test_a_value_of_zeros_is_no_category() -> None:
    with pytest.raises(ValueError, match="value"):
        OneHotCategorical(logits=LOGITS, validate_args=True).log_prob(torch.zeros(3, 2, K))


def test_half_precision_keeps_a_long_tail() -> None:
    """Weights that float16 would round to zero have a third of the mass together."""
    logits = torch.full((2**16,), math.log(0.5 / 2**16), dtype=torch.float16)
    logits[0] = 0
    first = OneHotCategorical(logits=logits).sample((200,), generator=seeded())[:, 0]
    # Of 200 draws, fewer than 20 or more than 120 of the tail have a probability below 1e-9.
    assert 20 <= int((first == 0).sum()) <= 120


@pytest.mark.parametrize(
    ("kind", "given"),
    [
        *((kind, {"logits": torch.tensor([0.0, torch.nan])}) for kind in KINDS),
        *((kind, {"probs": torch.tensor([0.5, wrong])}) for kind in KINDS for wrong in (-1.0, torch.nan)),
        ("categorical", {"logits": torch.tensor([0.0, torch.inf])}),
        ("bernoulli", {"probs": torch.tensor([0.5, 1.5])}),
    ],
    ids=str,
)
def test_parameters_out_of_range_are_named_if_validated(kind: str, given: dict[str, Tensor]) -> None:
    law = KINDS[kind].ours
    # Compiling, in an earlier test, switches torch's default of validation off.
    with pytest.raises(gapped.GappedError, match=f"{next(iter(given))}: got values out of range"):
        law(**given, validate_args=True)
    law(**given, validate_args=False)


# In the place of torch's class


def test_it_is_one_of_torchs() -> None:
    d = OneHotCategorical(logits=LOGITS)
    assert isinstance(d, td.OneHotCategorical)
    assert_close(d._param, d.logits)
    assert d.param_shape == reference().param_shape
    for masked in (d, OneHotCategorical(logits=LOGITS, mask=MASK)):
        assert torch.equal(masked._categorical.mode, masked.mode.argmax(-1))
        assert_close(masked._categorical.probs, masked.probs)
    assert_close(td.kl.kl_divergence(d._categorical, reference()._categorical), torch.zeros(3, 2).double())


@every_kind
@pytest.mark.parametrize("batch", [(), (3,), (2, 3)], ids=str)
def test_shapes_are_torchs(kind: Kind, batch: tuple[int, ...]) -> None:
    """A value broadcasts against the law."""
    ours, theirs = (each(logits=normal(*batch, K)) for each in (kind.ours, kind.theirs))
    one = theirs.sample()[(0,) * len(batch)]
    for sample_shape in ((), (1,), (5, 2)):
        value = ours.sample(torch.Size(sample_shape))
        assert value.shape == theirs.sample(torch.Size(sample_shape)).shape
        assert_close(ours.log_prob(value), theirs.log_prob(value))
    assert_close(ours.log_prob(one), theirs.log_prob(one))
    assert_close(
        ours.expand((4, *ours.batch_shape)).log_prob(value[0, 0]),
        theirs.log_prob(value[0, 0]).expand(4, *ours.batch_shape),
    )
    assert ours.enumerate_support().shape == theirs.enumerate_support().shape
    with pytest.raises(NotImplementedError):
        ours.cdf(value)


INF = math.inf


def test_the_mode_of_a_fair_coin_is_torchs() -> None:
    probs = torch.tensor([0.2, 0.5, 0.8])
    ours, theirs = (kind(probs).mode for kind in (Bernoulli, td.Bernoulli))
    torch.testing.assert_close(ours, theirs, equal_nan=True)


def test_the_derivative_of_log_prob_by_the_gates() -> None:
    value = torch.tensor([0.0, 1.0, 1.0], dtype=torch.float64, requires_grad=True)
    odds = torch.tensor([0.3, -1.2, INF], dtype=torch.float64)
    (slope,) = torch.autograd.grad(Bernoulli(logits=odds).log_prob(value).sum(), value)
    assert_close(slope[:2], odds[:2])
    assert slope[2].isfinite()


CERTAIN = torch.tensor([INF, -INF, 0.7], dtype=torch.float64)


@pytest.mark.parametrize("given", ["logits", "probs", "mask"])
def test_certain_gates_are_exact(given: str) -> None:
    """0 log 0 = 0: neither their entropy nor any gradient is NaN."""
    if given == "mask":
        leaf = torch.tensor([0.3, torch.nan, 0.7], dtype=torch.float64, requires_grad=True)
        d = Bernoulli(logits=leaf, mask=torch.tensor([False, False, True]))
        expected = [0.0, 0.0, 1 / (1 + math.exp(-0.7))]
    else:
        leaf = (CERTAIN if given == "logits" else torch.sigmoid(CERTAIN)).clone().requires_grad_()
        d = Bernoulli(**{given: leaf})
        expected = [1.0, 0.0, 1 / (1 + math.exp(-0.7))]
    assert_close(d.probs.detach(), torch.tensor(expected, dtype=torch.float64))
    value = d.sample()
    results = d.entropy(), d.log_prob(value), d.rsample(generator=seeded()), td.kl_divergence(d, d)
    for result in results[:2]:
        assert (result[:2] == 0).all()
    (gradient,) = torch.autograd.grad(sum(each.sum() for each in results), leaf)
    assert (gradient[:2] == 0).all()
    assert gradient[2].isfinite()
    impossible = d.log_prob(1 - value)
    assert (impossible[:2] == -INF).all()


def test_divergences_of_certain_gates() -> None:
    fair, certain = Bernoulli(torch.tensor(0.5)), Bernoulli(torch.tensor(1.0))
    assert_close(td.kl_divergence(certain, fair), torch.tensor(math.log(2)), 1e-6)
    assert td.kl_divergence(fair, certain) == INF


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_of_gates_is_rounded_once(dtype: torch.dtype) -> None:
    odds = normal(500).to(dtype)
    d, exact = Bernoulli(logits=odds), td.Bernoulli(logits=odds.double())
    eps = torch.finfo(dtype).eps
    for quantity in ("probs", "variance"):
        assert getattr(d, quantity).dtype == dtype
        torch.testing.assert_close(getattr(d, quantity).double(), getattr(exact, quantity), rtol=eps, atol=0)
    value = exact.sample()
    assert d.rsample().dtype == d.entropy().dtype == d.log_prob(value.to(dtype)).dtype == dtype
    torch.testing.assert_close(
        d.log_prob(value.to(dtype)).double(), exact.log_prob(value), rtol=eps, atol=1e-6
    )
    probs = torch.linspace(0.001, 0.999, 500).to(dtype)
    own, exact = (Bernoulli(probs=p) for p in (probs, probs.float()))
    assert torch.equal(own.log_prob(torch.zeros_like(probs)), exact.log_prob(torch.zeros(500)).to(dtype))
    assert torch.equal(own.entropy(), exact.entropy().to(dtype))


@pytest.mark.parametrize("given", ["logits", "probs"])
@pytest.mark.parametrize("number", [0.3, 1, True, 0, np.float32(0.25), np.int64(1)], ids=repr)
def test_numbers_are_taken_as_torch_takes_them(given: str, number: Any) -> None:
    # Torch takes no numbers of numpy's but its float64.
    ours, theirs = Bernoulli(**{given: number}), td.Bernoulli(**{given: float(number)})
    assert ours.batch_shape == theirs.batch_shape == ()
    assert ours.logits.dtype == torch.get_default_dtype()
    for quantity in ("probs", "mean", "variance"):
        assert_close(getattr(ours, quantity), getattr(theirs, quantity), 1e-6)
    assert ours.sample((8,)).shape == theirs.sample((8,)).shape
    assert ours.expand((2, 3)).sample().shape == (2, 3)
    value = torch.tensor(float(ours.probs > 0.5))
    assert_close(ours.log_prob(value), theirs.log_prob(value), 1e-6)
    assert_close(ours.enumerate_support(), theirs.enumerate_support())


def test_a_value_may_be_a_number_where_it_is_not_validated() -> None:
    ours, theirs = (kind(0.3, validate_args=False).log_prob(1.0) for kind in (Bernoulli, td.Bernoulli))
    assert_close(ours, theirs, 1e-6)
    for kind in (Bernoulli, td.Bernoulli):
        with pytest.raises(ValueError, match="value"):
            kind(0.3, validate_args=True).log_prob(1.0)


def test_it_is_one_of_torchs_and_has_its_further_divergences() -> None:
    d, theirs, rate = Bernoulli(logits=LOGITS), td.Bernoulli(logits=LOGITS), td.Poisson(LOGITS.exp())
    assert isinstance(d, td.Bernoulli)
    assert_close(td.kl_divergence(d, rate), td.kl_divergence(theirs, rate))
    assert_close(d._natural_params[0], theirs._natural_params[0])
    assert_close(d._param, LOGITS)


def test_pyro_enumerates_with_probabilities_and_samples_with_a_gradient() -> None:
    """By `has_rsample` alone, Pyro would leave the weights of enumerated values out."""
    pyro = pytest.importorskip("pyro", reason="needs pyro")
    mixin = pyro.distributions.torch_distribution.TorchDistributionMixin
    losses = []
    for kind in (Bernoulli, td.Bernoulli):
        site = type("Site", (kind, mixin), {})
        odds = torch.tensor(0.7, dtype=torch.float64, requires_grad=True)

        def model() -> None:
            b = pyro.sample("b", pyro.distributions.Bernoulli(torch.tensor(0.2, dtype=torch.float64)))
            pyro.sample("x", pyro.distributions.Normal(b, 1.0), obs=torch.tensor(0.5, dtype=torch.float64))

        def guide() -> None:
            pyro.sample("b", site(logits=odds), infer={"enumerate": "parallel"})  # noqa: B023

        elbo = pyro.infer.TraceEnum_ELBO(max_plate_nesting=0, strict_enumeration_warning=False)
        loss = elbo.differentiable_loss(model, guide)
        losses.append((loss.detach(), torch.autograd.grad(loss, odds)[0]))
    assert_all_close(*losses, 1e-12)
    d = type("Site", (Bernoulli, mixin), {})(logits=LOGITS.clone().requires_grad_())
    sample = d()
    assert sample.requires_grad
    assert d.score_parts(sample).score_function == 0
    assert_close(d.score_parts(sample.detach()).score_function, d.log_prob(sample.detach()))
