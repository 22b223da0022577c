"""The command line: one file per command."""

from gapped.errors import require

require("the gapped command", "typer", "rich")
