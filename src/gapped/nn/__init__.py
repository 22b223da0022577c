"""Modules that sample or route, `schedules` of their temperature, and `Usage`, which watches them train."""

from gapped.nn import schedules
from gapped.nn.layers import Gate, Mask, Sample
from gapped.nn.quantizers import Quantized, Quantizer
from gapped.nn.router import Routed, Router, SparseMixer
from gapped.nn.usage import Usage

__all__ = [
    "Gate",
    "Mask",
    "Quantized",
    "Quantizer",
    "Routed",
    "Router",
    "Sample",
    "SparseMixer",
    "Usage",
    "schedules",
]


def __dir__() -> list[str]:
    return __all__
