"""Layers with a run axis against `torch.nn.Linear`."""

from __future__ import annotations

import math

import pytest
import torch
from conftest import assert_close
from torch import nn
from toy_tasks import vae_task

from gapped_lab.fleet.run_layers import Linear, generators


def plain_linear(seed: int, *shapes: tuple[int, int]) -> list[nn.Linear]:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return [nn.Linear(a, b) for a, b in shapes]


def test_layers_start_as_torch_s_do_from_each_run_s_own_seed():
    seeds, shapes = [3, 11, 4], [(20, 30), (30, 5)]
    runs = generators(seeds)
    layers = [Linear(a, b, runs) for a, b in shapes]
    for place, seed in enumerate(seeds):
        for mine, theirs in zip(layers, plain_linear(seed, *shapes), strict=True):
            # torch rounds the bound twice more on its way: one unit in the last place.
            assert_close(mine.weight[place].t(), theirs.weight, 2e-7)
            assert_close(mine.bias[place, 0], theirs.bias, 2e-7)
    other = plain_linear(5, *shapes)[0]
    assert not torch.allclose(layers[0].weight[0].t(), other.weight, atol=1e-2)


def test_initial_weights_do_not_depend_on_the_neighbours():
    alone = vae_task(seeds=[9]).model.state_dict()
    among = vae_task(seeds=[2, 9, 5, 9]).model.state_dict()
    for name, weight in alone.items():
        assert torch.equal(weight[0], among[name][1]), name
        assert torch.equal(weight[0], among[name][3]), name
        assert not torch.equal(weight[0], among[name][0]), name


def test_glorot_weights():
    layer = Linear(300, 50, generators([1]), glorot=True)
    bound = math.sqrt(6 / 350)
    assert (layer.bias == 0).all()
    assert 0.98 * bound < layer.weight.abs().max() <= bound
    assert layer.weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)
