"""Four ranks that split a vocabulary, and compare every result with the one from all categories.

Run as ``python shard_ranks.py FOLDER``: the ranks are forks of one process, which has imported torch once.
Each writes the largest error of every case to a file of its own.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from conftest import normal, seeded
from subprocesses import fork_ranks
from torch import Tensor, distributed
from variants import VARIANTS, make

import gapped
from gapped import simplex
from gapped.gradient import Points
from gapped.vocabulary.sharded import KINDS

WORLD, ROWS, D, V, STEP = 4, (2, 3), 4, 11, 4
SPLIT = [kind.name for kind in KINDS]
NAMES = [*SPLIT, *(name for name in VARIANTS if not name.startswith("nz-"))]
# Whose noise differs from rank to rank: all rows in one chunk, so that the reference can have the same noise.
NOISY = ("gumbel-softmax", "decoupled", "decoupled-warm", "gumbel-rao", "gumbel-rao-1")
LEVELS = torch.linspace(1.0, 2.0, 6, dtype=torch.float64).view(ROWS)
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "mask": {"mask": normal(*ROWS, V, seed=9) > -0.3},
    "shared mask": {"mask": torch.arange(V) > 3},  # the first rank has no category
    "tau per row": {"tau": LEVELS},
    "tied": {"is_tied": True},
}


def head() -> list[Tensor]:
    """Hidden states, weight, bias and table, leaves."""
    shapes = ((*ROWS, D), (V, D), (V,), (V, 2))
    return [normal(*shape, seed=n).requires_grad_() for n, shape in enumerate(shapes, 1)]


def results(estimator: Any, tensors: list[Tensor], is_tied: bool, **how: Any) -> list[Tensor]:
    """Every use of a choice, and every gradient of each of them."""
    hidden, weight, bias, table = tensors
    choice = gapped.linear_choice(hidden, weight, bias, estimator=estimator, **how)
    found = [choice.index]
    for result in (
        choice.select(weight if is_tied else table),
        choice.gate(),
        choice.log_prob,
        choice.entropy,
    ):
        upstream = normal(*result.shape, seed=5)
        found.append(result)
        found += torch.autograd.grad(result, tensors, upstream, materialize_grads=True)
    again = gapped.linear_choice(
        hidden, weight, bias, estimator=estimator, index=choice.index, **how
    ).log_prob
    return [*found, again, *torch.autograd.grad(again.sum(), tensors, materialize_grads=True)]


def with_noise_of_ranks(sizes: list[int], run: Any) -> Any:
    """`run` where the noise of all categories is what the ranks draw."""
    draw, key = simplex.log_exponential, int(torch.randint(2**62, (1,), generator=seeded()))

    def joined(like: Tensor, generator: torch.Generator | None = None) -> Tensor:
        parts = torch.split(like, sizes, -1)
        return torch.cat([draw(part, seeded(key + 1 + rank)) for rank, part in enumerate(parts)], -1)

    simplex.log_exponential = joined
    try:
        return run()
    finally:
        simplex.log_exponential = draw


def error_of(name: str, case: str, group: Any) -> float:
    """The largest difference between this rank's results and its part of those from all categories."""
    options = dict(CASES[case])
    mask, is_tied = options.pop("mask", None), options.pop("is_tied", False)
    rank, world = distributed.get_rank(group), distributed.get_world_size(group)
    own = [part.tolist() for part in torch.tensor_split(torch.arange(V), world)][rank]
    sizes = [len(part) for part in torch.tensor_split(torch.arange(V), world)]
    estimator = make(name, **options)
    chunks_of = STEP if name not in NOISY else 100
    # The last rank has fewer categories: left to itself, it would take other chunks than the others.
    gapped.vocabulary.rows_of_a_chunk = lambda _, categories, *__: (
        chunks_of if categories in (V, max(sizes)) else 1
    )
    whole = head()

    def reference() -> list[Tensor]:
        return results(estimator, whole, is_tied, mask=mask, generator=seeded())

    expected = with_noise_of_ranks(sizes, reference) if name in NOISY else reference()
    hidden, *others = head()
    shards = [hidden, *(each.detach()[own].requires_grad_() for each in others)]
    own_mask = None if mask is None else mask[..., own]
    # Only the first rank of the group has the generator that decides.
    generator = seeded(0 if rank == 0 else 100 + rank)
    found = results(estimator, shards, is_tied, mask=own_mask, generator=generator, group=group)
    worst = 0.0
    for number, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        # Each use is followed by the gradients of hidden states, weight, bias and table.
        is_split = number > 0 and (number - 1) % 5 >= 2
        theirs = theirs[own] if is_split else theirs
        assert ours.shape == theirs.shape
        worst = max(worst, float((ours.double() - theirs.double()).abs().max()))
    return worst


