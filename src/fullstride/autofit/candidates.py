"""Which networks could it be? Each with a resolution, a resize policy and initial weights."""

from dataclasses import dataclass

from fullstride.nets.preprocessing import Fit


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A network as it would be trained and shipped."""

    model: str  # as `zoo.create` takes it: a name of the zoo, timm/NAME or a spec's JSON file
    resolution: int  # pixels a side
    fit: Fit = "crop"  # how images become square
    width: float = 1.0  # multiplier of the network's widths
    depth: float = 1.0
    weights: str = ""  # initial weights, as `run.train` takes them; "" for random ones
    family: str = ""  # networks of one family have the same kind of blocks, such as genet
    params: int | None = None
    top1: float | None = None  # published ImageNet top-1 of the weights, per cent
    licence: str = ""  # of the weights, where they have one

    @property
    def name(self) -> str:
        """Distinct among candidates, and fit for the name of a folder."""
        model = self.model.removesuffix(".json").rpartition("/")[2]
        scale = [f"w{self.width:g}"] * (self.width != 1) + [f"d{self.depth:g}"] * (self.depth != 1)
        policy = [self.fit] * (self.fit != "crop")
        return "-".join([model, *scale, str(self.resolution), *policy])
