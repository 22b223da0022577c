"""Triton kernels: one file for each operation, from kernels to launches to the function that others call.

- `sampling`: samples of the pathwise estimators and their gradients.
- `gates`: gates, one number each.
- `masks`: subsets of small groups, as in N:M masks, and their gradients.
- `subsets`: subsets of longer rows, and the sums over all subsets that their gradients need.
- `tables`: rows of a table that choices select, and the table's gradient.
- `scores`: draws, one-hot rows and gradients of the score-function estimators.

Callers ask `backend`, and for samples `sampling.fused`, whether kernels apply. These two import no Triton;
the files of operations do, and are imported once the answer is yes. All share `primitives`, functions that
kernels call, and `runner`, which divides rows among programs and launches them. Kernels of samples import no
torch, since `gapped.jax` calls them too.
"""
