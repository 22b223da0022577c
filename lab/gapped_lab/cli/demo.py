"""A small VAE on digits: the model of `gapped compare`, and a problem of `gapped diagnose`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gapped.errors import reject
from gapped_lab.cli.training import execute

if TYPE_CHECKING:
    from torch import Tensor

    from gapped_lab.recipe import Recipe

VAE_IMAGES, VAE_EPOCHS = 2, 10


def train(
    data: str,
    estimators: Sequence[str] | None,
    tau: float | None,
    out: Path,
    overrides: Mapping[str, Any],
    **how: Any,
) -> None:
    """Train the model with several estimators, and say which is best: `gapped compare` without --train."""
    execute([default_recipe(data, estimators, tau, **overrides)], out, **how)


def default_recipe(
    data: str = "digits", estimators: Sequence[str] | None = None, tau: float | None = None, **overrides: Any
) -> Recipe:
    """The recipe behind the command; `overrides` such as `seeds` and `epochs` come last."""
    from gapped.registry import RECOMMENDED
    from gapped_lab.data import IMAGES
    from gapped_lab.estimator_text import temperature
    from gapped_lab.recipe import recipe_from

    if data not in IMAGES:
        raise reject("--data", data, f"one of {', '.join(IMAGES)}")
    table: dict[str, Any] = {
        "name": "compare",
        "title": f"Estimators on {data}",
        "task": "vae",
        "protocol": "digits-8x8" if data == "digits" else "plain-30x10",
        "data": data,
        "seeds": 3,
        "variance_samples": 30,
        "variance_images": 200,
        "cell": [],
    }
    for text in estimators or RECOMMENDED:
        own = temperature(text, tau)
        table["cell"].append({"estimator": text} if own is None else {"estimator": text, "tau": own})
    return recipe_from(table, "compare", **overrides)


def problem(seed: int) -> tuple[Callable[[Tensor], Tensor], Tensor]:
    """The reconstruction error of two digits by the model after some epochs, and its logits."""
    import torch

    from gapped.pathwise.gst import GST
    from gapped_lab.data import load
    from gapped_lab.fleet import Run, Trainer
    from gapped_lab.tasks import vae_protocol
    from gapped_lab.tasks.vae import VAETask

    rules, device = vae_protocol("digits-8x8"), torch.device("cpu")
    task = VAETask(rules, load("digits"), [seed], device)
    trainer = Trainer(task, [Run(GST(tau=0.5, gap=1.0), rules.learning_rate)], VAE_EPOCHS, seed, device)
    for _ in range(VAE_EPOCHS):
        trainer.train_epoch()
    model, x = task.model.requires_grad_(False), task.test[:VAE_IMAGES] / task.scale

    def cost(z: Tensor) -> Tensor:
        samples = z.shape[0]
        rows = model.reconstruction(z.flatten(0, 1).unsqueeze(0), x.repeat(samples, 1).unsqueeze(0))
        return rows.view(samples, VAE_IMAGES)

    return cost, model.encode(x.unsqueeze(0)).squeeze(0)
