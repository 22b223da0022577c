"""Kernels of flows between categories: the Laplacian system that MVE solves for each row.

- `flow_launch`: when they apply, and the gradient of a sample's logits.
- `flow_kernels`: the kernel. A program holds the weights between all categories of its rows.

They are the twin of the product in `gapped.pathwise.mve`, which calls them where they apply.
"""
