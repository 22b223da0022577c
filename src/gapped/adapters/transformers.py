"""A callback for the Trainer of transformers: the temperature by a schedule, and how categories are used."""

from __future__ import annotations

from typing import Any

from transformers import Trainer, TrainerCallback

from gapped.nn.schedules import Schedule
from gapped.nn.usage import Usage


class LayerCallback(TrainerCallback):
    """Sets the temperature of all gapped layers before each step, and logs their use of categories.

    Whenever the Trainer logs a loss, the values of `gapped.nn.Usage` stand beside it, and the temperature as
    `tau`. `LayerCallback(schedule).attach(trainer)` puts it before the Trainer's reporters, such as
    TensorBoard's. Among the Trainer's `callbacks` it comes after them: only the log history has its values.

    Arguments:
        schedule: A schedule of `gapped.nn.schedules`, by the Trainer's global step; None leaves the
            temperature alone.
    """

    def __init__(self, schedule: Schedule | None = None) -> None:
        self.schedule = schedule

    def attach(self, trainer: Trainer) -> LayerCallback:
        """Put this callback before all others of a Trainer, and return it."""
        trainer.callback_handler.callbacks.insert(0, self)
        return self

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.usage, self.tau = Usage(kwargs["model"]), 0.0

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.schedule is not None:
            self.tau = self.schedule.apply(kwargs["model"], state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        if logs is None or "loss" not in logs:
            return
        values = self.usage.read()
        if self.schedule is not None:
            values["tau"] = self.tau
        logs.update(values)
        state.log_history[-1].update(values)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.usage.close()
