"""What is done with one batch when a network is measured? Inference, or a training step with all its parts."""

import copy
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.nets import fused_form
from fullstride.nets.backbone import Backbone
from fullstride.nets.network import Network

Precision = Literal["float32", "bfloat16", "float16"]
Layout = Literal["nchw", "nhwc"]
Work = Literal["inference", "training"]
Efficiency = Literal[
    "plain", "lean", "compiled"
]  # how a network trains; compiled: lean, and by torch.compile

SHORT: dict[str, Precision] = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
LR = 1e-3  # small: random targets must not lead anywhere


def find_precision(word: str) -> Precision:
    """bf16 and bfloat16 are the same."""
    for short, whole in SHORT.items():
        if word in (short, whole):
            return whole
    raise ValueError(f"precision {word!r}: use {', '.join(SHORT)}")


def lean_form(net: nn.Module, name: str = "this network") -> Network:
    """A copy that trains lean. Raises ValueError for a network that is not ours."""
    copied = copy.deepcopy(net)
    if isinstance(copied, Network) and copied.is_fused:
        return copied
    return fused_form.fused(copied, name)


class Step:
    """One batch of random images that are on the device already, through a copy of a network: calling it does the work.

    Inference converts the whole network to `precision`. Training is a real step: forward and loss, under autocast
    where `precision` is a short one, backward, scaled for float16, SGD with momentum, and gradients set to none.
    Compiled, a `Network` trains as a recipe compiles it, and another network by torch.compile alone. An `efficiency`
    other than plain is for training.
    """

    def __init__(
        self,
        net: nn.Module,
        work: Work,
        batch: int,
        resolution: int,
        device: torch.device,
        in_channels: int = 3,
        *,
        precision: Precision = "float32",
        layout: Layout = "nchw",
        compiled: bool = False,
        efficiency: Efficiency = "plain",
    ):
        self.device, self.work, self.dtype = device, work, getattr(torch, precision)
        self.format = {"nchw": torch.contiguous_format, "nhwc": torch.channels_last}[layout]
        self.shape = batch, in_channels, resolution, resolution
        kept = torch.float32 if self.trains else self.dtype
        own = copy.deepcopy(net) if efficiency == "plain" else lean_form(net)
        self.net = own.train(self.trains).to(device, kept).to(memory_format=self.format)
        self.is_compiled = compiled or efficiency == "compiled"
        self.forward = self.compiled() if self.is_compiled else self.net
        self.optimizer = (
            torch.optim.SGD(self.net.parameters(), lr=LR, momentum=0.9) if self.trains else None
        )
        self.scaler = torch.amp.GradScaler(
            device.type, enabled=self.trains and precision == "float16"
        )
        self.images: Tensor | None = self.random_images()
        self.targets: Tensor | None = (
            None  # made by the first call, which shows how many classes there are
        )

    @property
    def trains(self) -> bool:
        return self.work == "training"

    @property
    def efficiency(self) -> Efficiency:
        if not (self.trains and isinstance(self.net, Network)) or not self.net.is_fused:
            return "plain"
        return "compiled" if self.is_compiled else "lean"

    def compiled(self) -> Callable[..., Any]:
        if not (self.trains and isinstance(self.net, Network)):
            return torch.compile(self.net, dynamic=False)
        from fullstride.nets.compile import compile_for_training  # takes seconds to import

        operators = self.net.custom_operators
        result = compile_for_training(self.net, dynamic=False, operators=operators)
        if result.reason:
            warnings.warn(f"compiled without recomputation: {result.reason}", stacklevel=2)
        return result.call

    def random_images(self) -> Tensor:
        if own := getattr(
            self.net, "random_images", None
        ):  # what another engine runs has its own idea of an image
            return own(self.shape[0], self.shape[2])
        images = torch.randn(
            self.shape, device=self.device, dtype=torch.float32 if self.trains else self.dtype
        )
        return images.contiguous(memory_format=self.format)

    def __call__(self) -> Tensor:
        """The logits, or the loss."""
        assert self.images is not None
        if self.optimizer is None:
            with torch.inference_mode():
                return self.forward(self.images)
        with torch.autocast(self.device.type, self.dtype, enabled=self.dtype != torch.float32):
            # masks are drawn outside of what may be compiled, as in training
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
        """What stays on the device between two calls, but for the images."""
        slots = self.optimizer.state.values() if self.optimizer else ()
        momenta = [value for slot in slots for value in slot.values() if isinstance(value, Tensor)]
        return [*self.net.parameters(), *self.net.buffers(), *momenta]

    def held(self) -> list[Tensor]:
        return self.state() if self.images is None else [*self.state(), self.images]

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Alone on a GPU, as the largest batch needs it to be: the state comes for the turn and leaves behind it."""
        if self.device.type == "cpu":
            yield
            return
        self.move(self.device)
        self.images = self.random_images()
        self()  # not counted: it takes memory that the one before gave back
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
    """Room for many networks of one class: beyond some graphs of one code, torch.compile goes on without a word."""
    if not compiled:
        yield
        return
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=256, fail_on_recompile_limit_hit=True):
        yield


@contextmanager
def exact_float32() -> Iterator[None]:
    """No TF32. Algorithms are chosen by trial, which pays because shapes do not change."""
    before = torch.get_float32_matmul_precision()
    try:
        torch.set_float32_matmul_precision("highest")
        with torch.backends.cudnn.flags(
            enabled=True, benchmark=True, deterministic=False, allow_tf32=False
        ):
            yield
    finally:
        torch.set_float32_matmul_precision(before)
