"""Subsets of small groups, as in N:M masks, and their gradients, in one kernel forward and one backward.

- `mask_launch`: when the kernels apply, and a sample that carries its gradient.
- `mask_operators`: the sample as an operator of compiled programs.
- `mask_kernels`: the kernels, which enumerate the subsets of a group in registers.

The reference is `gapped.subsets.option_table`, with the gapped logits of `gapped.subsets.subset_sampling`.
"""
