"""A machine whose speed a test sets, by a clock that it moves on."""

import time

from fullstride.train.loop import Trainer


class Machine:
    """A clock that only training moves on, by seconds that depend on the number of the step."""

    def __init__(self, monkeypatch, step_s):
        self.now, self.steps, self.rates = 0.0, 0, []
        step = Trainer.step

        def timed(trainer, x, targets, number, indices=None):
            loss = step(trainer, x, targets, number, indices)
            self.now += step_s(self.steps) * (x.shape[-1] / 16) ** 2
            self.steps += 1
            self.rates.append(trainer.optimizer.param_groups[0]["lr"])
            return loss

        monkeypatch.setattr(Trainer, "step", timed)
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)
