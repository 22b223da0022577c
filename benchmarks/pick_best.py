"""Choose the best cell of the validation recipes, and write the recipe that tests it on ten seeds.

The choice looks at held-out training images only. Usage:
python benchmarks/pick_best.py results results/answered/better.toml
"""

from __future__ import annotations

import json
import sys
from collections import defaultdict
from pathlib import Path
from statistics import fmean

from gapped.comparison import records
from gapped.comparison.store import atomic_write

METRIC = "validation_negative_elbo"
SETTINGS = ("protocol", "estimator", "options", "tau", "schedule", "learning_rate", "rate_decay")


def best(folder: Path) -> tuple[dict[str, object], float, int]:
    """The settings with the lowest mean over seeds, that mean, and how many cells there were."""
    cells: dict[str, list[float]] = defaultdict(list)
    for record in records.read(folder, records.Record):
        value = record.metrics.get(METRIC)
        if record.split == "validation" and value is not None:
            key = json.dumps({name: getattr(record, name) for name in SETTINGS}, sort_keys=True)
            cells[key].append(value)
    means = {key: fmean(values) for key, values in cells.items()}
    chosen = min(means, key=lambda key: means[key])
    return json.loads(chosen), means[chosen], len(cells)


def recipe(chosen: dict[str, object], mean: float, count: int) -> str:
    """The TOML of the recipe."""

    def inline(table: object) -> str:
        assert isinstance(table, dict)
        return "{ " + ", ".join(f"{k} = {json.dumps(v)}" for k, v in table.items()) + " }"

    lines = [
        f"# The best of {count} cells on held-out training images ({mean:.2f} nats there), on the test set.",
        "# Written by benchmarks/pick_best.py from the records of gap-grid and search.",
        'name = "better"',
        'title = "The best MNIST-VAE at 40 epochs"',
        'task = "vae"',
        f"protocol = {json.dumps(chosen['protocol'])}",
        'data = "mnist"',
        "seeds = 10",
        "",
        "[[cell]]",
        'label = "chosen"',
        f"estimator = {json.dumps(chosen['estimator'])}",
        f"options = {inline(chosen['options'])}",
        f"tau = {chosen['tau']}",
        f"schedule = {inline(chosen['schedule'])}",
        f"rate_decay = {json.dumps(chosen['rate_decay'])}",
        *([f"learning_rate = {chosen['learning_rate']}"] if chosen["learning_rate"] else []),
        "",
        "[quick]",
        "seeds = 1",
        "epochs = 2",
        "train_images = 1000",
        "test_images = 500",
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    folder, target = map(Path, sys.argv[1:3])
    chosen, mean, count = best(folder)
    print(f"best of {count} cells on validation: {mean:.2f} nats, {chosen}")
    with atomic_write(target) as file:
        file.write(recipe(chosen, mean, count).encode())


if __name__ == "__main__":
    main()
