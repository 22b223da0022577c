"""Tiny tasks that several test files train: a VAE on random images, ListOps on short expressions."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence

import torch
from conftest import seeded
from torch import Tensor, nn

from gapped_lab.data import Dataset
from gapped_lab.fleet import Run, Trainer
from gapped_lab.fleet.run_layers import Linear
from gapped_lab.listops import ListOpsProtocol
from gapped_lab.listops.examples import Split, stack
from gapped_lab.listops.language import generate, parse
from gapped_lab.listops.source import ListOps
from gapped_lab.listops.task import ListOpsTask
from gapped_lab.tasks import VAEProtocol
from gapped_lab.tasks.vae import VAETask

CPU, DOUBLE = torch.device("cpu"), torch.float64
LATENTS, CATEGORIES, PIXELS, SCALE, BATCH, STEPS, EPOCHS = 3, 4, 12, 16, 8, 5, 4
VAE_TINY = VAEProtocol("tiny", LATENTS, CATEGORIES, (9, 7), batch=BATCH)
LISTOPS_TINY = ListOpsProtocol(
    "tiny-test", width=5, dropout=0.2, batch=6, learning_rate=0.02, epochs=3, clip=0.5, patience=0, waste=0.3
)


def toy_images(test: int = 30) -> Dataset:
    def images(n: int, seed: int) -> Tensor:
        return torch.randint(0, SCALE + 1, (n, PIXELS), generator=seeded(seed), dtype=torch.uint8)

    # Two images more than fill the batches: the last, incomplete batch is left out.
    train = BATCH * STEPS + 2
    labels = torch.zeros(train + test, dtype=torch.int64)
    return Dataset("toy", images(train, 1), images(test, 2), labels[:train], labels[:test], 3, 4, SCALE)


def vae_task(rules: VAEProtocol = VAE_TINY, seeds: Sequence[int] = (0, 1, 2), test: int = 30) -> VAETask:
    return VAETask(rules, toy_images(test), seeds, CPU, dtype=DOUBLE)


def vae_trainer(
    runs: Sequence[Run], seeds: Sequence[int], rules: VAEProtocol = VAE_TINY, test_every: int = 1
) -> Trainer:
    return Trainer(vae_task(rules, seeds), runs, EPOCHS, 77, CPU, test_every=test_every)


def train(trainer: Trainer) -> list[list[float]]:
    """Train to the end, and return the mean loss of each epoch by run."""
    while trainer.epoch < trainer.epochs:
        trainer.train_epoch()
    return trainer.history[f"train_{trainer.task.loss_name}"]


def weights(model: nn.Module, run: int | None = None) -> list[Tensor]:
    """Weights and biases in the layout of `torch.nn.Linear`, of one run if the model has several."""
    layers = [each for each in model.modules() if isinstance(each, nn.Linear | Linear)]
    if run is None:
        return [w.detach() for each in layers for w in (each.weight, each.bias)]
    return [w.detach() for each in layers for w in (each.weight[run].t(), each.bias[run].squeeze(0))]


def equal(one: Sequence[Tensor], other: Sequence[Tensor]) -> bool:
    """Whether all tensors are equal, bit for bit."""
    return all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def checkpoint(trainer: Trainer) -> Callable[[], dict[str, object]]:
    """A function that reads the trainer's present state back, as from a file."""
    file = io.BytesIO()
    torch.save(trainer.state_dict(), file)

    def read() -> dict[str, object]:
        file.seek(0)
        return torch.load(file, weights_only=True)

    return read


def resumed_twins(fresh: Callable[[], Trainer], after: int) -> tuple[Trainer, Trainer]:
    """A trainer at its end, and one that got there from the checkpoint of a third."""
    whole, first, second = fresh(), fresh(), fresh()
    train(whole)
    for _ in range(after):
        first.train_epoch()
    second.load_state_dict(checkpoint(first)())
    train(second)
    return whole, second


def toy_split(count: int, seed: int, least: int = 1) -> Split:
    expressions = [parse(text) for _, text in generate(4 * count, seed, progress=False)]
    short = [each for each in expressions if least <= len(each.tokens) < 14][:count]
    return stack(short, False, count)


_SPLITS = toy_split(30, 0, least=2), toy_split(25, 1), toy_split(30, 2)


def toy_expressions() -> ListOps:
    return ListOps("toy", *_SPLITS, 0, 14)


def listops_task(seeds: Sequence[int] = (3,), dtype: torch.dtype = DOUBLE) -> ListOpsTask:
    task = ListOpsTask(LISTOPS_TINY, toy_expressions(), seeds, CPU, dtype=dtype)
    # Large enough that a few steps make a difference.
    for weight in (task.model.embedding, task.model.output.weight, task.model.query):
        weight.data *= 100
    return task


def tree_inputs(
    runs: int,
    batch: int,
    count: int,
    width: int,
    *,
    seed: int = 0,
    dtype: torch.dtype = DOUBLE,
    device: torch.device = CPU,
) -> list[Tensor]:
    """Leaves, weight, bias and query of latent trees, large enough that scores differ."""
    g = seeded(seed)
    shapes = {
        (runs, batch, count, 2 * width): 1.0,
        (runs, 2 * width, 5 * width): width**-0.5,
        (runs, 1, 5 * width): 0.3,
        (runs, 1, width): 3.0,
    }
    draws = [scale * torch.randn(*shape, dtype=DOUBLE, generator=g) for shape, scale in shapes.items()]
    return [each.to(device, dtype).requires_grad_() for each in draws]
