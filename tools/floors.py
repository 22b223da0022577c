"""Print the lowest version that `pyproject.toml` allows of each dependency, for `make floors` to install."""

from __future__ import annotations

import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
EXTRAS = {".": ("torch", "jax", "compare", "triton"), "lab": ("ray",)}


def floors() -> list[str]:
    """The dependencies of the library, of the laboratory and of `EXTRAS`, each held to its lowest version."""
    needs: list[str] = []
    for folder, extras in EXTRAS.items():
        project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text("utf-8"))["project"]
        needs += project["dependencies"]
        needs += [need for extra in extras for need in project["optional-dependencies"][extra]]
    return [need.replace(">=", "==") for need in needs if not need.startswith("gapped")]


if __name__ == "__main__":
    print(*floors(), sep="\n")
