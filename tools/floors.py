"""Print the lowest version that `pyproject.toml` allows of each dependency, for `make floors` to install."""

from __future__ import annotations

import tomllib
from pathlib import Path

EXTRAS = ("jax", "lab", "ray", "triton")


def floors() -> list[str]:
    """The dependencies of the core and of `EXTRAS`, each held to its lowest version."""
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text("utf-8"))["project"]
    extras = [need for extra in EXTRAS for need in project["optional-dependencies"][extra]]
    return [need.replace(">=", "==") for need in project["dependencies"] + extras]


if __name__ == "__main__":
    print(*floors(), sep="\n")
