"""The blocks that documents may hold: one for each recipe in the records, those derived from several, and
those of a bench."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from gapped.errors import GappedError
from gapped.lab.report.agreement import agreement, failing, listops_agreement, second_look
from gapped.lab.report.bench_blocks import BLOCKS as BENCH
from gapped.lab.report.bench_blocks import render_bench
from gapped.lab.report.better import better
from gapped.lab.report.beyond import advantage, best_temperatures, gap_grid
from gapped.lab.report.conclusions import conclusions
from gapped.lab.report.coupled import coupled_findings
from gapped.lab.report.evidence import Evidence
from gapped.lab.report.headline import demo, headline
from gapped.lab.report.markdown import render_markdown
from gapped.lab.report.noise import variance
from gapped.lab.report.speed import speed
from gapped.lab.report.trees import latent_trees, listops


@dataclass(frozen=True)
class Derived:
    """A block made of the records of several recipes, all of which must be there."""

    make: Callable[[Evidence], str]
    needs: tuple[str, ...]


PUBLISHED = ("ablation", "vae", "mixed-temperature")

# A derived block goes before the plain one of a recipe with the same name.
DERIVED = {
    "demo": Derived(demo, ("compare",)),
    "headline": Derived(headline, ("vae",)),
    "agreement": Derived(agreement, PUBLISHED),
    "listops-agreement": Derived(listops_agreement, ("listops",)),
    "failing": Derived(failing, ("vae", "ablation")),
    "variance-ranges": Derived(variance, ("variance",)),
    "speed": Derived(speed, ()),
    # These say so where there are no such records yet.
    "listops": Derived(listops, ()),
    "latent-trees": Derived(latent_trees, ()),
    "advantage": Derived(advantage, ("zoo",)),
    "best-temperatures": Derived(best_temperatures, ("zoo",)),
    "gap-grid-best": Derived(gap_grid, ("gap-grid",)),
    "second-look": Derived(second_look, (*PUBLISHED, "second-look")),
    "better": Derived(better, ("better", "gap-grid", "search", "vae", "zoo", "variance")),
    "coupled-findings": Derived(coupled_findings, ("coupled",)),
    "conclusions": Derived(
        conclusions, (*PUBLISHED, "zoo", "variance", "efficiency", "better", "gap-grid", "search")
    ),
}

# Recipes whose tables a document may hold before they have been run, and what is made of them.
AWAITED = {"coupled": "coupled", "coupled-own": "coupled-own", "coupled-findings": "coupled"}


def known_blocks(evidence: Evidence) -> list[str]:
    """The names that these records can fill."""
    held = evidence.recipes()
    derived = [name for name, one in DERIVED.items() if set(one.needs) <= set(held)]
    bench = BENCH if evidence.bench else ()
    return [*held, *(name for name in derived if name not in held), *bench]


def render_block(evidence: Evidence, name: str) -> str:
    """The text of a block."""
    if name in BENCH:  # a document may hold it before anything is measured
        return render_bench(evidence.bench, name)
    if name in AWAITED and AWAITED[name] not in evidence.recipes():
        return f"Not run yet: `gapped reproduce {AWAITED[name]}` makes the records.\n"
    if name not in known_blocks(evidence):
        known = ", ".join(known_blocks(evidence))
        raise GappedError(f"records:{name}: no such block, expected one that these records fill: {known}")
    one = DERIVED.get(name)
    if one is not None and set(one.needs) <= set(evidence.recipes()):
        try:
            return one.make(evidence)
        except GappedError:
            raise
        except (LookupError, TypeError, ValueError) as problem:
            raise GappedError(
                f"records:{name}: the records lack runs or curves that it tells of"
            ) from problem
    return render_markdown(evidence.records, name)
