"""Files of JSON lines as plain objects, without the checks of `gapped.lab.records`."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def load(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text("utf-8").splitlines()] if path.exists() else []


def append(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
