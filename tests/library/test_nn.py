"""The module: samples through its estimator, and in eval mode samples or takes the most likely category."""

from __future__ import annotations

import copy
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import assert_close, assert_one_hot, every_member, normal, seeded

import gapped
from gapped.nn import Gate, Sample

K = 5


@every_member
@pytest.mark.parametrize("training", [True, False])
def test_it_samples_through_the_estimator(name: str, training: bool) -> None:
    estimator = gapped.estimator(name)
    module = Sample(estimator).train(training)
    logits, weight = normal(30, K).requires_grad_(), normal(30, K, seed=2)
    ours, theirs = module(logits, generator=seeded()), estimator.sample(logits, generator=seeded())
    assert torch.equal(ours, theirs)
    gradients = [torch.autograd.grad(sample, logits, weight)[0] for sample in (ours, theirs)]
    assert torch.equal(*gradients)


def test_axis_and_mask_are_passed_on() -> None:
    logits, dim = normal(3, 4), 0
    mask = torch.ones(3, 4, dtype=torch.bool)
    mask[0, 0] = mask[2, 1] = False
    expected = gapped.GST().sample(logits, dim=dim, mask=mask, generator=seeded())
    assert torch.equal(Sample(gapped.GST(), dim=dim)(logits, mask=mask, generator=seeded()), expected)
    assert torch.equal(Sample(gapped.GST(), dim=dim)(logits, mask, seeded()), expected)


@every_member
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_eval_may_take_the_argmax(name: str, dtype: torch.dtype) -> None:
    module = Sample(gapped.estimator(name), eval="argmax")
    logits = torch.stack([torch.randperm(K, generator=seeded(i)) for i in range(30)]).to(dtype)
    samples = torch.cat([module(logits) for _ in range(20)])
    assert not torch.equal(samples.argmax(-1), logits.repeat(20, 1).argmax(-1)), "training must sample"
    state = torch.get_rng_state()
    best = module.eval()(logits)
    assert_one_hot(best)
    assert best.dtype == dtype
    assert torch.equal(best.argmax(-1), logits.argmax(-1))
    assert torch.equal(torch.get_rng_state(), state), "nothing is random here"
    assert not torch.equal(module.train()(logits.repeat(20, 1)).argmax(-1), logits.repeat(20, 1).argmax(-1))


def test_the_argmax_obeys_mask_and_axis_and_passes_nan_on() -> None:
    module = Sample(gapped.GST(), dim=0, eval="argmax").eval()
    logits = torch.tensor([[3.0, 1.0, 0.0], [2.0, 5.0, 0.0], [1.0, 4.0, 0.0]])
    mask = torch.tensor([[False, True, False], [True, False, False], [True, True, False]])
    expected = torch.tensor([[0.0, 0.0, 0.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])
    assert torch.equal(module(logits, mask=mask), expected)
    logits[0, 1] = torch.nan
    assert module(logits)[:, 1].isnan().all()
    assert torch.equal(module(logits)[:, 0], torch.tensor([1.0, 0.0, 0.0]))


@pytest.mark.parametrize("training", [True, False])
def test_bad_input_is_refused_in_either_mode(training: bool) -> None:
    module = Sample(gapped.GST(), eval="argmax").train(training)
    for mask in (torch.ones(3), torch.ones(4, dtype=torch.bool)):
        with pytest.raises(gapped.GappedError, match=r"mask: got .*, expected "):
            module(normal(2, 3), mask=mask)
    for logits in (torch.zeros(2, 3, dtype=torch.int64), torch.zeros(2, 0)):
        with pytest.raises(gapped.GappedError, match=r"logits: got .*, expected "):
            module(logits)


@pytest.mark.parametrize("kind", [Sample, Gate])
def test_a_layer_is_an_ordinary_module(kind: Any) -> None:
    layer = kind(eval="argmax")
    layer.tau = 0.5
    assert layer.estimator == gapped.GapMax(0.5)
    assert layer.state_dict() == {}
    assert "tau=0.5" in repr(layer)
    assert "argmax" in repr(layer)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(normal(10, K), generator=seeded()), layer(normal(10, K), generator=seeded()))
    for argument, wrong in (("eval", "mean"), ("estimator", "rloo"), ("estimator", 3)):
        with pytest.raises(gapped.GappedError, match=f"{argument}: got .*, expected "):
            kind(**{argument: wrong})


@every_member
def test_a_gate_layer_draws_gates(name: str) -> None:
    layer, odds = Gate(name, eval="argmax"), normal(30, K).requires_grad_()
    mask = torch.rand(30, K, generator=seeded(3)) < 0.5
    ours, theirs = (
        draw(odds, mask=mask, generator=seeded()) for draw in (layer, gapped.estimator(name).gate)
    )
    assert torch.equal(ours, theirs)
    gradients = [torch.autograd.grad(gates, odds, normal(30, K, seed=2))[0] for gates in (ours, theirs)]
    assert torch.equal(*gradients)
    state = torch.get_rng_state()
    best = layer.eval()(odds, mask)
    assert torch.equal(best, ((odds >= 0) & mask).double())
    assert not best.requires_grad
    assert torch.equal(torch.get_rng_state(), state)
    layer.eval_mode = "sample"
    assert torch.equal(layer(odds, mask, seeded()), theirs)
    layer.eval_mode = "argmax"
    assert layer(torch.tensor([-1.0, 0.0, 1.0, torch.nan])).nan_to_num(7).tolist() == [0, 1, 1, 7]


