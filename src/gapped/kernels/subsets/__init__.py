"""Subsets of `k` of `n` elements: samples, marginals, covariances and normalising constants, row by row.

- `subset_launch`: when the kernels apply, and the functions of the law that they compute.
- `subset_kernels`: the kernels. A sample is drawn by rejection; sums over subsets are Fourier sums, so no
  table of elements and sizes exists.

The reference is `gapped.subsets.conditional_bernoulli`, which calls them where they apply.
"""
