"""Problems with a known answer, to measure estimators on."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from gapped.errors import reject

VAE_IMAGES, VAE_EPOCHS = 2, 10
PROBLEMS = ("linear", "quadratic", "cubic", "classic", "vae")


class Problem(NamedTuple):
    """A cost and where its expectation is differentiated."""

    f: Callable[[Tensor], Tensor]
    logits: Tensor


def problem(name: str, seed: int = 0, shape: tuple[int, int] = (3, 4)) -> Problem:
    r"""The problem called `name`.

    - ``linear``, ``quadratic``, ``cubic``: powers of
      :math:`\sum_l \langle w_l, z_l\rangle / \sqrt L - 0.3` with normal weights, for `shape` variables and
      categories, at normal logits.
    - ``classic``: :math:`(b - 0.499)^2` for one bit, at a logit of zero.
    - ``vae``: the reconstruction error of two digits by a small VAE after ten epochs of training; 8
      variables of 8 categories each.
    """
    if name not in PROBLEMS:
        raise reject("--problem", name, f"one of {', '.join(PROBLEMS)}")
    if name == "vae":
        return _vae(seed)
    if name == "classic":
        return Problem(lambda z: (z[..., 1] - 0.499).square(), torch.zeros(2, dtype=torch.float64))
    noise = torch.Generator().manual_seed(seed)
    weights, logits = torch.randn(2, *shape, generator=noise, dtype=torch.float64)
    power = ("linear", "quadratic", "cubic").index(name) + 1
    return Problem(lambda z: ((z * weights).sum((-2, -1)) / math.sqrt(shape[0]) - 0.3) ** power, logits)


def _vae(seed: int) -> Problem:
    from gapped.lab.data import load
    from gapped.lab.fleet import Run, Trainer
    from gapped.lab.tasks import vae_protocol
    from gapped.lab.tasks.vae import VAETask
    from gapped.pathwise.gst import GST

    rules, device = vae_protocol("digits-8x8"), torch.device("cpu")
    task = VAETask(rules, load("digits"), [seed], device)
    trainer = Trainer(task, [Run(GST(tau=0.5), rules.learning_rate)], VAE_EPOCHS, seed, device)
    for _ in range(VAE_EPOCHS):
        trainer.train_epoch()
    model, x = task.model.requires_grad_(False), task.test[:VAE_IMAGES] / task.scale

    def cost(z: Tensor) -> Tensor:
        samples = z.shape[0]
        rows = model.reconstruction(z.flatten(0, 1).unsqueeze(0), x.repeat(samples, 1).unsqueeze(0))
        return rows.view(samples, VAE_IMAGES)

    return Problem(cost, model.encode(x.unsqueeze(0)).squeeze(0))
