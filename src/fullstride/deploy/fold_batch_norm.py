"""Folds batch norms into the preceding convolutions, with the same outputs."""

from collections import Counter
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_weights
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fullstride.nets.blocks import has_branches, merge_branches
from fullstride.nets.network import Network
from fullstride.nets.spec import input_shape
from fullstride.nets.timm_wrapper import TimmNetwork

SMALL = 64  # pixels a side
TOLERANCE = 1e-9  # largest difference of an output / largest output, in float64


@dataclass(frozen=True)
class Folding:
    """A network with batch norms folded where possible. Modules are named by path."""

    net: nn.Module
    layers: Mapping[str, str]  # folded batch norm -> its convolution or linear layer
    skipped: Mapping[str, str]  # remaining batch norm -> the reason


def fold_batch_norm(net: nn.Module) -> nn.Module:
    """Fold batch norms; return the network of `folding`."""
    return folding(net).net


@torch.no_grad()
def folding(net: nn.Module, images: Tensor | None = None) -> Folding:
    """Copy `net` for evaluation, with batch norms folded into the layers before them.

    Branches that only training needs are merged first.

    A batch norm is folded if its input is the output of one convolution or linear layer and nothing
    else reads that output, as observed in one forward pass of `images` (by default noise). So
    control flow must not depend on the images. Everything is computed in float64, where no error
    passes for rounding, and converted to the type of `net` at the end. Raises ValueError if the
    outputs of the copy differ by more than `TOLERANCE`.
    """
    dtype = next(net.parameters()).dtype
    net = deepcopy(net).eval().double()
    images = (noise(net) if images is None else images).to(next(net.parameters()))
    with_branches = tensors(net(images)) if has_branches(net) else []
    trace = Trace(merge_branches(net))
    expected = trace.run(images)
    skipped = {name: why for name, norm in trace.norms.items() if (why := trace.why_not(norm))}
    pairs = {
        norm: trace.source[norm][0] for name, norm in trace.norms.items() if name not in skipped
    }
    substitutes = {norm: absorb(layer, norm) for norm, layer in pairs.items()}
    names = {module: name for name, module in net.named_modules()}
    for name, module in list(net.named_modules(remove_duplicate=False)):
        if module in substitutes:
            net.set_submodule(name, substitutes[module])
    check(tensors(net.eval()(images)), with_branches or expected)
    layers = {names[norm]: names[layer] for norm, layer in pairs.items()}
    return Folding(net.to(dtype), layers, skipped)


def noise(net: nn.Module) -> Tensor:
    """One random image or clip for `net`, small if possible, because float64 is slow."""
    spec = getattr(net, "spec", None)
    is_small = isinstance(net, Network) or (
        isinstance(net, TimmNetwork) and not net.refusal(SMALL, SMALL)
    )
    shape = input_shape(spec, SMALL if is_small else None) if spec else (3, 224, 224)
    return torch.randn(1, *shape, generator=torch.Generator().manual_seed(0))


def check(outputs: list[Tensor], expected: list[Tensor]) -> None:
    for a, b in zip(outputs, expected, strict=True):
        difference = (a - b).abs().max() / b.abs().max().clamp(min=1e-300)
        if not difference <= TOLERANCE:
            raise ValueError(
                f"with batch norms folded the outputs differ by {difference:.1e} of the largest, "
                f"{TOLERANCE:g} is allowed: use the network as it is"
            )


def absorb(layer: Any, norm: Any) -> nn.Module:
    """Fold `norm` into the weights of `layer`; return its substitute: its activation, if any."""
    statistics = norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias
    layer.weight, layer.bias = fuse_conv_bn_weights(layer.weight, layer.bias, *statistics)
    return nn.Sequential(norm.drop, norm.act) if hasattr(norm, "act") else nn.Identity()


class Trace(TorchDispatchMode):
    """Records which layer's output each batch norm reads, and what else reads their tensors.

    Tensors are identified by the address of their storage, so a view counts as its base. Outputs
    are kept in memory, so that no address is reused.
    """

    def __init__(self, net: nn.Module):
        super().__init__()
        from timm.layers.conv2d_same import Conv2dSame
        from timm.layers.norm_act import BatchNormAct2d

        # Exact types: a subclass may compute something else, as in weight standardisation.
        convs = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.Linear, Conv2dSame)
        self.foldable = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, BatchNormAct2d)
        self.net = net
        self.convs = [
            m for m in net.modules() if type(m) in convs and isinstance(m.weight, nn.Parameter)
        ]
        self.norms: dict[str, Any] = {
            name: m for name, m in net.named_modules() if hasattr(m, "running_var")
        }
        self.calls: Counter[nn.Module] = Counter()
        self.outputs: dict[int, tuple[Any, Tensor]] = {}  # id of an output -> layer and output
        self.source: dict[nn.Module, tuple[Any, Tensor]] = {}  # batch norm -> its entry of outputs
        self.watched = set[int]().union(
            *(addresses(parameters_and_buffers(m)) for m in (*self.convs, *self.norms.values()))
        )
        self.own = set[int]()  # addresses that the current layer may read
        self.read = set[int]()  # addresses that other operators have read

    def run(self, images: Tensor) -> list[Tensor]:
        """Run the network; return its outputs."""
        hooks = [conv.register_forward_hook(self.record_output) for conv in self.convs]
        for layer in (*self.convs, *self.norms.values()):
            hooks.append(layer.register_forward_pre_hook(self.enter))
            hooks.append(layer.register_forward_hook(self.leave))
        with self:
            outputs = tensors(self.net(images))
        for hook in hooks:
            hook.remove()
        self.read |= addresses(outputs)
        return outputs

    def enter(self, layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        self.calls[layer] += 1
        self.own = addresses(parameters_and_buffers(layer))
        if layer in self.norms.values() and inputs and id(inputs[0]) in self.outputs:
            self.source[layer] = self.outputs[id(inputs[0])]
            self.own |= addresses(tensors(inputs))

    def leave(self, *_: object) -> None:
        self.own = set()

    def record_output(self, conv: nn.Module, _: object, output: Tensor) -> None:
        self.outputs[id(output)] = conv, output
        self.watched |= addresses([output])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.read |= (addresses(tensors((args, kwargs))) & self.watched) - self.own
        return func(*args, **(kwargs or {}))

    def why_not(self, norm: Any) -> str:
        """Why `norm` cannot be folded; "" if it can."""
        if type(norm) not in self.foldable:
            return f"{type(norm).__name__} is not a known kind of batch norm"
        if norm.running_var is None or norm.training:
            return "it uses the statistics of the batch"
        if self.calls[norm] != 1:
            return f"it is called {self.calls[norm]} times"
        if norm not in self.source:
            return "its input is not the output of a convolution or linear layer"
        conv, output = self.source[norm]
        if self.calls[conv] != 1:
            return f"the layer before it is called {self.calls[conv]} times"
        readers = sum(conv is other for other, _ in self.source.values())
        if addresses([output]) & self.read or readers > 1:
            return "its input is used elsewhere too"
        if addresses((*parameters_and_buffers(conv), *parameters_and_buffers(norm))) & self.read:
            return "its weights, or the weights of the layer before it, are used elsewhere too"
        if output.dim() != conv.weight.dim():
            return "its channels differ from the layer before it"
        return ""


def parameters_and_buffers(layer: nn.Module) -> list[Tensor]:
    return [*layer.parameters(recurse=False), *layer.buffers(recurse=False)]


def tensors(values: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def addresses(values: Iterable[Tensor]) -> set[int]:
    return {value.untyped_storage().data_ptr() for value in values}
