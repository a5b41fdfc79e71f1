"""What does a trained network become when some of its super-blocks are exchanged for others?

A part is the stem, a stage, the convolution of the head or the classifier. But for the classifier
they are the places of a search, `stem`, `stages.2` and `head`: in GENet's (arXiv:2006.14090) the
super-blocks of a MasterNet.
"""

from collections.abc import Collection, Generator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import nn

from fullstride.nets.bundle import Bundle
from fullstride.nets.network import Network
from fullstride.nets.spec import NetSpec

HEAD, CLASSIFIER = "head.conv", Network.classifier


@dataclass(frozen=True, eq=False)
class Exchange:
    """A network of which some layers are new. Layers are named by the paths of their modules."""

    net: Network
    fresh: tuple[str, ...]  # layers with random weights; they train
    # layers with the MasterNet's weights that train too, as they read what a new part computes
    adapted: tuple[str, ...]
    frozen: tuple[str, ...]  # all others, with the MasterNet's weights and batch statistics

    def bundle(self, master: Bundle) -> Bundle:
        """The network as a start for training, with what else `master` has."""
        source = f"{master.name} with new weights in {', '.join(self.fresh)}"
        untrained: dict[str, Any] = dict(scores={}, recipe={}, temperature=1.0, task_state={})
        return replace(master, net=self.net, source=source, **untrained)


class Part(NamedTuple):
    """A sequence of layers of a network, as its spec describes it."""

    path: str
    c_in: int
    design: Any  # what it is besides its input; equal designs on equal inputs have equal shapes

    @property
    def place(self) -> str:
        return "head" if self.path == HEAD else self.path


def exchanged(master: Bundle, spec: NetSpec, seed: int, *, again: Collection[str] = ()) -> Exchange:
    """The network of `spec`, with the weights of `master` in every part that both have.

    New are the parts that differ, and those of `again`, whose design may be the same: such a
    control shows what new weights alone cost. What follows a new part learns with it: the first
    convolution that reads its output, that one's batch norm, and the projection of the shortcut. If
    the width of that output changes, their weights are random too; else they begin with those of
    `master`. A kernel is never sliced. All else is frozen.

    The paper says that a super-block is exchanged and tuned, and not what becomes of the layers
    that read it, whose shapes change with its width. These layers are our reading of it.

    Args:
        master: A trained network of this package.
        spec: The same stem, stages and head, of other depths, widths, kernels, ratios or blocks.
            `resolution` and `source` do not matter.
        seed: Of the new weights, which are those of a new network of `spec`.
        again: Names of places.

    Raises ValueError where the two have other inputs, classes or numbers of stages, for a part that
    `spec` lacks, and where nothing would be new.
    """
    if not isinstance(master.net, Network):
        raise ValueError(
            f"{master.name} has no super-blocks to exchange: use a network of `fullstride zoo`"
        )
    own = cast(NetSpec, master.net.spec)
    check_comparable(own, spec)
    parts, before = parts_of(spec), {part.path: part for part in parts_of(own)}
    places = [part.place for part in parts[:-1]]
    if unknown := [name for name in again if name not in places]:
        raise ValueError(f"again {unknown[0]!r} is no part of the network: use {', '.join(places)}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        net = Network(spec)
    fresh, adapted = list[str](), list[str]()
    follows_new = False
    for part in parts:
        earlier = before.get(part.path)
        is_new = earlier is None or earlier.design != part.design or part.place in again
        if is_new:
            fresh.append(part.path)
        elif earlier and earlier.c_in != part.c_in:
            fresh += input_layers(net, part.path)
        elif follows_new:
            adapted += input_layers(net, part.path)
        follows_new = is_new
    if not fresh:
        raise ValueError(
            f"the network is {master.name} itself: change a stage, or name one in `again`"
        )
    state, old = net.state_dict(), master.net.state_dict()
    net.load_state_dict({name: old[name] for name in state if not is_below(name, fresh)}, False)
    frozen = tuple(untouched(net, (*fresh, *adapted)))
    return Exchange(net.eval(), tuple(fresh), tuple(adapted), frozen)


def check_comparable(own: NetSpec, spec: NetSpec) -> None:
    for name in ("in_channels", "classes", "style"):
        if getattr(own, name) != getattr(spec, name):
            raise ValueError(
                f"{name} {getattr(spec, name)} of the network, {getattr(own, name)} of the "
                "MasterNet: use the same"
            )
    if len(own.stages) != len(spec.stages):
        raise ValueError(
            f"{len(spec.stages)} stages of the network, {len(own.stages)} of the MasterNet: use "
            "the same number"
        )


def parts_of(spec: NetSpec) -> list[Part]:
    """The parts from the input to the classifier, which is the last."""
    parts, width = [Part("stem", spec.in_channels, (spec.stem, spec.stem_width))], spec.stem_width
    for number, stage in enumerate(spec.stages):
        parts.append(Part(f"stages.{number}", width, stage))
        width = stage.width
    if spec.head_width:
        parts.append(Part(HEAD, width, spec.head_width))
    return [*parts, Part(CLASSIFIER, spec.head_width or width, spec.classes)]


def input_layers(net: Network, path: str) -> list[str]:
    """The layers of a part that read its input."""
    if not path.startswith("stages."):
        return [path]
    block = f"{path}.0"
    first, _ = next(net.get_submodule(f"{block}.branch").named_children())
    layers = [f"{block}.branch.{first}", f"{block}.shortcut"]
    return [each for each in layers if has_parameters(net.get_submodule(each))]


def is_below(name: str, paths: Collection[str]) -> bool:
    return any(name == path or name.startswith(f"{path}.") for path in paths)


def untouched(
    module: nn.Module, paths: Collection[str], at: str = ""
) -> Generator[str, None, None]:
    """The shortest paths that have all parameters of `module` but those at and below `paths`."""
    for child, part in module.named_children():
        path = f"{at}.{child}" if at else child
        if is_below(path, paths) or not has_parameters(part):
            continue
        if any(is_below(each, [path]) for each in paths):
            yield from untouched(part, paths, path)
        else:
            yield path


def has_parameters(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None
