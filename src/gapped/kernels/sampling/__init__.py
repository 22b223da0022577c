"""Samples of the pathwise estimators and their gradients, in one kernel forward and one backward.

- `fused`: an estimator as the kernels know it, and when they can sample by it.
- `launch`: launches, and a sample that carries its gradient.
- `operators`: the sample as an operator of compiled programs.
- `layout`: where rows lie in memory, one after the other or side by side.
- `short`: rows of up to 4,096 categories, each in one block.
- `long`: longer rows, each read in chunks by one program or shared by several.
- `strips`: long rows that lie side by side.
- `rao`: Gumbel-Rao and ReinMax-Rao once the category is drawn.
- `surrogates`: functions that these kernels and those of gates share.

The reference is the estimator itself: the methods `draw_category` and `points` of its file in
`gapped.pathwise`, with the backward pass of `gapped.gradient.with_points`.
"""
