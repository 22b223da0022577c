"""The picture of the rooms of the package: `python docs/layers.py` writes docs/figures/layers.svg.

The order is computed from the import statements themselves: a room stands above every room that it imports,
but for the uses of a base class, which stand above it.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = (ROOT / "src" / "gapped", ROOT / "lab" / "gapped_lab")
TARGET = Path(__file__).parent / "figures" / "layers.svg"

# Each room in a few words. The modules directly in `gapped_lab/` are one room.
WORDS = {
    "errors": "one error family",
    "docstrings": "arguments described once",
    "texts": "estimators as text",
    "jax": "the same in JAX, no torch",
    "checks": "of arguments",
    "simplex": "softmax, draws, Gumbel noise",
    "gradient": "a value forward, an estimate backward",
    "kernels": "fused Triton kernels",
    "choice": "an index instead of a one-hot",
    "choices": "k of them, for routers",
    "counts": "Poisson, binomial",
    "pathwise": "the sample carries the gradient",
    "score": "the gradient comes from the cost",
    "subsets": "k of n, their law",
    "registry": "estimators by name",
    "sampling": "the front door",
    "objective": "expectation of a cost",
    "drop_in": "in torch's place",
    "gates": "samples of 0 or 1",
    "nn": "sampling as modules",
    "vocabulary": "a choice without logits",
    "rollouts": "texts of a language model",
    "distributions": "with rsample",
    "adapters": "inside other libraries",
    "diagnostics": "bias, variance, properties",
    "comparison": "in a user's own training",
    "cli": "one file per command",
    "lab.records": "lines beside runs, typed",
    "lab.data": "data sets",
    "lab.fleet": "many runs in one program",
    "lab.tasks": "models, losses, protocols",
    "lab.listops": "latent trees, data and task",
    "lab": "recipes, training, storage",
    "lab.engines": "processes here, Ray",
    "lab.bench": "time and memory",
    "lab.report": "tables, figures, pages",
    "lab.cli": "commands of recipes",
}

STYLE = """
  text { font: 13px system-ui, "Segoe UI", Roboto, Arial, sans-serif; fill: #5a6575; text-anchor: middle; }
  .name { font-weight: 700; fill: #0072b2; }
  .band { text-anchor: start; font-size: 12px; }
  rect { fill: #0072b2; fill-opacity: 0.07; stroke: #0072b2; stroke-opacity: 0.45; }
  .ground { fill: none; stroke: #a0a1a2; stroke-dasharray: 4 3; }
  @media (prefers-color-scheme: dark) { text { fill: #b4bdc9; } .name { fill: #63b5ec; } }
"""
WIDTH, MARGIN, HEIGHT, SPACE = 720, 16, 40, 6


def room_of(name: str) -> str | None:
    """The room of a module or of a name in it; None for other packages and for the package itself.

    >>> room_of("gapped.pathwise.gst"), room_of("gapped_lab.fleet.capture"), room_of("gapped_lab.spec")
    ('pathwise', 'lab.fleet', 'lab')
    """
    package, *names = name.split(".")
    if package == "gapped_lab":
        names.insert(0, "lab")
    elif package != "gapped" or not names:
        return None
    inner = ".".join(names[:2])
    return inner if inner in WORDS else names[0] if names[0] in WORDS else None


# Methods of the base class call these rooms, which it does not import itself.
USES = {"pathwise": {"choice", "gates", "registry", "vocabulary"}}


def imports(source: str, module: str, loading: bool = False) -> set[str]:
    """Absolute names of everything that a module imports, wherever in the file the statement stands.

    With `loading`, of what it imports as soon as it is loaded itself.
    """
    names: set[str] = set()
    tree = ast.parse(source)
    for node in tree.body if loading else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                base = ".".join([*module.split(".")[: -node.level], *([base] if base else [])])
            names |= {f"{base}.{alias.name}" for alias in node.names}
    return names


def modules() -> dict[str, str]:
    """The source of each module by dotted name, but for the package's own front door."""
    sources = {}
    for package in PACKAGES:
        for path in sorted(package.rglob("*.py")):
            parts = path.relative_to(package.parent).with_suffix("").parts
            if len(parts) > 2 or not parts[-1].startswith("_"):
                sources[".".join(parts)] = path.read_text("utf-8")
    return sources


def graph(sources: dict[str, str]) -> dict[str, set[str]]:
    """The rooms that each room imports."""
    edges: dict[str, set[str]] = defaultdict(set)
    for module, source in sources.items():
        room = room_of(module)
        if room is None:
            raise ValueError(f"{module}: give its room a line in WORDS of docs/layers.py")
        uses = USES.get(room, set()) - {room_of(name) for name in imports(source, module, loading=True)}
        others = {room_of(name) for name in imports(source, module)} - {None, room} - uses
        edges[room] |= {other for other in others if other is not None}
    return dict(edges)


def layers(edges: dict[str, set[str]]) -> list[list[str]]:
    """The rooms from the lowest layer up, each as low as its imports allow."""
    left, below = dict(edges), []
    while left:
        layer = sorted(room for room, needs in left.items() if not needs & left.keys())
        if not layer:
            raise ValueError(f"these rooms import each other: {', '.join(sorted(left))}")
        below.append(layer)
        left = {room: needs for room, needs in left.items() if room not in layer}
    return below


def box(x: float, y: float, width: float, name: str, words: str) -> str:
    middle = f'x="{x + width / 2:g}"'
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{HEIGHT}" rx="6"/>'
        f'<text class="name" {middle} y="{y + 17:g}">{name}</text>'
        f'<text {middle} y="{y + 32:g}">{words}</text>'
    )


def draw(edges: dict[str, set[str]]) -> str:
    below = layers(edges)
    bands = (
        ("laboratory: gapped_lab", [[r for r in layer if r.startswith("lab")] for layer in reversed(below)]),
        (
            "library: torch alone; gapped.jax: jax alone",
            [[r for r in layer if not r.startswith("lab")] for layer in reversed(below)],
        ),
    )
    shapes, y = [], 0.0
    for title, band in bands:
        top = y
        y += 26
        for layer in filter(None, band):
            width = (WIDTH - 2 * MARGIN - SPACE * (len(layer) - 1)) / len(layer)
            for i, room in enumerate(layer):
                shapes.append(
                    box(MARGIN + i * (width + SPACE), y, width, room.removeprefix("lab."), WORDS[room])
                )
            y += HEIGHT + SPACE
        y += SPACE
        size = f'width="{WIDTH - 2}" height="{y - top - 2:g}"'
        shapes += [
            f'<rect class="ground" x="1" y="{top + 1:g}" {size} rx="8"/>',
            f'<text class="band" x="{MARGIN}" y="{top + 18:g}">{title}</text>',
        ]
        y += SPACE
    label = 'role="img" aria-label="The rooms of gapped; each imports from lower ones only"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:g}" {label}>'
    return "\n".join([head, f"<style>{STYLE}</style>", *shapes, "</svg>"]) + "\n"


if __name__ == "__main__":
    TARGET.write_text(draw(graph(modules())), encoding="utf-8")
