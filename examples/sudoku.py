"""Sudoku by gradient descent: 81 digits are drawn, and the gradient of the rules' violations corrects them.

There are no data and no network: the parameters are 81 x 9 logits, those of the clues masked to one digit.
The cost of a grid is the sum over rows, columns, boxes and digits of (count - 1)^2, which is zero for a
solution and for nothing else. Each puzzle is attempted by several chains that differ in their first logits
and their noise; it counts as solved when one of them has drawn a solution. The table has the step at which a
puzzle was solved, all steps if never, the share of puzzles that are solved, and the least cost that was
drawn. Run with `python examples/sudoku.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from common import compare, options
from torch import Tensor

import gapped

PUZZLES, CHAINS, CLUES = 10, 8, 36


def groups() -> Tensor:
    """The 27 sets of nine cells that hold each digit once, as a matrix ``(27, 81)`` of zeros and ones."""
    cells = torch.arange(81)
    row, column = cells // 9, cells % 9
    sets = torch.stack([row, 9 + column, 18 + 3 * (row // 3) + column // 3])
    return torch.zeros(27, 81).scatter_(0, sets, 1.0)


GROUPS = groups()


def solution(generator: torch.Generator) -> Tensor:
    """A full grid of digits 0 to 8, ``(81)``: a cyclic one, whose digits, rows and columns are permuted."""

    def shuffled() -> Tensor:
        bands = torch.randperm(3, generator=generator)
        return torch.cat([3 * band + torch.randperm(3, generator=generator) for band in bands])

    rows, columns, digits = shuffled(), shuffled(), torch.randperm(9, generator=generator)
    grid = (3 * (rows % 3) + rows // 3).unsqueeze(1) + columns
    return digits[grid % 9].flatten()


def puzzle(generator: torch.Generator) -> Tensor:
    """The digits that each cell may hold, ``(81, 9)``: all, or in the cells with a clue that one."""
    digits = solution(generator)
    clues = torch.randperm(81, generator=generator)[:CLUES]
    allowed = torch.ones(81, 9, dtype=torch.bool)
    allowed[clues] = torch.eye(9, dtype=torch.bool)[digits[clues]]
    return allowed


def violations(grid: Tensor) -> Tensor:
    """The cost of one-hot grids ``(..., 81, 9)``."""
    counts = GROUPS @ grid
    return (counts - 1).square().sum((-1, -2))


def solve(
    estimator: gapped.Pathwise | gapped.Score, steps: int, seed: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The puzzles, and for each the best grid drawn, its cost, and the step of the first solution."""
    generator = torch.Generator().manual_seed(seed)
    allowed = torch.stack([puzzle(generator) for _ in range(PUZZLES)]).unsqueeze(1)
    logits = torch.randn(PUZZLES, CHAINS, 81, 9, generator=generator).mul_(0.1).requires_grad_()
    optimiser = torch.optim.Adam([logits], lr=0.3)
    best = torch.full((PUZZLES,), torch.inf)
    grids_of_best = torch.zeros(PUZZLES, 81, 9)
    first = torch.full((PUZZLES,), float(steps))

    def cost(grids: Tensor) -> Tensor:
        found = violations(grids)
        # The costs of what was drawn: all samples of all chains of a puzzle. Soft grids have others.
        if bool(((grids == 0) | (grids == 1)).all()):
            keep(grids.detach(), found.detach())
        return found

    def keep(grids: Tensor, found: Tensor) -> None:
        least, which = found.movedim(1, 0).flatten(1).min(1)
        better = least < best
        drawn = grids.movedim(1, 0).flatten(1, 2)
        grids_of_best[better] = drawn[better, which[better]]
        best[better] = least[better]

    torch.manual_seed(seed)
    for step in range(steps):
        optimiser.zero_grad()
        gapped.expectation(cost, logits, estimator, mask=allowed).sum().backward()
        optimiser.step()
        first = torch.where((best == 0) & (first == steps), float(step), first)
    return allowed.squeeze(1), grids_of_best, best, first


def train(estimator: gapped.Pathwise | gapped.Score, steps: int, seed: int) -> dict[str, float]:
    _, _, best, first = solve(estimator, steps, seed)
    return {
        "steps": float(first.mean()),
        "solved": float((best == 0).float().mean()),
        "least violations": float(best.mean()),
    }


def draw(figure: Any, estimator: gapped.Pathwise | gapped.Score, steps: int, seed: int) -> None:
    """The first puzzles: clues in grey, the digits that were drawn in colour."""
    from picture import INK, colour_of, plain

    puzzles, grids, best, first = solve(estimator, steps, seed)
    for axes, allowed, grid, cost, step in zip(
        figure.subplots(1, 2), puzzles, grids, best, first, strict=False
    ):
        for cell in range(81):
            is_clue = int(allowed[cell].sum()) == 1
            row, column = divmod(cell, 9)
            digit = int(grid[cell].argmax()) + 1
            style = {"color": INK, "weight": "bold"} if is_clue else {"color": colour_of(estimator)}
            axes.text(column + 0.5, row + 0.52, str(digit), ha="center", va="center", **style)
        for line in range(10):
            width = 1.5 if line % 3 == 0 else 0.4
            axes.plot([line, line], [0, 9], color=INK, linewidth=width)
            axes.plot([0, 9], [line, line], color=INK, linewidth=width)
        axes.set(xlim=(-0.1, 9.1), ylim=(9.1, -0.1), xticks=[], yticks=[], aspect="equal")
        axes.set_title(f"solved in step {step:.0f}" if cost == 0 else f"not solved: {cost:.0f} violations")
        plain(axes)


def main() -> None:
    estimators = [
        "gapmax",
        "gst",
        "gst:gap=1,tau=0.5",
        "gumbel-softmax",
        "straight-through",
        "reinmax",
        "rloo",
    ]
    arguments = options(__doc__, steps=400, estimators=estimators, family=object).parse_args()
    print(f"{PUZZLES} puzzles with {CLUES} clues, {CHAINS} chains each\n")
    compare(train, arguments, draw, 225)


if __name__ == "__main__":
    main()
