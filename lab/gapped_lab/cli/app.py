"""The commands that the laboratory adds to `gapped`."""

from __future__ import annotations

import typer

from gapped_lab.cli.bench import bench
from gapped_lab.cli.data import data
from gapped_lab.cli.report import report
from gapped_lab.cli.reproduce import RecipesHelp, reproduce

app = typer.Typer()
app.command(cls=RecipesHelp)(reproduce)
for _command in (report, data, bench):
    app.command()(_command)
