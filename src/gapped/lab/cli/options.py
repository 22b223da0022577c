"""Options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Device = Annotated[str, typer.Option(help="auto, cpu or cuda.")]
DataDir = Annotated[
    Path | None, typer.Option(help="Where data sets are looked up first.", show_default=False)
]
TensorBoard = Annotated[bool, typer.Option("--tensorboard", help="Also write TensorBoard event files.")]
Minutes = Annotated[
    float | None,
    typer.Option(
        help="Stop with a checkpoint after so many minutes, exit status 3 (under torchrun, 0); "
        "the same command goes on.",
        show_default=False,
        min=0.0,
    ),
]
Engine = Annotated[str, typer.Option(help="Who trains: local, torchrun or ray. The numbers are the same.")]
RayAddress = Annotated[
    str | None, typer.Option(help="A Ray cluster; one on this machine by default.", show_default=False)
]
RunsPerFleet = Annotated[
    int | None,
    typer.Option(help="At most so many runs train as one program, to split the work.", show_default=False),
]
