"""`python -m gapped`."""

from gapped.cli.app import entry

entry()
