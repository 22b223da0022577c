"""What a loaded set of images is."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch


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

    def limited(self, train: int | None, test: int | None, *, validation: bool = False) -> Dataset:
        """The first `train` and `test` images of each split, all if None.

        With `validation`, the last sixth of the training images takes the place of the test images: what
        is chosen by it has not seen the test set.
        """
        data = self
        if validation:
            cut = len(self.train) * 5 // 6
            data = replace(
                self,
                train=self.train[:cut],
                train_labels=self.train_labels[:cut],
                test=self.train[cut:],
                test_labels=self.train_labels[cut:],
            )
        return replace(
            data,
            train=data.train[:train],
            train_labels=data.train_labels[:train],
            test=data.test[:test],
            test_labels=data.test_labels[:test],
        )
