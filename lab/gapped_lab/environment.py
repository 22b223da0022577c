"""The device that trains, and what records say about the machine and the code."""

from __future__ import annotations

import os
import platform
import subprocess
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch

from gapped._version import __version__
from gapped.errors import GappedError

# A commit's digits, and as many of them as records hold.
_WHOLE, _DIGITS = 40, 12


def describe(device: torch.device) -> dict[str, str | None]:
    """Versions, hardware and the commit of the code."""
    on_gpu = device.type == "cuda"
    return {
        "gapped": __version__,
        "commit": _commit(),
        "torch": torch.__version__.split("+")[0],
        "device": torch.cuda.get_device_name(device) if on_gpu else f"CPU, {torch.get_num_threads()} threads",
        "python": platform.python_version(),
        "precision": "tf32" if on_gpu else "float32",
    }


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


def _commit() -> str | None:
    """``$GAPPED_COMMIT`` if it is set, else the commit of this package's own checkout, if it is in one.

    A checkout of something else that it is installed or copied into says nothing about this code.
    """
    if commit := os.environ.get("GAPPED_COMMIT"):
        return commit[:_DIGITS] if len(commit) == _WHOLE else commit[:_WHOLE]
    root = Path(__file__).resolve().parents[2]
    # A hook's GIT_DIR would be asked in place of the folder.
    plain = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        if 'name = "gapped"' not in (root / "pyproject.toml").read_text(encoding="utf-8").splitlines():
            return None
        answer = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--show-prefix", f"--short={_DIGITS}", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
            env=plain,
        )
    except (OSError, ValueError, subprocess.SubprocessError):
        return None
    prefix, commit = answer.stdout.split("\n")[:2]
    return commit if not prefix else None
