"""The commands of the laboratory, which `gapped` adds to its own: one file per command."""
