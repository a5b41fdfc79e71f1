"""How does a network give the same answers without its batch norms? Each is folded into the convolution before it."""

from collections import Counter
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fullstride.nets.fused.batch_norm import MagnitudeNorm, gain
from fullstride.nets.network import Network

TOLERANCE = 1e-9  # largest difference of an answer / largest answer, in float64


@dataclass(frozen=True)
class Fold:
    """A network without the batch norms that could be folded. Layers are named by their paths."""

    net: nn.Module
    pairs: Mapping[
        str, str
    ]  # folded batch norm -> the convolution or linear layer that now does its work
    left: Mapping[str, str]  # batch norm that stays -> why


def folded(net: nn.Module, images: Tensor | None = None) -> nn.Module:
    """The network of `fold`."""
    return fold(net, images).net


@torch.no_grad()
def fold(net: nn.Module, images: Tensor | None = None) -> Fold:
    """A copy of `net` for evaluation whose batch norms are folded into what stands before them: equal up to rounding.

    Which belong together is seen while it runs once on `images` (noise, if none are given): a convolution takes in a
    batch norm if its output goes there as it is, and nowhere else. So the way through the layers must be the same
    for all images. All is done in float64, where a mistake cannot pass for rounding, and then rounded once to the
    type of `net`. Raises ValueError if the copy answers differently.
    """
    dtype = next(net.parameters()).dtype
    net = deepcopy(net).eval().double()
    if isinstance(net, Network):
        net.lean(False)  # training by its operators needs the norms
    images = (noise(net) if images is None else images).to(next(net.parameters()))
    watch = Watch(net)
    expected = watch.run(images)
    left = {name: why for name, norm in watch.norms.items() if (why := watch.why_not(norm))}
    pairs = {norm: watch.source[norm][0] for name, norm in watch.norms.items() if name not in left}
    rest = {norm: absorb(conv, norm) for norm, conv in pairs.items()}
    names = {module: name for name, module in net.named_modules()}
    for name, module in list(net.named_modules(remove_duplicate=False)):
        if module in rest:
            net.set_submodule(name, rest[module])
    check(tensors(net.eval()(images)), expected)
    return Fold(net.to(dtype), {names[norm]: names[conv] for norm, conv in pairs.items()}, left)


def noise(net: nn.Module) -> Tensor:
    """One image of a size that `net` takes."""
    spec = getattr(net, "spec", None)
    side = 64 if isinstance(net, Network) else spec.resolution if spec else 224
    generator = torch.Generator().manual_seed(0)
    return torch.randn(1, spec.in_channels if spec else 3, side, side, generator=generator)


def check(found: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        difference = (a - b).abs().max() / b.abs().max().clamp(min=1e-300)
        if not difference <= TOLERANCE:
            raise ValueError(
                f"with its batch norms folded the network answers differently, by {difference:.1e} of the largest "
                f"answer where {TOLERANCE:g} is allowed: use it as it is"
            )


def absorb(conv: Any, norm: Any) -> nn.Module:
    """Make `conv` compute what `norm` makes of it. Returns what else `norm` does."""
    scale = (norm.running_var + norm.eps).rsqrt()
    shift = -norm.running_mean * scale
    factor = gain(norm)
    if factor is not None:
        scale, shift = scale * factor, shift * factor + norm.bias
    if conv.bias is not None:
        shift += conv.bias * scale
    conv.weight = nn.Parameter(conv.weight * scale.view(-1, *(1,) * (conv.weight.dim() - 1)))
    conv.bias = nn.Parameter(shift)
    return nn.Sequential(norm.drop, norm.act) if hasattr(norm, "act") else nn.Identity()


class Watch(TorchDispatchMode):
    """Sees which layer's output goes into which batch norm, and whether anything else reads either's numbers.

    Numbers are known by the address of their memory, so that views count as what they show. Outputs are kept,
    so that no other tensor gets their address.
    """

    def __init__(self, net: nn.Module):
        super().__init__()
        from timm.layers.conv2d_same import Conv2dSame
        from timm.layers.norm_act import BatchNormAct2d

        # Exactly these: what derives from them may compute otherwise, as convolutions that standardise weights do.
        convs = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, Conv2dSame)
        self.foldable = (
            nn.BatchNorm1d,
            nn.BatchNorm2d,
            nn.BatchNorm3d,
            MagnitudeNorm,
            BatchNormAct2d,
        )
        self.net = net
        self.convs = [
            m for m in net.modules() if type(m) in convs and isinstance(m.weight, nn.Parameter)
        ]
        self.norms: dict[str, Any] = {
            name: m for name, m in net.named_modules() if hasattr(m, "running_var")
        }
        self.calls: Counter[nn.Module] = Counter()
        self.made: dict[int, tuple[Any, Tensor]] = {}  # id of an output -> the layer and the output
        self.source: dict[nn.Module, tuple[Any, Tensor]] = {}  # batch norm -> the same of its input
        self.watched = set[int]().union(
            *(addresses(numbers(m)) for m in (*self.convs, *self.norms.values()))
        )
        self.own = set[int]()  # what the layer at work may read
        self.read = set[int]()  # what anything else has read

    def run(self, images: Tensor) -> list[Tensor]:
        """The network's answers."""
        hooks = [conv.register_forward_hook(self.keep) for conv in self.convs]
        for layer in (*self.convs, *self.norms.values()):
            hooks.append(layer.register_forward_pre_hook(self.start))
            hooks.append(layer.register_forward_hook(self.stop))
        with self:
            answers = tensors(self.net(images))
        for hook in hooks:
            hook.remove()
        self.read |= addresses(answers)
        return answers

    def start(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.calls[layer] += 1
        self.own = addresses(numbers(layer))
        if layer in self.norms.values() and inputs and id(inputs[0]) in self.made:
            self.source[layer] = self.made[id(inputs[0])]
            self.own |= addresses(tensors(inputs))

    def stop(self, *_: object) -> None:
        self.own = set()

    def keep(self, conv: nn.Module, _: object, output: Tensor) -> None:
        self.made[id(output)] = conv, output
        self.watched |= addresses([output])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.read |= (addresses(tensors((args, kwargs))) & self.watched) - self.own
        return func(*args, **(kwargs or {}))

    def why_not(self, norm: Any) -> str:
        """Why `norm` cannot be folded; "" if it can."""
        if type(norm) not in self.foldable:
            return f"what a {type(norm).__name__} computes is not known"
        if norm.running_var is None or norm.training:
            return "it takes its statistics from the batch"
        if self.calls[norm] != 1:
            return f"it is called {self.calls[norm]} times"
        if norm not in self.source:
            return "its input is not the output of a convolution or linear layer"
        conv, output = self.source[norm]
        if self.calls[conv] != 1:
            return f"the layer before it is called {self.calls[conv]} times"
        if (
            addresses([output]) & self.read
            or sum(conv is other for other, _ in self.source.values()) > 1
        ):
            return "its input is used elsewhere too"
        if addresses((*numbers(conv), *numbers(norm))) & self.read:
            return "its weights, or those of the layer before it, are used elsewhere too"
        if output.dim() != conv.weight.dim():
            return "its channels are not those of the layer before it"
        return ""


def numbers(layer: nn.Module) -> list[Tensor]:
    return [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]


def tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def addresses(values: Iterable[Tensor]) -> set[int]:
    return {value.untyped_storage().data_ptr() for value in values}
