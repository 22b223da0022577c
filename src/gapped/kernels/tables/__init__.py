"""Rows of a table that choices select, and the gradient of the table: one kernel each.

- `table_launch`: when the kernels apply, the selected rows, and the sums of gradients.
- `table_kernels`: the kernels.

The reference is in `gapped.choice`, which calls them where they apply.
"""
