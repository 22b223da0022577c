"""Sampling as modules."""

from gapped.nm_masks import Mask
from gapped.nn.layers import Gate, Sample
from gapped.nn.quantizers import Quantized, Quantizer

__all__ = ["Gate", "Mask", "Quantized", "Quantizer", "Sample"]
