"""The pictures of the paper that need no training: made by `gapped reproduce figures`."""

from __future__ import annotations

from pathlib import Path

from gapped.errors import printable

FIGURES = "figures"
"""The name under which `gapped reproduce` knows them."""
PICTURES = ("simplex-samples.svg", "simplex-movements.svg", "expected-gap.svg", "simplex.html")

# The logits of the top, left and right category; at temperature 1 every movement starts at p itself.
LOGITS = (0.8, 0.1, -0.5)
TAU, GAP, SAMPLES = 1.0, 1.0, 100
PROBABILITIES = (0.02, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
SEED = 0


def draw_figures(folder: Path, quick: bool) -> None:
    """Write all of them into `folder`, and say so."""
    from gapped.lab.report.documents import write

    made = figures(quick)
    for name, text in made.items():
        new = write(folder / name, text)
        print(printable(f"{'written' if new else 'unchanged'}: {folder / name}"))


def figures(quick: bool = False) -> dict[str, str]:
    """The files by name: figures 1 and 2 of the paper, Lemma 1, and a page to try it all on."""
    import numpy as np
    import torch

    from gapped.diagnostics.scenes import gaps, movements, surrogates
    from gapped.lab.report.playground import render_playground
    from gapped.lab.report.triangle import Cloud, draw_gaps, draw_movements, draw_samples
    from gapped.pathwise.gst import GST
    from gapped.pathwise.gumbel_rao import GumbelRao
    from gapped.pathwise.gumbel_softmax import GumbelSoftmax
    from gapped.simplex import expected_gap

    generator = torch.Generator().manual_seed(SEED)
    count = 100 if quick else 400
    plain = surrogates(GumbelSoftmax(TAU), LOGITS, count, generator)
    rao = surrogates(GumbelRao(TAU, samples=SAMPLES), LOGITS, count // 2, generator)
    gapped = surrogates(GST(TAU, gap=GAP), LOGITS, count, generator)
    stops = movements(GST(TAU, gap=GAP), LOGITS)
    clouds = [
        Cloud("STGS", plain.chosen, plain.points),
        Cloud(f"GR-MC{SAMPLES}", rao.chosen, rao.points, rao.parts[:, 0]),
        Cloud(f"GST-{GAP:.1f}", gapped.chosen, gapped.points),
    ]
    setting = f"logits {', '.join(f'{x:g}' for x in LOGITS)}, temperature {TAU:g}, gap {GAP:g}"
    simulated = gaps(PROBABILITIES, 300 if quick else 3000, generator)
    p = np.linspace(0.0, 0.985, 198)
    curve = expected_gap(torch.from_numpy(p)).numpy()
    made = (
        draw_samples(clouds, stops, f"Soft samples of STGS, GR-MC and GST: {setting}"),
        draw_movements(stops, f"The movements m1 and m2 of GST: {setting}"),
        draw_gaps(simulated.p, simulated.drawn, (p, curve)),
        render_playground(LOGITS, TAU, GAP, SAMPLES),
    )
    return dict(zip(PICTURES, made, strict=True))
