"""Two ranks that train one layer with a router under DDP, each on its half of the tokens.

Run as ``python router_ranks.py FOLDER``: each writes its losses, gradients and means to a file of its own,
with those that one process has for all tokens.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from conftest import normal, seeded
from subprocesses import fork_ranks
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from gapped.nn import Router

D, E, N, WORLD = 4, 5, 3, 2


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = Router(D, E, others="mean", group=distributed.group.WORLD)
        self.experts = torch.nn.ModuleList(torch.nn.Linear(D, D) for _ in range(E))

    def forward(self, x: Tensor, generator: torch.Generator) -> tuple[Tensor, Any]:
        route = self.router(x, None, generator)
        return route.run(self.experts, x), route


def main(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    how: dict[str, Any] = {"rank": rank, "world_size": WORLD, "timeout": timedelta(seconds=60)}
    distributed.init_process_group("gloo", init_method=f"file://{folder / 'store'}", **how)
    torch.manual_seed(0)
    layer = Layer().double()
    hidden = normal(WORLD, N, D)
    # With fewer tokens than experts, a rank still takes part in the gradient of every expert.
    parallel = DistributedDataParallel(layer)
    y, route = parallel(hidden[rank], seeded(rank))
    means = layer.router.means.clone()
    (y.square().mean() + route.balance).backward()
    found: dict[str, Any] = {"gradients": [p.grad for p in layer.parameters()], "means": means}

    # One process: the choices and results of both ranks.
    routes = [layer.router(hidden[each], None, seeded(each)) for each in range(WORLD)]
    index = torch.cat([each.index for each in routes]).squeeze(-1)
    tokens = hidden.flatten(0, 1)
    results = torch.stack([layer.experts[e](x) for e, x in zip(index.tolist(), tokens, strict=True)])
    is_used = torch.stack([(index == e).any() for e in range(E)])
    sums = torch.zeros(E, D).double().index_add(0, index, results.detach())
    found["expected means"] = sums / torch.bincount(index, minlength=E).clamp(min=1).unsqueeze(-1)
    share = torch.bincount(index, minlength=E).double() / len(index)
    p = layer.router.projection(tokens).softmax(-1).mean(0)
    found["expected balance"] = torch.autograd.grad(E * (share * p).sum(), layer.router.projection.weight)[0]
    layer.zero_grad()
    y, route = parallel(hidden[rank], seeded(rank))
    # DDP waits for every parameter.
    (route.balance + 0 * y.sum()).backward()
    found["balance"] = layer.router.projection.weight.grad
    found["is even"] = bool(is_used.any()) and all(p.grad is not None for p in layer.parameters())
    torch.save(found, folder / f"{rank}.pt")
    distributed.barrier()


if __name__ == "__main__":
    sys.exit(fork_ranks(main, WORLD))
