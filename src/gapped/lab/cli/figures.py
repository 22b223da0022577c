"""The pictures of the paper that need no training: made by `gapped reproduce figures`."""

from __future__ import annotations

from pathlib import Path

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
    from gapped.lab.report.markdown import write_text
    from gapped.lab.report.terminal import console, say

    screen = console()
    for name, text in figures(quick).items():
        path = folder / name
        same = path.is_file() and path.read_bytes() == text.encode("utf-8")
        if not same:
            write_text(path, text)
        say(screen, f"{'unchanged' if same else 'written'}: {path}")


def figures(quick: bool = False) -> dict[str, str]:
    """The files by name: figures 1 and 2 of the paper, Lemma 1, and a page to try it all on."""
    import numpy as np
    import torch

    from gapped.diagnostics.surrogate_properties import movements, simulated_gaps, surrogates
    from gapped.lab.report.page import render_playground
    from gapped.lab.report.triangle import Cloud, draw_gaps, draw_movements, draw_samples
    from gapped.pathwise.gst import GST
    from gapped.pathwise.gumbel_rao import GumbelRao
    from gapped.pathwise.gumbel_softmax import GumbelSoftmax
    from gapped.simplex import expected_gap

    generator = torch.Generator().manual_seed(SEED)
    count = 100 if quick else 400
    stgs, stgs_points = surrogates(GumbelSoftmax(TAU), LOGITS, count, generator)
    rao, rao_points = surrogates(GumbelRao(TAU, samples=SAMPLES), LOGITS, count // 2, generator)
    gst, gst_points = surrogates(GST(TAU, gap=GAP), LOGITS, count, generator)
    stops = movements(GST(TAU, gap=GAP), LOGITS)
    clouds = [
        Cloud("STGS", stgs, stgs_points.mean(0)),
        Cloud(f"GR-MC{SAMPLES}", rao, rao_points.mean(0), rao_points[:, 0]),
        Cloud(f"GST-{GAP:.1f}", gst, gst_points.mean(0)),
    ]
    setting = f"logits {', '.join(f'{x:g}' for x in LOGITS)}, temperature {TAU:g}, gap {GAP:g}"
    gaps = simulated_gaps(PROBABILITIES, 300 if quick else 3000, generator)
    p = np.linspace(0.0, 0.985, 198)
    curve = expected_gap(torch.from_numpy(p)).numpy()
    contents = (
        draw_samples(clouds, stops, f"Soft samples of STGS, GR-MC and GST: {setting}"),
        draw_movements(stops, f"The movements m1 and m2 of GST: {setting}"),
        draw_gaps(np.array(PROBABILITIES), gaps, (p, curve)),
        render_playground(LOGITS, TAU, GAP, SAMPLES),
    )
    return dict(zip(PICTURES, contents, strict=True))
