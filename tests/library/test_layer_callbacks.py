"""Temperature schedules, and the log of how layers use their categories, against closed forms."""

from __future__ import annotations

import csv
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import gapped
from gapped.nn import schedules

KINDS = (schedules.Linear, schedules.Exponential, schedules.Cosine)
# After a quarter of the steps, and after half of them.
ON_THE_WAY = {
    "Linear": (0.8125, 0.625),
    "Exponential": (0.25**0.25, 0.5),
    "Cosine": (0.25 + 0.75 * (1 + math.sqrt(0.5)) / 2, 0.625),
}


@pytest.mark.parametrize("kind", KINDS)
def test_schedules_begin_and_end_as_told_and_pass_through_the_middle(kind: type[schedules.Schedule]) -> None:
    schedule = kind(1.0, 0.25, steps=8)
    values = [schedule(step) for step in range(12)]
    assert values[0] == 1.0
    assert (values[2], values[4]) == pytest.approx(ON_THE_WAY[kind.__name__])
    assert values[8:] == pytest.approx([0.25] * 4)
    assert values[:9] == sorted(values[:9], reverse=True)
    assert [kind(0.25, 1.0, steps=8)(step) for step in range(9)] == pytest.approx(
        values[8::-1] if kind is not schedules.Exponential else [0.25 * 4 ** (step / 8) for step in range(9)]
    )


def test_all_layers_of_a_model_get_the_temperature() -> None:
    quantizer = gapped.nn.Quantizer(4, 2, codes=8)
    parts = [gapped.nn.Sample("gst"), gapped.nn.Gate("gst"), gapped.nn.Mask((2, 4), 2, 4), quantizer]
    model = nn.ModuleList([nn.Linear(2, 2), nn.Sequential(*parts)])
    assert schedules.Linear(1.0, 0.5, steps=2).apply(model, 1) == 0.75
    assert [part.tau for part in parts] == [0.75] * 4


def test_a_temperature_by_confidence() -> None:
    """Four categories of largest probability 1/4, 5/8 and 1: by hand the shares are 0, 1/2 and 1."""
    schedule, layer = schedules.CAGE(momentum=0.5), gapped.nn.Sample("straight-through:draw=argmax")
    p = torch.tensor([[0.25] * 4, [0.625] + [0.125] * 3, [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64)
    logits = p.log()
    taus = [schedule.apply(layer, logits[rows]) for rows in (slice(1), slice(1, 2), slice(0, 3), slice(2, 3))]
    # Running means 0, 1/4, 1/8 + 1/4 and 3/16 + 1/2, of 2.5 below 3.
    assert taus == pytest.approx([3.0, 3 - 2.5 / 4, 3 - 2.5 * 3 / 8, 3 - 2.5 * 11 / 16], abs=1e-12)
    assert layer.tau == taus[-1]
    leaf = logits[1:2].clone().requires_grad_()
    sample, g = layer(leaf), torch.tensor([[1.0, -2.0, 0.5, 3.0]], dtype=torch.float64)
    assert torch.equal(sample, torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64))
    q = torch.softmax(leaf.detach() / taus[-1], -1)
    (gradient,) = torch.autograd.grad(sample, leaf, g)
    assert torch.allclose(gradient, q * (g - (q * g).sum()) / taus[-1], rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schedules.Linear(0.0, 1.0, 5), "start: got 0.0"),
        (lambda: schedules.Linear(1.0, -1.0, 5), "end: got -1.0"),
        (lambda: schedules.Cosine(1.0, 0.5, 0), "steps: got 0"),
        (lambda: schedules.CAGE(end=0.0), "end: got 0.0"),
        (lambda: schedules.CAGE(momentum=1.0), "momentum: got 1.0"),
        (
            lambda: schedules.Cosine(1.0, 0.5, 3).apply(nn.Linear(2, 2), 0),
            "module: got a Linear without gapped",
        ),
        (lambda: gapped.nn.Usage(nn.Linear(2, 2)), "module: got a Linear without them"),
        (lambda: gapped.nn.Usage(gapped.nn.Sample()).write(3, 0), "logger: got an object of type int"),
    ],
)
def test_wrong_arguments_are_refused(call: Any, message: str) -> None:
    with pytest.raises(gapped.GappedError, match=message):
        call()


