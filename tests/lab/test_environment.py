"""The device that trains, by name."""

from __future__ import annotations

import pytest
import torch

from gapped.errors import GappedError
from gapped_lab.environment import pick_device

CPU = torch.device("cpu")


def test_devices():
    assert pick_device("cpu") == CPU
    assert pick_device("auto").type in ("cpu", "cuda")
    for name in ("gpu", "mps", "", "cuda:x", "meta"):
        with pytest.raises(GappedError, match=f"device: got '{name}', expected auto, cpu or cuda"):
            pick_device(name)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_no_cuda():
    with pytest.raises(GappedError, match="torch sees no CUDA device here; use --device cpu"):
        pick_device("cuda")
