"""Kernels of gates: one number read and one written forward, two read and one written backward.

- `gate_launch`: a gate that carries its gradient.
- `gate_kernels`: the kernels. Noise is a function of a key and of the gate's number, so the backward pass
  draws it again, and nothing is kept beside the logits and the key.

They are the twin of `Pathwise.gate` in plain torch, which calls them where they apply.
"""
