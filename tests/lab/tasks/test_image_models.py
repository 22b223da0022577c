"""The convolutional VAE and the selection of pixels, against torch's convolutions and sums written here."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from conftest import assert_close, normal, seeded
from toy_tasks import CPU, DOUBLE, train

import gapped
from gapped.errors import GappedError
from gapped_lab.data.images import Dataset
from gapped_lab.fleet import Run, Trainer
from gapped_lab.fleet.run_layers import generators
from gapped_lab.tasks import VAEProtocol
from gapped_lab.tasks.vae import VAE, VAETask

CODES = VAEProtocol("codes", 9, 5, (3, 2), patch=2, batch=4)
SELECTION = VAEProtocol("selection", 3, 36, (4,), selects=True, batch=4)
PIXELS, SIDE = 36, 3


def model_and_images(rules: VAEProtocol) -> tuple[VAE, torch.Tensor]:
    return VAE(rules, PIXELS, generators([1, 2])).double(), torch.rand(
        2, 4, PIXELS, generator=seeded(3), dtype=DOUBLE
    )


def kernel(layer: torch.nn.Module, run: int) -> torch.Tensor:
    """The weight of a 3x3 layer as torch's convolution wants it."""
    weight = layer.weight[run]
    return weight.view(3, 3, weight.shape[0] // 9, -1).permute(3, 2, 0, 1)


def test_encoder_and_decoder_are_torch_s_convolutions():
    model, x = model_and_images(CODES)
    z = torch.softmax(normal(2, 4, 9, 5), -1)
    logits, pixels = model.encode(x), model.decode(z)
    for run in range(2):
        first, second, last = model.encoder
        y = F.pixel_unshuffle(x[run].view(4, 1, 6, 6), 2)
        y = F.conv2d(y, kernel(first, run), first.bias[run, 0], padding=1).relu()
        y = F.conv2d(y, kernel(second, run), second.bias[run, 0], padding=1).relu()
        y = y.flatten(2).transpose(1, 2) @ last.weight[run] + last.bias[run]
        assert_close(logits[run], y, 1e-12)
        table, second, last = model.decoder
        y = (z[run] @ table.weight[run] + table.bias[run]).transpose(1, 2).unflatten(2, (SIDE, SIDE))
        y = F.conv2d(y, kernel(second, run), second.bias[run, 0], padding=1).relu()
        y = F.conv2d(y, kernel(last, run), last.bias[run, 0], padding=1)
        assert_close(pixels[run], F.pixel_shuffle(y, 2).flatten(1), 1e-12)


def test_images_of_another_size_are_refused_in_one_line():
    with pytest.raises(GappedError, match=r"^data: got images of 5x5 pixels, expected images of 9 patches"):
        VAE(CODES, 25, generators([0]))


def test_a_selection_shows_the_decoder_the_selected_pixels_alone():
    model, x = model_and_images(SELECTION)
    logits, divergence = model.posterior(x)
    assert logits.shape == (2, 4, 3, PIXELS)
    assert float(divergence) == 0
    index = torch.randint(0, PIXELS, (2, 4, 3), generator=seeded(5))
    z = F.one_hot(index, PIXELS).double()
    expected = model.decode(z, x)
    elsewhere = torch.where(z.amax(-2) > 0, x, 1 - x)
    assert torch.equal(model.decode(z, elsewhere), expected)
    first, last = model.decoder
    y = (x.gather(-1, index) @ first.weight + first.bias).relu() @ last.weight + last.bias
    assert_close(expected, y, 1e-12)


@pytest.mark.parametrize("rules", [CODES, SELECTION], ids=lambda rules: rules.name)
def test_they_learn_in_a_fleet(rules: VAEProtocol):
    images = torch.randint(0, 2, (40, PIXELS), generator=seeded(7), dtype=torch.uint8)
    labels = torch.zeros(40, dtype=torch.int64)
    data = Dataset("toy", images, images, labels, labels, 6, 6, 1)
    task = VAETask(rules, data, [0, 1], CPU, dtype=DOUBLE)
    runs = [Run(gapped.GST(gap="auto"), 1e-2), Run(gapped.RLOO(2), 1e-2)]
    trainer = Trainer(task, runs, 4, 0, CPU)
    train(trainer)
    name = f"test_{task.loss_name}"
    assert task.loss_name == ("cross_entropy" if rules.selects else "negative_elbo")
    first, last = trainer.history[name][0], trainer.history[name][-1]
    assert all(b < a for a, b in zip(first, last, strict=True))
    assert task.gradient_variance(trainer.sampler, trainer.generator, 4, 3).gt(0).all()
    shapes = {each.shape for each in task.pictures(trainer.sampler, trainer.generator, 2).values()}
    assert shapes == {(2, 2, PIXELS)}