def learned(kind: str, tau: Any) -> Any:
    estimator = gapped.GumbelSoftmax(tau, hard=False)
    layers = {
        "sample": lambda: Sample(estimator),
        "gate": lambda: Gate(estimator),
        "quantizer": lambda: gapped.nn.Quantizer(K, 4, codes=3, estimator=estimator),
    }
    return layers[kind]()


def value_of(layer: Any) -> torch.Tensor:
    result = layer(normal(30, K).to(layer.tau.dtype), generator=seeded())
    return result.entries if isinstance(result, gapped.nn.Quantized) else result


LAYERS = pytest.mark.parametrize("kind", ["sample", "gate", "quantizer"])


@LAYERS
def test_a_learned_temperature_belongs_to_the_module(kind: str) -> None:
    tau = torch.nn.Parameter(torch.tensor(0.7))
    layer = learned(kind, tau)
    assert layer.state_dict()["tau"] == 0.7
    assert dict(layer.named_parameters())["tau"] is tau
    value_of(layer).square().sum().backward()
    assert tau.grad.abs() > 0
    layer.double()
    assert layer.tau is layer.estimator.tau
    assert layer.tau.dtype == torch.float64
    twin = learned(kind, torch.nn.Parameter(torch.tensor(3.0))).double()
    twin.load_state_dict(layer.state_dict())
    for other in (twin, copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert other.estimator.tau is dict(other.named_parameters())["tau"]
        assert torch.equal(value_of(other), value_of(layer))
    meta = copy.deepcopy(layer).to_empty(device="cpu")
    assert meta.estimator.tau is dict(meta.named_parameters())["tau"]


@LAYERS
def test_a_temperature_that_is_set_becomes_a_parameter_or_ceases_to_be_one(kind: str) -> None:
    layer = learned(kind, 0.5)
    assert "tau" not in layer.state_dict()
    layer.tau = torch.nn.Parameter(torch.tensor(0.25))
    assert layer.state_dict()["tau"] == layer.estimator.tau == 0.25
    layer.tau = 0.5
    assert "tau" not in layer.state_dict()
    layer.estimator = gapped.GumbelSoftmax(torch.nn.Parameter(torch.tensor(2.0)), hard=False)
    assert "tau" in layer.state_dict()
    other = torch.tensor(1.5, requires_grad=True)
    call = torch.func.functional_call(layer, {"tau": other}, (normal(4, K, dtype=torch.float32),))
    value = call.entries if kind == "quantizer" else call
    assert torch.autograd.grad(value.square().sum(), other)[0].abs() > 0


def recorded(function: Any, logits: torch.Tensor) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Of branches, and that torch.jit is old.
        return torch.jit.trace(function, (logits,), check_trace=False)


@every_member
def test_a_trace_does_not_keep_the_path_of_its_example(name: str) -> None:
    """An example of finite logits, then rows without a law."""
    layer, finite = Sample(name), normal(4, K)
    logits = finite.clone()
    logits[1], logits[2] = torch.nan, -torch.inf
    samples = recorded(layer, finite)(logits)
    assert samples.sum(-1).nan_to_num(7).tolist() == [1, 7, 0, 1]


@every_member
def test_a_trace_carries_the_gradient(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That of the same draw outside of the trace, where noise comes in the order of a trace."""
    layer, weight = Sample(name), normal(4, K, seed=2)
    trace, results = recorded(layer, normal(4, K, seed=5).requires_grad_()), []
    for draw in (trace, layer):
        leaf = normal(4, K).requires_grad_()
        torch.manual_seed(0)
        if draw is layer:
            monkeypatch.setattr(torch._C, "_is_tracing", lambda: True)
        sample = draw(leaf)
        monkeypatch.undo()
        results.append((sample.detach(), torch.autograd.grad(sample, leaf, weight)[0]))
    assert results[0][1].abs().max() > 0
    assert torch.equal(results[0][0], results[1][0])
    assert_close(results[0][1], results[1][1], 1e-12)


@pytest.mark.parametrize(
    "layer",
    [Sample("gst"), Gate(), gapped.nn.Quantizer(K, 4, codes=3), gapped.nn.Router(K, 4)],
    ids=lambda layer: type(layer).__name__,
)
def test_a_proxy_of_fx_is_refused_with_what_to_do(layer: torch.nn.Module) -> None:
    with pytest.raises(gapped.GappedError, match=r": got an object of type Proxy.*make the module a leaf"):
        torch.fx.symbolic_trace(torch.nn.Sequential(layer))


@pytest.mark.parametrize("training", [True, False])
def test_a_quantizer_is_exported_and_saved(training: bool, tmp_path: Path) -> None:
    layer, x = gapped.nn.Quantizer(K, 4, codes=3, groups=2).train(training), torch.randn(6, K)
    torch.export.save(torch.export.export(layer, (x,)), tmp_path / "layer.pt2")
    result = torch.export.load(tmp_path / "layer.pt2").module()(x)
    assert isinstance(result, gapped.nn.Quantized)
    if not training:
        assert_close(result.entries, layer(x).entries)


@pytest.mark.parametrize(
    "draw",
    [
        lambda x: gapped.choose(x, generator=seeded()),
        lambda x: gapped.choose(x, k=2, generator=seeded()),
        lambda x: gapped.linear_choice(x, x, generator=seeded()),
        lambda x: gapped.nn.Router(K, 3)(x.float(), generator=seeded()),
    ],
    ids=["choice", "choices", "linear", "routed"],
)
def test_a_choice_equals_itself_alone(draw: Any) -> None:
    choice, other = draw(normal(4, K)), draw(normal(4, K))
    assert choice == choice
    assert choice != other
    assert len({choice, other}) == 2
