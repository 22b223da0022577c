"""What a loaded set of images is."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["Dataset"]


@dataclass(frozen=True, eq=False)
class Dataset:
    """Images with labels, split into train and test, as the bytes that the files hold.

    `train` and `test` are uint8 of shape (N, height * width), row-major; labels are int64 of shape (N,).
    A pixel p stands for the grey level p / scale in [0, 1]. Binarising and the dtype of the model are the
    task's choice, so bytes stay bytes here: all of MNIST is 55 MB on a device.
    """

    name: str
    train: torch.Tensor
    test: torch.Tensor
    train_labels: torch.Tensor
    test_labels: torch.Tensor
    height: int
    width: int
    scale: int
