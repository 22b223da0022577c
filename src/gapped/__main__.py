"""The `gapped` command, and `python -m gapped`."""

from __future__ import annotations

import sys

from gapped.errors import MissingExtra


def main() -> None:
    """Run the command line, or say in one line which packages it lacks."""
    try:
        from gapped.cli.app import entry
    except MissingExtra as problem:
        print(f"gapped: {problem}", file=sys.stderr)
        sys.exit(2)
    entry()


if __name__ == "__main__":
    main()