def test_usage_of_a_layer_is_that_of_the_closed_form() -> None:
    """Two calls, of two rows and of one; the last category does not exist, and eval mode does not count."""
    layer = gapped.nn.Sample("gst", dim=0)
    model = nn.Sequential(layer)
    p = torch.tensor(
        [[0.5, 0.25, 0.25, 0.0], [0.125, 0.125, 0.75, 0.0], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64
    )
    mask = torch.tensor([True, True, True, False]).unsqueeze(-1)
    finite = p.log().clamp_min(-1e9).t()
    with gapped.nn.Usage(model) as usage:
        first = layer(finite[:, :2], mask=mask.expand(4, 2))
        second = layer(finite[:, 2:], mask.expand(4, 1))
        layer.eval()(finite)
        values = usage.read()
        assert usage.read() == {}
    layer.train()(finite)
    assert usage.read() == {}, "watches no longer"
    entropy = torch.special.entr(p).sum(-1).mean().item()
    perplexity = torch.special.entr(p.mean(0)).sum().exp().item()
    taken = torch.cat([first, second], 1).sum(1)
    expected = {"0/perplexity": perplexity, "0/entropy": entropy, "0/dead": float((taken == 0).sum())}
    assert values == pytest.approx(expected)


def test_usage_of_a_quantizer_is_that_of_its_groups() -> None:
    quantizer = gapped.nn.Quantizer(4, 4, codes=5, groups=2)
    with gapped.nn.Usage(quantizer) as usage:
        result = quantizer(torch.randn(3, 7, 4, generator=torch.Generator().manual_seed(0)))
        values = usage.read()
    assert values["Quantizer/dead"] == 10 - sum(len(result.indices[..., g].unique()) for g in range(2))
    # `prob_perplexity` is a sum over groups.
    assert values["Quantizer/perplexity"] == pytest.approx(result.prob_perplexity().item() / 2, rel=1e-5)
    entropy = math.log(5) - result.divergence().item() / 2
    assert values["Quantizer/entropy"] == pytest.approx(entropy, rel=1e-5)


class Run:
    """As Weights & Biases has it."""

    def __init__(self) -> None:
        self.lines: list[tuple[dict[str, float], int]] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.lines.append((values, step))


def test_usage_goes_to_the_usual_loggers(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is optional")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    layer, run, plain = gapped.nn.Sample(), Run(), Run()
    with gapped.nn.Usage(layer) as usage, SummaryWriter(str(tmp_path)) as writer:
        for step, logger in enumerate((writer, run, plain.log)):
            layer(torch.zeros(2, 4))
            values = usage.write(logger, step)
            assert values["Sample/perplexity"] == pytest.approx(4)
    assert run.lines == [(values, 1)]
    assert plain.lines == [(values, 2)]
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.value for event in events.Scalars("Sample/perplexity")] == pytest.approx([4.0])


def test_lightning_anneals_and_logs(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning", reason="lightning is optional")
    from lightning.pytorch.loggers import CSVLogger

    from gapped.nn.lightning_callback import LayerCallback

    class Model(lightning.LightningModule):  # type: ignore[name-defined, misc]
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.sample = nn.Linear(3, 4), gapped.nn.Sample("gst")

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.sample(self.encoder(batch))[:, 0].mean()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    model, logger = Model(), CSVLogger(str(tmp_path))
    callback = LayerCallback(schedules.Linear(1.0, 0.5, steps=4), every=2)
    quiet = {"enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Lightning's own advice on loaders and loggers
        trainer = lightning.Trainer(
            max_steps=4, accelerator="cpu", logger=logger, log_every_n_steps=1, callbacks=[callback], **quiet
        )
        trainer.fit(model, torch.utils.data.DataLoader(torch.ones(6, 3), batch_size=2))  # three an epoch
    assert model.sample.tau == 0.625, "that of the last batch"
    lines = list(csv.DictReader(Path(logger.log_dir, "metrics.csv").read_text().splitlines()))
    assert [float(line["tau"]) for line in lines] == [0.875, 0.625]
    assert [line["step"] for line in lines if line["sample/perplexity"]] == ["2", "4"]


def test_confidence_passes_over_rows_without_a_law() -> None:
    model, schedule = gapped.nn.Sample("straight-through:draw=argmax"), schedules.CAGE(momentum=0.0)
    sure = torch.tensor([[99.0, 0.0]])
    lawless = torch.tensor([[-torch.inf, -torch.inf], [torch.nan, 0.0]])
    assert schedule.apply(model, torch.cat([sure, lawless])) == pytest.approx(0.5)
    assert schedule.apply(model, lawless) == pytest.approx(0.5), "nothing is known of these"
    assert schedule.apply(model, sure[:0]) == pytest.approx(0.5)
    undecided = torch.tensor([[0.0, 0.0, -torch.inf, -torch.inf]])
    assert schedule.apply(model, undecided) == pytest.approx(3.0), "one of the two that exist"
    with pytest.raises(gapped.GappedError, match="logits: got"):
        schedule.apply(model, torch.zeros(2, 3, dtype=torch.int64))
    with pytest.raises(gapped.GappedError, match="momentum: got"):
        schedules.CAGE(momentum="a")  # type: ignore[arg-type]


def test_rows_without_a_category_take_none() -> None:
    layer, mask = gapped.nn.Sample("gst"), torch.ones(50, 4, dtype=torch.bool)
    mask[:, 0] = mask[0] = False
    with gapped.nn.Usage(layer) as usage:
        layer(torch.zeros(50, 4), mask)
        seen = usage.read()
        assert seen["Sample/dead"] == 1
        assert seen["Sample/entropy"] == pytest.approx(math.log(3))
        layer(torch.full((2, 4), torch.nan))
        assert usage.read()["Sample/dead"] == 4
        layer(torch.zeros(4))
        assert usage.read()["Sample/dead"] == 3
    quantizer = gapped.nn.Quantizer(3, 4, codes=5)
    with gapped.nn.Usage(quantizer) as usage:
        quantizer(torch.zeros(3))
        assert usage.read()["Quantizer/dead"] == 4


def test_a_layer_that_serves_rows_of_several_widths_is_measured_for_each() -> None:
    layer = gapped.nn.Sample("gst")
    with gapped.nn.Usage(nn.Sequential(layer)) as usage:
        layer(torch.zeros(9, 4))
        assert usage.read()["0/perplexity"] == pytest.approx(4)
        layer(torch.zeros(9, 4))
        layer(torch.zeros(9, 6))
        values = usage.read()
    assert values["0[4]/perplexity"] == pytest.approx(4)
    assert values["0[6]/perplexity"] == pytest.approx(6)
    assert len(values) == 6


def test_usage_says_that_no_layer_was_called() -> None:
    """A compiled model does not call hooks that come after its first call."""
    layer = gapped.nn.Sample("gst")
    compiled = torch.compile(nn.Sequential(nn.Identity(), layer), backend="eager")
    compiled(torch.zeros(9, 4))
    with gapped.nn.Usage(compiled) as usage:
        compiled(torch.zeros(9, 4))
        with pytest.warns(UserWarning, match="Usage: no layer was called. Attach it before"):
            assert usage.read() == {}
        layer.eval()(torch.zeros(9, 4))
        assert usage.read() == {}
