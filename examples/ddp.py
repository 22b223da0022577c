"""Data-parallel training with a discrete layer: every process its own noise, all of them the same weights.

Run with `torchrun --nproc-per-node 2 examples/ddp.py`. Add `--same-noise` for the same noise in every
process, or `--fsdp` to shard the weights instead of copying them.

The trap: `torch.manual_seed(0)` in every process makes the weights start equal, which is wanted, and the
noise of torch's default generator equal as well, which is not. Samples of different processes then repeat
each other, and averaging gradients over processes lowers their variance less than it should. The remedy is a
generator for the noise, seeded by the rank, given to every sample. The table shows both.
"""

from __future__ import annotations

import sys
from contextlib import redirect_stderr, redirect_stdout
from functools import partial
from io import StringIO
from typing import Any

import torch
import torch.distributed as dist
from common import compare, options
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import gapped
from gapped_lab.data import load

SLOTS, CODES, HIDDEN, BATCH = 8, 16, 128, 64
digits = load("digits")


class Classifier(nn.Module):
    """Digits through a bottleneck of eight discrete codes."""

    def __init__(self, estimator: gapped.Pathwise) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(64, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, SLOTS * CODES))
        self.choose = gapped.nn.Sample(estimator, eval="argmax")
        self.head = nn.Sequential(nn.Linear(SLOTS * CODES, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 10))

    def forward(self, images: Tensor, noise: torch.Generator | None = None) -> Tensor:
        logits = self.encoder(images / digits.scale).unflatten(-1, (SLOTS, CODES))
        return self.head(self.choose(logits, generator=noise).flatten(-2))


def everywhere(value: Tensor) -> Tensor:
    """`value` of every process, stacked."""
    gathered = [torch.empty_like(value) for _ in range(dist.get_world_size())]
    dist.all_gather(gathered, value.contiguous())
    return torch.stack(gathered)


def agreement(noise: torch.Generator | None) -> float:
    """The share of rows in which all processes draw the same category, given equal logits."""
    drawn = draws(4_096, noise)
    return float((drawn == drawn[0]).all(0).float().mean())


def draws(count: int, noise: torch.Generator | None) -> Tensor:
    """What each process draws, ``(processes, count)``, given equal logits."""
    return everywhere(gapped.sample(torch.zeros(count, CODES), generator=noise).argmax(-1))


def draw_noise(figure: Any, drawn: dict[str, Tensor]) -> None:
    """The categories that the processes draw: a row for each process, a column for each draw."""
    from picture import INK, plain

    for axes, (title, rows) in zip(figure.subplots(len(drawn), 1), drawn.items(), strict=True):
        for rank, row in enumerate(rows):
            for place, category in enumerate(row):
                is_equal = bool((rows[:, place] == category).all())
                weight = "bold" if is_equal else "normal"
                axes.text(place, rank, str(int(category)), ha="center", va="center", weight=weight, color=INK)
        axes.set(xlim=(-0.5, len(rows[0]) - 0.5), ylim=(len(rows) - 0.4, -0.6), xticks=[])
        axes.set_yticks(range(len(rows)), [f"process {rank}" for rank in range(len(rows))])
        axes.set_title(title)
        plain(axes)


def train(
    estimator: gapped.Pathwise, steps: int, seed: int, same_noise: bool, fsdp: bool
) -> dict[str, float]:
    torch.manual_seed(seed)  # equal weights at the start
    model = Classifier(estimator)
    parallel = fully_shard(model) if fsdp else DistributedDataParallel(model)
    rank, world = dist.get_rank(), dist.get_world_size()
    # The lines that matter: a generator whose seed contains the rank, unless equal noise is asked for.
    noise = torch.Generator().manual_seed(1_000 * seed + (0 if same_noise else rank))

    images, labels = digits.train[rank::world].float(), digits.train_labels[rank::world]
    order = torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(parallel.parameters(), lr=2e-3)
    for _ in range(steps):
        batch = torch.randint(len(images), (BATCH,), generator=order)
        loss = nn.functional.cross_entropy(parallel(images[batch], noise=noise), labels[batch])
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()

    weights = [w.full_tensor() if fsdp else w for w in parallel.parameters()]
    copies = everywhere(torch.cat([w.detach().flatten() for w in weights]))
    parallel.eval()
    with torch.no_grad():
        scores = parallel(digits.test.float())
    return {
        "test loss": float(nn.functional.cross_entropy(scores, digits.test_labels)),
        "accuracy": float((scores.argmax(-1) == digits.test_labels).float().mean()),
        "weights equal": float((copies == copies[0]).all()),
        "equal draws, default": agreement(None),
        "equal draws, given": agreement(noise),
    }


def main() -> None:
    parser = options(__doc__, steps=200, estimators=["gapmax", "gumbel-softmax"], seeds=1)
    parser.add_argument("--same-noise", action="store_true", help="the same noise in every process")
    parser.add_argument("--fsdp", action="store_true", help="shard the weights, with FSDP2")
    arguments = parser.parse_args()
    # The picture is not the usual one, and one process writes it.
    figure, arguments.figure = arguments.figure, None
    dist.init_process_group("gloo")
    first, nowhere = dist.get_rank() == 0, StringIO()
    with redirect_stdout(sys.stdout if first else nowhere), redirect_stderr(sys.stderr if first else nowhere):
        compare(partial(train, same_noise=arguments.same_noise, fsdp=arguments.fsdp), arguments)
    if figure:
        torch.manual_seed(arguments.seed)
        own = torch.Generator().manual_seed(1_000 * arguments.seed + dist.get_rank())
        drawn = {
            "of the default generator after torch.manual_seed: all equal (bold)": draws(16, None),
            "of a generator whose seed contains the rank": draws(16, own),
        }
        if first:
            import picture

            picture.save(figure, arguments.title, {}, draw=lambda part: draw_noise(part, drawn), height=170)
    dist.barrier()  # a rank that leaves early breaks off what the others still wait for
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