def rows_without_a_law(group: Any) -> dict[str, bool]:
    """A row without categories, one with a NaN, and one whose NaN only the last rank sees.

    One category does not exist in any row, and the table's row of it is NaN.
    """
    rank, world = distributed.get_rank(group), distributed.get_world_size(group)
    own = torch.tensor_split(torch.arange(V), world)[rank]
    hidden, weight, bias, table = (each.detach() for each in head())
    hidden = hidden.reshape(6, D).clone()
    hidden[4, 0] = torch.nan
    mask = torch.ones(6, V, dtype=torch.bool)
    mask[1] = mask[:, 3] = False
    table[3] = torch.nan
    fine, outcome = [0, 2, 3, 5], {}
    for name in NAMES:
        leaf = hidden.clone().requires_grad_()
        arguments = {"mask": mask[:, own], "generator": seeded(), "group": group}
        choice = gapped.linear_choice(leaf, weight[own], bias[own], estimator=make(name), **arguments)
        rows = choice.select(table[own])
        (gradient,) = torch.autograd.grad(rows.sum(), leaf)
        outcome[name] = (
            choice.index[1] == V
            and choice.index[4] == V + 1
            and (choice.index[fine] < V).all()
            and all((each[1] == 0).all() for each in (rows, gradient))
            and all(each[4].isnan().all() for each in (rows, gradient))
            and all(each[fine].isfinite().all() for each in (rows, gradient))
        )
    broken = bias.clone()
    broken[-1] = torch.nan
    index = gapped.linear_choice(hidden, weight[own], broken[own], group=group).index
    return {name: bool(value) for name, value in outcome.items()} | {"NaN": bool((index == V + 1).all())}


@dataclass(frozen=True, eq=False)
class Stranger(gapped.Pathwise):
    name = "stranger"

    def points(self, logits: Tensor, draw: Any) -> Points:
        raise NotImplementedError


def refusals(group: Any) -> dict[str, str]:
    messages = {}
    hidden, weight = torch.ones(1, D), torch.ones(V, D)
    for case, options in {
        "stranger": {"estimator": Stranger()},
        "function": {"estimator": gapped.GST(gap=lambda p: p)},
        "hard": {"estimator": gapped.GST(hard=False)},
        "group": {"group": "gloo"},
    }.items():
        try:
            gapped.linear_choice(hidden, weight, **{"group": group, **options})
        except gapped.GappedError as error:
            messages[case] = str(error)
    return messages


def half_precision(group: Any) -> bool:
    """Index and dtypes of bfloat16; sums over ranks are made in float32."""
    rank, world = distributed.get_rank(group), distributed.get_world_size(group)
    own = torch.tensor_split(torch.arange(V), world)[rank]
    hidden, weight, bias, _ = (each.detach().bfloat16() for each in head())
    part = weight[own].requires_grad_()
    whole = gapped.linear_choice(hidden, weight, bias, generator=seeded())
    choice = gapped.linear_choice(hidden, part, bias[own], generator=seeded(), group=group)
    (gradient,) = torch.autograd.grad(choice.select(part).sum(), part)
    return torch.equal(whole.index, choice.index) and gradient.dtype == torch.bfloat16


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    how = {"rank": rank, "world_size": WORLD, "timeout": timedelta(seconds=60)}
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", **how)
    pair = distributed.new_group([0, 1])
    groups = {"4": distributed.group.WORLD, **({"2": pair} if rank < 2 else {})}
    found: dict[str, Any] = {"errors": {}, "rows": {}}
    for size, group in groups.items():
        for name in NAMES:
            for case in CASES if name in SPLIT and size == "4" else ("plain",):
                found["errors"][f"{name}, {case}, {size} ranks"] = error_of(name, case, group)
        found["rows"][size] = rows_without_a_law(group)
        found["half"] = half_precision(group)
    found["refusals"] = refusals(distributed.group.WORLD)
    (folder / f"{rank}.json").write_text(json.dumps(found))
    distributed.barrier()


if __name__ == "__main__":
    import gapped.vocabulary.sharded

    sys.exit(fork_ranks(main, WORLD))
