"""Triton kernels, one folder per operation; Triton itself is imported only when a kernel is launched.

- `sampling`: samples of the pathwise estimators and their gradients.
- `masks`: subsets of small groups, as in N:M masks, and their gradients.
- `subsets`: subsets of longer rows, and the sums over all subsets that their gradients need.
- `tables`: rows of a table that choices select, and the table's gradient.
- `gating`: gates, one number each.
- `scores`: draws, one-hot rows and gradients of the score-function estimators.

Each folder has its kernels, their launcher, and says where the reference in plain torch is. They share
`primitives` (functions called inside of kernels), `partition` (grids and block sizes) and `runner`
(launches). Only what launches imports torch, since `gapped.jax` calls the kernels too.
"""
