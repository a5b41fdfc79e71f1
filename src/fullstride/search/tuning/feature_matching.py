"""Can a new block begin as one that computes the MasterNet's maps? By least squares, no labels."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fullstride.data.dataset import DataSet
from fullstride.nets.backbone import Backbone, Masks
from fullstride.nets.bundle import Bundle
from fullstride.nets.network import Network
from fullstride.search.tuning.exchange import Exchange, is_below, parts_of
from fullstride.tasks.classify import Classify
from fullstride.train.batches import recipe_in_epochs, training_batches
from fullstride.train.loop import Epoch, train_epochs
from fullstride.train.recipe import Recipe

LENGTH = 0.25  # of the recipe of tuning


@dataclass(frozen=True)
class MatchMaps(Classify):
    """The mean squared distance of maps from the MasterNet's, in place of a loss of logits."""

    name: ClassVar[str] = "match_maps"
    places: tuple[str, ...] = ()

    def training_module(self, net: Backbone) -> nn.Module:
        return AdaptedMaps(cast(Network, net), self.places)

    def loss(self, outputs: Tensor, targets: Any, teacher: Tensor | None = None) -> Tensor:
        assert teacher is not None
        return F.mse_loss(outputs.float(), teacher)


class AdaptedMaps(nn.Module):
    """The maps at some places through the network's `task_head`: (N, C, H, W) -> (N, D)."""

    def __init__(self, net: Network, places: Sequence[str]):
        super().__init__()
        self.net, self.places = net, places

    def forward(self, x: Tensor, masks: Masks | None = None) -> Tensor:
        adapters = cast(nn.ModuleList, self.net.task_head)
        maps = maps_at(self.net, self.places, x)
        return flat(adapter(each) for adapter, each in zip(adapters, maps, strict=True))


def matched(
    exchange: Exchange,
    master: Bundle,
    data: DataSet,
    recipe: Recipe,
    device: torch.device | str = "cpu",
    workers: int = 0,
) -> Exchange:
    """`exchange` after its new parts have learned the MasterNet's maps, each at its own output.

    A 1 x 1 convolution adapts maps of another width, and is left out at the end. Only the new parts
    learn, and of the layers that read one those before the last of them. It takes `LENGTH` of the
    recipe. The paper cites such feature distillation (DNA, arXiv:1911.13053) as a baseline, and
    does not say whether its own is one. The network is not yet good: the layers behind were not
    adapted.

    Raises ValueError for a new part of another stride, whose maps have another size.
    """
    net, own = exchange.net, cast(Network, master.net)
    places = new_places(exchange, own)
    if not places:
        return exchange
    side = recipe.resolution or master.preprocessing.resolution
    pre = replace(master.preprocessing, resolution=side, draft=recipe.draft is not False)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(recipe.seed)
        net.task_head = adapters_between(net, own, places, torch.zeros(1, pre.channels, side, side))
    order = [part.path for part in parts_of(net.spec)]
    last = order.index(places[-1])
    learning = (*exchange.fresh, *exchange.adapted)
    behind = [path for path in learning if part_number(order, path) > last]
    teacher = own.to(device).eval().requires_grad_(False)

    def maps(x: Tensor, epoch: int, indices: Tensor) -> Tensor:
        with torch.no_grad():
            return flat(maps_at(teacher, places, x)).float()

    whole = recipe_in_epochs(data, recipe)
    short = replace(
        whole,
        epochs=LENGTH * whole.epochs,
        warmup_epochs=LENGTH * whole.warmup_epochs,
        frozen=(*exchange.frozen, *behind),
        teacher="",
        efficiency="plain",
        grad_accum_steps=max(1, whole.grad_accum_steps),
    )
    batches = training_batches(data, Classify(), pre, short, device, workers)
    try:
        epochs = train_epochs(
            net.to(device), MatchMaps(places=places), batches, short, teacher=maps
        )
        *_, epoch = epochs
    finally:
        batches.close()
    assert isinstance(epoch, Epoch)
    matching = cast(Network, epoch.average.cpu().requires_grad_(True))
    matching.task_head = None
    return replace(exchange, net=matching)


def new_places(exchange: Exchange, own: Network) -> tuple[str, ...]:
    """The parts that are new as a whole and whose maps the MasterNet has, in order."""
    of_both = {part.path for part in parts_of(own.spec)[:-1]}
    parts = parts_of(exchange.net.spec)[:-1]
    return tuple(part.path for part in parts if part.path in {*exchange.fresh} & of_both)


def part_number(order: Sequence[str], path: str) -> int:
    return next(number for number, part in enumerate(order) if is_below(path, [part]))


def maps_at(net: Network, places: Sequence[str], x: Tensor) -> list[Tensor]:
    """The outputs of some parts, in order: (N, C, H, W) each. What follows them is not computed."""
    maps = list[Tensor]()
    for part in parts_of(net.spec):
        if len(maps) == len(places):
            break
        x = net.get_submodule(part.path)(x)
        if part.path in places:
            maps.append(x)
    return maps


def flat(maps: Iterable[Tensor]) -> Tensor:
    return torch.cat([each.flatten(1) for each in maps], 1)


@torch.no_grad()
def adapters_between(
    net: Network, own: Network, places: Sequence[str], blank: Tensor
) -> nn.ModuleList:
    """A module for each place that makes the network's map one of the MasterNet's shape."""
    adapters = nn.ModuleList()
    for place, ours, theirs in zip(
        places, *(maps_at(each.eval(), places, blank) for each in (net, own)), strict=True
    ):
        if ours.shape[2:] != theirs.shape[2:]:
            raise ValueError(
                f"{place} has maps of {ours.shape[3]} pixels a side, the MasterNet of "
                f"{theirs.shape[3]}: use the same stride, or the method block"
            )
        same = ours.shape[1] == theirs.shape[1]
        adapters.append(nn.Identity() if same else nn.Conv2d(ours.shape[1], theirs.shape[1], 1))
    return adapters
