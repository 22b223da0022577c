"""Samples of the pathwise estimators and their gradients, in one kernel forward and one backward.

- `launch`: when the kernels apply, and a sample that carries its gradient; `long_launch` for long rows.
- `row_layout`: where rows lie in memory, one after the other or side by side.
- `operators`: the sample as an operator of compiled programs.
- `short_rows`: rows of up to 4,096 categories, each in one block.
- `long_rows`: longer rows, each read in chunks by one program.
- `split_rows`: the backward pass of long rows, each split over several programs.
- `log_prob_rows`: the gradient of a log-probability, for long rows.
- `strips`, `strip_tiles`: long rows that lie side by side; with `tile_order`, which programs of the backward
  pass come before others, and `strip_sizes`, all that can be tuned.
- `surrogates`: what the kernels of short and long rows share.
- `rao_rows`, `rao_chunks`: Gumbel-Rao once the category is drawn, for short and for long rows; with
  `rao_weights`, its noise and weights, and `rao_sizes`, all that can be tuned. `rao_rows` is ReinMax-Rao too.
- `flow_rows`: the backward pass of MVE, which solves a system for each row; with `flow_sizes`, all that can
  be tuned.

The reference is the estimator itself: the methods `draw_category` and `points` of its file in
`gapped.pathwise`, with the backward pass of `gapped.gradient.with_points`.
"""
