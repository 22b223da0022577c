"""A policy that plans four discrete actions, trained by both families of estimators on one cost.

A puck starts somewhere with some speed and is to be near the origin after four time steps. At each of them
the policy pushes it north, south, east or west, or not at all. Some pucks lack some of their thrusters:
these actions are masked, and no plan ever contains one.

`gapped.expectation` takes the simulator, the policy's logits and an estimator. A pathwise estimator sends
the gradient back through the simulator; a score-function estimator only looks at what its plans cost, and
would work as well with a simulator that has no derivative. There are 625 plans, so the expected cost of the
policy on test states and the cost of the best plan are enumerated: the table has no sampling noise of its
own. Run with `python examples/policy.py`.
"""

from __future__ import annotations

from typing import Any

import torch
from common import compare, options
from torch import Tensor, nn

import gapped

TIMES, HIDDEN, BATCH = 4, 64, 64
PUSHES = torch.tensor([[0.0, 0.0], [0.0, 1.0], [0.0, -1.0], [1.0, 0.0], [-1.0, 0.0]])


def states(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Position and velocity of `count` pucks, and which of the five actions each can take."""
    state = torch.randn(count, 4, generator=generator) * torch.tensor([2.0, 2.0, 0.5, 0.5])
    works = torch.rand(count, len(PUSHES), generator=generator) < 0.8
    works[:, 0] = True  # doing nothing is always possible
    return state, works.unsqueeze(1)


def simulate(plan: Tensor, state: Tensor) -> Tensor:
    """The cost of one-hot plans ``(n, batch, times, actions)``: squared distance at the end, plus fuel."""
    fuel = 1 - plan[..., 0].mean(-1)
    return path(plan, state)[-1].square().sum(-1) + 0.1 * fuel


def path(plan: Tensor, state: Tensor) -> list[Tensor]:
    """The positions ``(..., batch, 2)`` of the pucks at the start and after each action."""
    velocity = state[:, 2:]
    positions = [state[:, :2]]
    for push in (plan @ PUSHES).unbind(-2):
        velocity = velocity + 0.5 * push
        drag = 0.05 * velocity * velocity.norm(dim=-1, keepdim=True)
        positions.append(positions[-1] + velocity - drag)
    return positions


def policy() -> nn.Sequential:
    """State and working thrusters to logits ``(batch, times, actions)``."""
    actions = len(PUSHES)
    return nn.Sequential(
        nn.Linear(4 + actions, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, HIDDEN),
        nn.ReLU(),
        nn.Linear(HIDDEN, TIMES * actions),
        nn.Unflatten(-1, (TIMES, actions)),
    )


def logits_of(network: nn.Module, state: Tensor, works: Tensor) -> Tensor:
    return network(torch.cat([state, works.squeeze(1).float()], -1))


def expected_cost(
    network: nn.Module, state: Tensor, works: Tensor, estimator: gapped.Pathwise | gapped.Score
) -> Tensor:
    logits = logits_of(network, state, works)
    return gapped.expectation(lambda plan: simulate(plan, state), logits, estimator, mask=works).mean()


def best_cost(state: Tensor, works: Tensor) -> float:
    """The mean cost of the best plan that each puck can follow."""
    plans = torch.cartesian_prod(*[torch.arange(len(PUSHES))] * TIMES)
    one_hot = nn.functional.one_hot(plans, len(PUSHES)).float().unsqueeze(1)
    possible = works.expand(-1, TIMES, -1)[:, torch.arange(TIMES), plans].all(-1).T
    return float(simulate(one_hot, state).masked_fill(~possible, torch.inf).amin(0).mean())


def fit(estimator: gapped.Pathwise | gapped.Score, steps: int, seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    network, data = policy(), torch.Generator().manual_seed(seed)
    optimiser = torch.optim.Adam(network.parameters(), lr=3e-3)
    for _ in range(steps):
        state, works = states(BATCH, data)
        optimiser.zero_grad()
        expected_cost(network, state, works, estimator).backward()
        optimiser.step()
    return network


def train(estimator: gapped.Pathwise | gapped.Score, steps: int, seed: int) -> dict[str, float]:
    network = fit(estimator, steps, seed)
    state, works = test_states()
    with torch.no_grad():
        cost = float(expected_cost(network, state, works, gapped.Exact()))
    return {"cost": cost, "above the best plan": cost - best_cost(state, works)}


def test_states() -> tuple[Tensor, Tensor]:
    return states(500, torch.Generator().manual_seed(1_000_000))


def draw(figure: Any, estimator: gapped.Pathwise | gapped.Score, steps: int, seed: int) -> None:
    """Pucks on their way under the most likely plan: a circle at the start, a cross at the end."""
    from picture import INK, colour_of

    state, works = (part[:24] for part in test_states())
    network = fit(estimator, steps, seed)
    with torch.no_grad():
        logits = logits_of(network, state, works)
        plan = nn.functional.one_hot(logits.masked_fill(~works, -torch.inf).argmax(-1), len(PUSHES)).float()
        ways = torch.stack(path(plan, state), 1)
    axes = figure.subplots()
    colour = colour_of(estimator)
    for way in ways:
        axes.plot(*way.T, ".-", color=colour, linewidth=1, markersize=3)
        axes.plot(*way[0], "o", color=INK, markersize=4)
        axes.plot(*way[-1], "x", color=colour, markersize=7, markeredgewidth=2)
    axes.set_title("24 pucks under their most likely plans:\nfrom the start, a circle, to the end, a cross")
    axes.set_aspect("equal")


def main() -> None:
    estimators = ["gapmax", "gst", "gumbel-softmax", "reinmax", "reinforce", "rloo"]
    arguments = options(__doc__, steps=600, estimators=estimators, family=object).parse_args()
    state, works = test_states()
    nothing = torch.eye(len(PUSHES))[0].expand(1, len(state), TIMES, -1)
    drift = float(simulate(nothing, state).mean())
    print(f"cost of the best plan {best_cost(state, works):.3f}, of doing nothing {drift:.3f}\n")
    compare(train, arguments, draw, 300)


if __name__ == "__main__":
    main()
