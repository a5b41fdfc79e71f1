"""Averages of weights and batch statistics in training."""

import copy

import torch
from torch import Tensor, nn


class Average:
    """Exponential moving average of weights and batch statistics; integer buffers are copied.

    The decay warms up as min(decay, (1 + step) / (10 + step)), as in TensorFlow, so that the first
    weights have no share in the average of a short run. Batch statistics are averaged because the
    last step's statistics do not match the activations of averaged weights.
    """

    def __init__(self, net: nn.Module, decay: float):
        self.decay = decay
        self.net = copy.deepcopy(net).eval().requires_grad_(False)
        pairs = list(zip(self.net.state_dict().values(), net.state_dict().values(), strict=True))
        self.averaged = [pair for pair in pairs if pair[0].is_floating_point()]
        self.copied = [pair for pair in pairs if not pair[0].is_floating_point()]

    @torch.no_grad()
    def update(self, step: int, stride: float = 1.0) -> None:
        """Add the weights after `step`, counted from 0, to the average.

        A step of a shortened training counts as `stride` steps: the average spans the same part of
        the schedule.
        """
        decay = min(self.decay**stride, (1 + step) / (10 + step)) if self.decay else 0.0
        averages, weights = [a for a, _ in self.averaged], [b for _, b in self.averaged]
        lerp = torch._foreach_lerp_  # pyright: ignore[reportPrivateImportUsage]
        lerp(averages, weights, 1 - decay)
        for a, b in self.copied:
            a.copy_(b)


BATCH_NORM = nn.modules.batchnorm._BatchNorm


class RunningStatistics:
    """Updates running statistics with the momentum max(momentum, 1 / (step + 1)) in each step.

    So the initial values have no weight after the first step, and the statistics are the mean of
    all batches for the first 1 / momentum steps. With several forward passes per step, `momentum`
    is the weight of each in the long run. `momentum` None leaves the modules unchanged.

    The modules compute with a constant momentum, because a changing one would be compiled again in
    every step; their update is scaled after the step. Norms that are not in training mode are
    skipped. All state is in the modules, so that a resumed run continues exactly.
    """

    def __init__(self, net: nn.Module, momentum: float | None):
        self.momentum = momentum or 0.0
        modules = net.modules() if momentum else ()
        self.norms = [module for module in modules if isinstance(module, BATCH_NORM)]
        for norm in self.norms:
            norm.momentum = momentum

    @torch.no_grad()
    def before(self, step: int, passes: int = 1) -> None:
        """Call before the forward passes of `step`, counted from 0."""
        self.earlier: list[tuple[Tensor, Tensor]] = []  # each buffer, and its value before the step
        self.share = 1 - (1 - self.momentum) ** passes  # weight of a step in the long run
        if self.share * (step + 1) >= 1:
            return
        for norm in self.norms:
            for buffer in (norm.running_mean, norm.running_var):
                if norm.training and buffer is not None:
                    if step == 0:
                        buffer.zero_()
                    self.earlier.append((buffer, buffer.clone()))

    @torch.no_grad()
    def after(self, step: int) -> None:
        """Call after the forward passes of `step`."""
        for buffer, earlier in self.earlier:
            buffer.copy_(torch.lerp(earlier, buffer, 1 / ((step + 1) * self.share)))
