"""With which weights may a network begin? What is known of them, and whose licence permits it."""

import re
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field

from fullstride.autofit.settings import Licence
from fullstride.nets.blocks import (
    ConvStem,
    DeepConvStem,
    DeepStem,
    PoolStem,
    SpaceToDepthStem,
    Stem,
)
from fullstride.nets.spec import NetSpec
from fullstride.nets.timm_wrapper import TimmSpec, released
from fullstride.tables import PERMISSIVE, pretrained_networks, resolutions_around

RGB = 3  # channels that released weights take
FAMILY_OF_STEM: dict[type[Stem], str] = {
    SpaceToDepthStem: "tresnet",
    DeepConvStem: "resnet_rs",
    ConvStem: "genet",
    PoolStem: "resnet",
    DeepStem: "resnet_d",
}


@dataclass(frozen=True, kw_only=True)
class Start:
    """A network with weights to begin with."""

    label: str  # for people: a path, or the name of released weights
    model: str  # as `zoo.create` takes it
    weights: str  # as `run.train` takes it
    family: str
    trained_at: int  # pixels a side that the weights are meant for
    channels: int = RGB
    params: int | None = None
    top1: Mapping[int, float] = field(default_factory=dict)  # resolution -> published top-1
    licence: str = ""

    @property
    def resolutions(self) -> tuple[int, ...]:
        """Those that the network takes, around that of its weights."""
        if self.model.startswith("timm/"):
            config = released(self.model.removeprefix("timm/"))
            if config and config.fixed_input_size:
                return (self.trained_at,)
        return resolutions_around(self.trained_at)


def family_of(model: str, spec: NetSpec | TimmSpec) -> str:
    """As the table of released weights has it, else by the stem, or by timm's name."""
    if isinstance(spec, NetSpec):
        return FAMILY_OF_STEM.get(spec.stem, model)
    architecture = spec.name.partition(".")[0]
    for row in pretrained_networks():
        if row.name == f"timm/{architecture}":
            return row.family
    return re.sub(r"\d+.*", "", architecture.removeprefix("tf_").split("_")[0])


def allowed_by(licence: Licence, starts: Sequence[Start]) -> Generator[str, None, list[Start]]:
    """Those whose licence is permissive or not known; yields a line on the others.

    Raises ValueError where none remains.
    """
    others = [start for start in starts if start.licence and start.licence not in PERMISSIVE]
    if licence == "any" or not others:
        return list(starts)
    licences = ", ".join(sorted({start.licence for start in others}))
    line = f"{len(others)} weights under {licences}, such as {others[0].label}"
    if len(others) == len(starts):
        raise ValueError(
            f"no candidate has a permissive licence ({line}): use --licence any, or other networks"
        )
    yield f"left out by the licence filter: {line}; --licence any lifts it"
    return [start for start in starts if start not in others]
