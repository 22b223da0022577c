"""Records as the laboratory writes them, and folders of them, for tests of what is made of records."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np

from gapped.comparison.records import Curve, Record, write
from gapped_lab.records import Images
from gapped_lab.report.paper import paper

ELBO = "test_negative_elbo"
ENVIRONMENT = {
    "gapped": "0.1.0",
    "commit": "1a2b3c4",
    "torch": "2.11.0",
    "device": "NVIDIA H200",
    "python": "3.12.3",
}


def record(label: str, seed: int, value: float | None, **changes: Any) -> Record:
    """One run; without a value, it diverged."""
    fields: dict[str, Any] = {
        "recipe": "compare",
        "task": "vae",
        "protocol": "digits",
        "estimator": "gst",
        "options": {"gap": 1.0},
        "tau": 0.5,
        "status": "ok" if value is not None else "diverged",
        "epochs": 20,
        "metrics": {ELBO: value},
        "seconds": 30.0,
        "runs_in_fleet": 15,
        "environment": ENVIRONMENT,
    } | changes
    name = f"{fields['recipe']}/{fields['protocol']}/{label}/{fields['tau']}/{seed}"
    return Record(**{"id": name, "label": label, "seed": seed} | fields)


def many(label: str, values: list[float | None], **changes: Any) -> list[Record]:
    """Runs of one cell."""
    return [record(label, seed, value, **changes) for seed, value in enumerate(values)]


def run_lines(label: str, values: list[float | None]) -> list[dict[str, Any]]:
    """Runs of one cell as they stand in their file."""
    return [run.to_json() for run in many(label, values)]


def load_json(path: Path) -> list[dict[str, Any]]:
    """A file of JSON lines as plain objects, without the checks of `gapped_lab.records`."""
    return [json.loads(text) for text in path.read_text("utf-8").splitlines()] if path.exists() else []


def append_json(path: Path, objects: Iterable[dict[str, Any]]) -> None:
    """Add JSON lines to a file, also such as `gapped_lab.records` would not write."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(each) + "\n" for each in objects)


def write_compare(folder: Path, seeds: int = 3, quick: bool = True) -> Path:
    """A folder as `gapped compare` leaves it: five estimators, one of whose runs diverged."""
    rng = np.random.default_rng(0)
    levels = {"GST-1.0": 21.0, "ReinMax": 21.3, "STGS": 23.5, "ST": 24.2, "GR-MC10": 23.0}
    epoch = np.arange(1, 21)
    digit = (np.hypot(*np.mgrid[-1:1:8j, -1:1:8j]) < 0.8) * np.linspace(90, 255, 8)
    originals = np.stack([np.roll(digit, i, axis=1) for i in range(10)])
    runs, curves, pictures = [], [], []
    for rank, (label, level) in enumerate(levels.items()):
        for seed in range(seeds):
            series = level + 18 * np.exp(-epoch / 4) + rng.normal(0, 0.15, 20) + rng.normal(0, 0.2)
            lost = label == "ST" and seed == 2
            variance = 1e-5 * (rank + 1) * np.exp(-epoch / 15 + rng.normal(0, 0.1, 20))
            end = float(series[-1])
            metrics = {
                ELBO: None if lost else end,
                "train_negative_elbo": end - 1,
                "gradient_variance": variance[-1],
            }
            run = record(label, seed, None if lost else end, quick=quick, metrics=metrics)
            runs.append(run)
            logged = {
                ELBO: [None if lost and e > 8 else round(float(v), 4) for e, v in enumerate(series, 1)],
                "train_negative_elbo": (series - 1).tolist(),
                "gradient_variance": [None, *variance[1:].tolist()],
            }
            curves.append(Curve(id=run.id, epoch=epoch.tolist(), more=logged))
        noise = {"original": 0, "reconstruction": 12 + 6 * rank, "sample": 40}
        drawings = {
            k: np.clip(originals + rng.normal(0, s, originals.shape) * (s > 0), 0, 255)
            for k, s in noise.items()
        }
        encoded = {k: base64.b64encode(v.astype(np.uint8).tobytes()).decode() for k, v in drawings.items()}
        pictures.append(Images(id=runs[-seeds].id, height=8, width=8, count=10, **encoded))
    for group in (runs, curves, pictures):
        write(folder, group)
    return folder


def write_vae(folder: Path) -> Path:
    """A folder as `gapped reproduce vae` leaves it, drawn around the paper's own numbers."""
    rng = np.random.default_rng(1)
    runs, curves = [], []
    failing = [["GST-1.2", 0.1, 162.0, 9.0], ["GST-1.2", 0.01, 205.9, 0.1]]
    epoch = np.arange(1, 41)
    for label, tau, mean, std in [*paper()["vae"]["rows"], *failing, ["ReinMax", 1.0, 114.0, 0.5]]:
        gap = float(label[4:]) if label[4:].replace(".", "").isdigit() and label.startswith("GST") else None
        settings = {
            "recipe": "vae",
            "protocol": "paper-30x10",
            "tau": tau,
            "estimator": "gst" if gap is not None else "other",
            "options": {"gap": gap} if gap is not None else {},
            "epochs": 40,
            "seconds": 170.0,
            "runs_in_fleet": 240,
        }
        for seed in range(10):
            end = mean + std * rng.standard_normal()
            runs.append(record(label, seed, end, **settings))
            curve = end + 60 * np.exp(-epoch / 5) + 0.3 * rng.standard_normal(40)
            curves.append(Curve(id=runs[-1].id, epoch=epoch.tolist(), more={ELBO: curve.tolist()}))
    write(folder, runs)
    write(folder, curves)
    return folder
