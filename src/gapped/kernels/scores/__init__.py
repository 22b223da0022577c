"""Kernels of the score-function estimators: draws, one-hot rows, scores, and DisARM's pairs on a tree.

- `score_launch`: when the kernels apply, and one function for each.
- `score_kernels`: the kernels.

Each is the twin of a function in plain torch, which calls it where it applies: `draw_independent`,
`one_hot_rows` and `score_product` in `gapped.score`, `DisARMTree.index` and `DisARMTree.gradient`.
"""
