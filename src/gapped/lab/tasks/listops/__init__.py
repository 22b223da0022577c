"""ListOps: a tree-LSTM that must find the parse of its input by itself."""
