"""The picture of the layers: `python docs/layers.py` writes docs/figures/layers.svg. Lowest layer last."""

from __future__ import annotations

from pathlib import Path

TARGET = Path(__file__).parent / "figures" / "layers.svg"

# What a band is for, and its layers from the highest: name and a few words for each part.
BANDS = (
    (
        "laboratory: gapped.lab",
        (
            (("cli", "one file per command"),),
            (("report", "records to tables and pages"), ("lab", "recipes to records; engines, bench")),
            (("tasks", "models, losses, protocols"),),
            (("fleet", "many runs, one program"), ("data", "data sets")),
            (("records", "JSON lines on disk, and what they hold"),),
        ),
    ),
    (
        "library: torch alone",
        (
            (("diagnostics", "bias and variance of any estimator on any cost"),),
            (("nn", "sampling as a module"), ("distributions", "with rsample")),
            (("registry", "name to estimator"), ("objective", "one expectation")),
            (("pathwise", "the sample carries the gradient"), ("score", "the cost must be known")),
            (("choice", "an index instead of a one-hot vector"),),
            (("kernels", "fused Triton twins"),),
            (("simplex", "normalising, drawing, noise"), ("gradient", "estimated, not differentiable")),
            (("checks", "of arguments"),),
            (("errors", "one error family"),),
        ),
    ),
)

STYLE = """
  text { font: 13px system-ui, "Segoe UI", Roboto, Arial, sans-serif; fill: #5a6575; text-anchor: middle; }
  .name { font-weight: 700; fill: #0072b2; }
  .band { text-anchor: start; font-size: 12px; }
  rect { fill: #0072b2; fill-opacity: 0.07; stroke: #0072b2; stroke-opacity: 0.45; }
  .ground { fill: none; stroke: #a0a1a2; stroke-dasharray: 4 3; }
  @media (prefers-color-scheme: dark) { text { fill: #b4bdc9; } .name { fill: #63b5ec; } }
"""
WIDTH, MARGIN, HEIGHT, SPACE = 640, 16, 40, 6


def box(x: float, y: float, width: float, name: str, words: str) -> str:
    middle = f'x="{x + width / 2:g}"'
    return (
        f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{HEIGHT}" rx="6"/>'
        f'<text class="name" {middle} y="{y + 17:g}">{name}</text>'
        f'<text {middle} y="{y + 32:g}">{words}</text>'
    )


def draw() -> str:
    parts, y = [], 0.0
    for title, layers in BANDS:
        top = y
        y += 26
        for layer in layers:
            width = (WIDTH - 2 * MARGIN - SPACE * (len(layer) - 1)) / len(layer)
            parts += [
                box(MARGIN + i * (width + SPACE), y, width, name, words)
                for i, (name, words) in enumerate(layer)
            ]
            y += HEIGHT + SPACE
        y += SPACE
        size = f'width="{WIDTH - 2}" height="{y - top - 2:g}"'
        parts += [
            f'<rect class="ground" x="1" y="{top + 1:g}" {size} rx="8"/>',
            f'<text class="band" x="{MARGIN}" y="{top + 18:g}">{title}</text>',
        ]
        y += SPACE
    label = 'role="img" aria-label="Layers of gapped, each importing from lower ones only"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y:g}" {label}>'
    return "\n".join([head, f"<style>{STYLE}</style>", *parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    TARGET.write_text(draw(), encoding="utf-8")
