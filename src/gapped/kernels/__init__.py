"""Triton kernels, one folder per operation; Triton itself is imported only when a kernel is launched.

- `sampling`: samples of the pathwise estimators and their gradients.
- `masks`: subsets of small groups, as in N:M masks, and their gradients.
- `flows`: the gradient of MVE, which solves a system for each row.
- `gating`: gates, one number each.
- `scores`: draws, one-hot rows and gradients of the score-function estimators.

Each folder has its kernels, their launcher, and says where the reference in plain torch is. They share
`primitives` (functions called inside of kernels) and `runner` (grids, block sizes, launches).
"""
