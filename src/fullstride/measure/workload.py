"""Defines the work timed on one batch: inference or a complete training step."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.nets import padding
from fullstride.nets.backbone import Backbone, batch_shape, channels_last
from fullstride.nets.blocks import merge_branches
from fullstride.nets.efficiency import SPELLINGS, Efficiency, TrainingForm, is_compiled
from fullstride.nets.layers import avoid_strided_pointwise
from fullstride.nets.network import Network

Precision = Literal["float32", "bfloat16", "float16"]
Layout = Literal["nchw", "nhwc"]
Work = Literal["inference", "training"]

LR = 1e-3  # small, so that weights stay finite with random targets


def find_precision(name: str) -> Precision:
    """Find the precision for a name such as bf16 or bfloat16. Raises ValueError for other names."""
    for precision in get_args(Precision):
        if name in (precision, SPELLINGS[precision]):
            return precision
    raise ValueError(f"precision {name!r}: use {', '.join(SPELLINGS.values())}")


def in_training_form(net: Backbone, form: TrainingForm, name: str = "this network") -> Backbone:
    """Regularise and pad the network as for training, in place unless it is padded.

    Raises ValueError, with `name`, for a form that the network does not have.
    """
    net.regularise(drop_path=form.drop_path, by=form.drop_path_by, dropout=form.dropout)
    return padding.to_padded(net, name) if form.padded else net


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """Precision, layout and modules of a call."""

    precision: Precision = "float32"
    layout: Layout = "nchw"  # memory format of images and activations
    # Use torch.compile, with recomputation for training a `Network`.
    compiled: bool = False
    efficiency: Efficiency = "plain"  # how a training step is computed, as in a recipe


EAGER = StepOptions()


class Step:
    """A call that runs a copy of a network on one batch of random images on the device.

    Inference merges branches that only training needs (see `merge_branches`) and converts the whole
    network to the precision. Training is a complete step: forward and loss, under autocast for the
    16-bit precisions, backward, with a gradient scaler for float16, SGD with momentum, and
    gradients set to None.
    """

    def __init__(
        self,
        net: nn.Module,
        work: Work,
        batch: int,
        resolution: int,
        device: torch.device,
        in_channels: int = 3,
        options: StepOptions = EAGER,
    ):
        compiled, efficiency = options.compiled, options.efficiency
        self.device, self.work, self.dtype = device, work, getattr(torch, options.precision)
        self.shape = batch_shape(net, batch, in_channels, resolution)
        last = channels_last(len(self.shape))
        self.format = {"nchw": torch.contiguous_format, "nhwc": last}[options.layout]
        dtype = torch.float32 if self.trains else self.dtype
        own = copy.deepcopy(net)
        own = own if self.trains else merge_branches(own)
        if self.trains and device.type == "cpu":
            avoid_strided_pointwise(own)
        self.net = own.train(self.trains).to(device, dtype).to(memory_format=self.format)
        # An exported file always runs in its own runtime.
        self.is_compiled = (compiled or is_compiled(efficiency)) and not hasattr(net, "runtime")
        self.recomputes = is_compiled(efficiency) or compiled and isinstance(net, Network)
        self.recomputes &= self.trains
        self.forward = self.compile() if self.is_compiled else self.net
        self.optimizer = (
            torch.optim.SGD(self.net.parameters(), lr=LR, momentum=0.9) if self.trains else None
        )
        self.scaler = torch.amp.GradScaler(
            device.type, enabled=self.trains and self.dtype == torch.float16
        )
        self.images: Tensor | None = self.random_images()
        self.targets: Tensor | None = None  # the first call, which knows the classes, draws them

    @property
    def trains(self) -> bool:
        return self.work == "training"

    @property
    def efficiency(self) -> Efficiency:
        """How a step trains; plain for inference and torch.compile without recomputation."""
        return "plain_compiled" if self.recomputes else "plain"

    def compile(self) -> Callable[..., Any]:
        if not self.recomputes:
            return torch.compile(self.net, dynamic=False)
        from fullstride.nets.compile import compile_for_training  # takes seconds to import

        return compile_for_training(self.net, dynamic=False)

    def random_images(self) -> Tensor:
        # An exported file decides the type and layout of its input.
        if own := getattr(self.net, "random_images", None):
            return own(self.shape[0], self.shape[-1])
        images = torch.randn(
            self.shape, device=self.device, dtype=torch.float32 if self.trains else self.dtype
        )
        return images.contiguous(memory_format=self.format)

    def __call__(self) -> Tensor:
        """Run the work; return the logits or the loss."""
        assert self.images is not None
        if self.optimizer is None:
            with torch.inference_mode():
                return self.forward(self.images)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            # masks are drawn outside the compiled network, as in training
            masks = (self.net.draw(len(self.images)),) if isinstance(self.net, Backbone) else ()
            logits = self.forward(self.images, *masks).float()
            if self.targets is None:
                self.targets = torch.randint(logits.shape[1], (len(logits),), device=self.device)
            loss = F.cross_entropy(logits, self.targets)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return loss.detach()

    def state(self) -> list[Tensor]:
        """The tensors that stay on the device between calls, without the images."""
        slots = self.optimizer.state.values() if self.optimizer else ()
        momenta = [value for slot in slots for value in slot.values() if isinstance(value, Tensor)]
        return [*self.net.parameters(), *self.net.buffers(), *momenta]

    def resident(self) -> list[Tensor]:
        return self.state() if self.images is None else [*self.state(), self.images]

    @contextmanager
    def on_device(self) -> Iterator[None]:
        """Move the state to the GPU within the block, where the largest batch needs all memory."""
        if self.device.type == "cpu":
            yield
            return
        self.move(self.device)
        self.images = self.random_images()
        self()  # not timed: it allocates again the memory that `leave` freed
        torch.cuda.synchronize(self.device)
        try:
            yield
        finally:
            self.leave()

    def leave(self) -> None:
        if self.device.type != "cpu":
            self.images = None
            self.move(torch.device("cpu"))
            torch.cuda.empty_cache()

    def move(self, device: torch.device) -> None:
        for tensor in self.state():
            tensor.data = tensor.data.to(device)


@contextmanager
def compiling(compiled: bool) -> Iterator[None]:
    """Allow many compiled networks of one class: above its limit, torch.compile runs eagerly."""
    if not compiled:
        yield
        return
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=256, fail_on_recompile_limit_hit=True):
        yield


@contextmanager
def exact_float32() -> Iterator[None]:
    """Disable TF32, and enable cuDNN's benchmark mode, which pays because shapes are constant."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=True, deterministic=False, allow_tf32=False
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
