"""Toy recipes, records and data sets that several test files share, and the place of the real data sets."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from gapped.lab.data.images import IdxFile, IdxSource

# Looked up before a test hides the environment.
REAL_DATA = Path(
    os.environ.get("GAPPED_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data"
).expanduser()

RECIPE = """
name = "toy"
task = "vae"
protocol = "digits-8x8"
data = "digits"
train_images = 100
test_images = 30
epochs = {epochs}
seeds = {seeds}

[[cell]]
label = "GST"
estimator = "gst"

[[cell]]
label = "GST-pi"
estimator = "gst:gap=expected"
"""


def toy_recipe(folder: Path, epochs: int = 1, seeds: int = 1) -> str:
    """The path of a recipe with two estimators, on a hundred digits."""
    path = folder / "toy.toml"
    path.write_text(RECIPE.format(epochs=epochs, seeds=seeds))
    return str(path)


def many(label: str, values: list[float | None], **fields: Any) -> list[dict[str, Any]]:
    """Records of one cell, as the laboratory writes them: a run for each value, None where it diverged."""
    environment = {
        "gapped": "0.1.0",
        "commit": "1a2b3c4",
        "torch": "2.11.0",
        "device": "CPU",
        "python": "3.12",
    }
    cell = {
        "schema": 1,
        "recipe": "compare",
        "task": "vae",
        "protocol": "digits",
        "label": label,
        "estimator": "gst",
        "options": {"gap": 1.0},
        "tau": 0.5,
        "epochs": 20,
        "seconds": 30.0,
        "runs_in_fleet": 15,
        "environment": environment,
        **fields,
    }
    return [
        {
            **cell,
            "id": f"{cell['recipe']}/{cell['protocol']}/{label}/{cell['tau']}/{seed}",
            "seed": seed,
            "status": "diverged" if value is None else "ok",
            "metrics": {"test_negative_elbo": value},
        }
        for seed, value in enumerate(values)
    ]


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """The single line on standard error that a user error gives."""
    output = capsys.readouterr()
    assert re.fullmatch(r"gapped: [^\n]+\n", output.err), output.err
    assert "Traceback" not in output.out + output.err
    return output.err


MIRRORS = ("https://mirror.invalid/tiny/", "https://second.invalid/tiny/")


def encode_idx(values: torch.Tensor) -> bytes:
    """An idx file, written independently of the parser."""
    header = struct.pack(">HBB", 0, 8, values.dim()) + b"".join(struct.pack(">I", n) for n in values.shape)
    return header + bytes(values.flatten().tolist())


def _tiny_images() -> tuple[IdxSource, dict[str, bytes]]:
    g = torch.Generator().manual_seed(1)
    shapes = {"train": (6, 2, 4), "train_labels": (6,), "test": (3, 2, 4), "test_labels": (3,)}
    files, contents = [], {}
    for role, shape in shapes.items():
        raw = encode_idx(torch.randint(0, 10, shape, generator=g, dtype=torch.uint8))
        md5 = hashlib.md5(gzip.compress(raw, mtime=0)).hexdigest()
        files.append(IdxFile(f"{role}-idx", shape, md5, sha256=hashlib.sha256(raw).hexdigest()))
        contents[f"{role}-idx"] = raw
    return IdxSource("tiny", "for tests", MIRRORS, tuple(files)), contents


# A set of 6 + 3 images of 2x4, and the unpacked content of its files.
TINY_IMAGES, TINY_CONTENTS = _tiny_images()


def put_tiny_images(folder: Path, packed: bool = False) -> None:
    """Write the files of `TINY_IMAGES`."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, raw in TINY_CONTENTS.items():
        path = folder / (f"{name}.gz" if packed else name)
        path.write_bytes(gzip.compress(raw) if packed else raw)
