"""The device that trains."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from gapped.errors import GappedError


def pick_device(name: str) -> torch.device:
    """The device called `name`; ``auto`` is the GPU if there is one."""
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in ("cpu", "cuda"):
        raise GappedError(f"device: got {name!r}, expected auto, cpu or cuda")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise GappedError("device: got 'cuda', but torch sees no CUDA device here; use --device cpu")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise GappedError(f"device: got {name!r}, but there are {torch.cuda.device_count()} CUDA devices")
    return device


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make `device` the current one, for streams, captures and kernels; a no-op on a CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
