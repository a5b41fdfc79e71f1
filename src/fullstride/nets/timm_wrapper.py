"""Wraps networks of timm as a `Backbone` with a spec, `features` and `embed`."""

import math
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from fullstride.nets.backbone import Backbone, DropBy, Masks
from fullstride.nets.spec import TimmSpec


def timm_names() -> list[str]:
    """The names of all networks of timm, without `timm/`."""
    import timm

    return timm.list_models()


def timm_spec(name: str, **changes: int) -> TimmSpec:
    """The spec of timm's `name`; `name.tag` gives the resolution of the tagged weights."""
    import timm

    base = name.split(".")[0]
    # This also refuses names that timm would download or open: "hf-hub:...", "local-dir:...".
    if not timm.is_model(base):
        close = get_close_matches(base, timm.list_models(), n=3, cutoff=0.5)
        near = f"did you mean {' or '.join(f'timm/{name}' for name in close)}?"
        raise ValueError(
            f"timm has no network named {base!r}: {near if close else 'see timm.list_models()'}"
        )
    config = pretrained_config(name)
    resolution = config.input_size[1] if config else 224
    return TimmSpec(name=name, **{"resolution": resolution, **changes})


def pretrained_config(name: str):
    """timm's `PretrainedCfg` of the weights `name` or `name.tag`; None if they do not exist."""
    import timm

    try:
        return timm.get_pretrained_cfg(name)
    except RuntimeError:
        return None


def create_model(spec: TimmSpec, **options: Any) -> Any:
    """timm's module with fresh weights."""
    import timm

    return timm.create_model(
        spec.name.split(".")[0],
        pretrained=False,
        in_chans=spec.in_channels,
        num_classes=spec.classes,
        **options,
    )


class TimmNetwork(Backbone):
    """A network of timm: (N, in_channels, H, W) -> (N, K) logits, for sizes that timm accepts."""

    spec: TimmSpec
    root = "net"

    def __init__(self, spec: TimmSpec):
        super().__init__()
        self.spec = spec  # pyright: ignore[reportIncompatibleVariableOverride]
        try:
            self.net: Any = create_model(spec)
        except (AssertionError, AttributeError, LookupError, TypeError) as error:
            raise ValueError(
                f"timm/{spec.name} cannot be built for {spec.in_channels} channels and "
                f"{spec.classes} classes: {type(error).__name__} {error}"
            ) from None
        self.classifier = self.classifiers[0]
        self.dropout = 0.0

    @property
    def classifiers(self) -> tuple[str, ...]:
        names = self.net.pretrained_cfg["classifier"]
        return tuple(f"net.{name}" for name in ((names,) if isinstance(names, str) else names))

    def forward(self, x: Tensor, masks: Masks | None = None) -> Tensor:
        if self.task_head is not None:
            return self.task_head(self.head_input(x, masks))
        return self.checked(self.net, x)

    def embed(self, x: Tensor, masks: Masks | None = None) -> Tensor:
        return self.logits_and_embedding(x)[1]

    def logits_and_embedding(self, x: Tensor, masks: Masks | None = None) -> tuple[Tensor, Tensor]:
        if self.training and self.dropout:
            # Some of timm's networks apply dropout before the embedding and some after it.
            raise ValueError(
                f"timm/{self.spec.name} may apply dropout to its embedding: set the recipe's "
                "dropout to 0"
            )
        if not self.embeds:
            raise ValueError(
                f"timm/{self.spec.name} has no embedding with a linear classifier: choose another "
                "network"
            )
        return self.checked(self._parts, x)

    def checked(self, part: Callable[[Tensor], Any], x: Tensor) -> Any:
        """`part(x)`. Raises ValueError, with sizes that work, for images of other sizes."""
        try:
            return part(x)
        except (AssertionError, RuntimeError):
            self.check_size(x.shape[2], x.shape[3])
            raise  # another error, such as a lack of memory

    def check_size(self, height: int, width: int) -> None:
        """Raise ValueError if the network does not take images of this size."""
        config = self.net.pretrained_cfg
        smallest = config.get("min_input_size")
        side = (smallest or config["input_size"])[-1]
        why = self.refusal(height, width)
        if why and not self.refusal(side, side):
            sizes = f"{side} x {side}{' or larger' if smallest else ''}"
            raise ValueError(
                f"timm/{self.spec.name} takes no {height} x {width} image: use {sizes} ({why})"
            )

    def refusal(self, height: int, width: int) -> str:
        """timm's message for an image that it refuses; "" for an accepted size."""
        try:
            with torch.device("meta"), torch.no_grad():
                net = create_model(self.spec).eval()
                net(torch.empty(1, self.spec.in_channels, height, width))
        except (AssertionError, RuntimeError) as error:
            return str(error).strip().partition("\n")[0].rstrip(".") or type(error).__name__
        return ""

    def _parts(self, x: Tensor) -> tuple[Tensor, Tensor]:
        embedding = self.net.forward_head(self.net.forward_features(x), pre_logits=True)
        return self.net.get_classifier()(embedding), embedding

    @cached_property
    def embeds(self) -> bool:
        """Whether `_parts` gives the same logits as `forward`: some methods of timm omit a norm."""
        if not isinstance(getattr(self.net, "get_classifier", lambda: None)(), nn.Linear):
            return False
        weight, side, training = next(self.parameters()), self.spec.resolution, self.training
        shape = (1, self.spec.in_channels, side, side)
        x = torch.linspace(0, 1, math.prod(shape)).view(shape).to(weight)
        self.eval()
        try:
            with torch.no_grad():
                return torch.equal(self._parts(x)[0], self.net(x))
        except (AttributeError, TypeError):  # no such method, or no `pre_logits`
            return False
        finally:
            self.train(training)

    def regularise(
        self, *, drop_path: float = 0.0, by: DropBy = "block", dropout: float = 0.0
    ) -> None:
        """Set the rates of timm's layers, which draw the masks; 0 leaves timm's default."""
        if by == "stage" and drop_path:
            raise ValueError(
                f"timm/{self.spec.name} drops paths by block only: set the recipe's drop_path_by "
                "to block"
            )
        self.dropout = dropout
        state = self.net.state_dict()
        rates: dict[str, Any] = {"drop_path_rate": drop_path, "drop_rate": dropout}
        rates = {key: rate for key, rate in rates.items() if rate}
        if rates:
            try:
                self.net = create_model(self.spec, **rates)
            except TypeError:
                name = self.spec.name.split(".")[0]
                raise ValueError(
                    f"timm/{name} has no {' or '.join(rates)}: set it to 0 in the recipe"
                ) from None
            self.net.load_state_dict(state)

    def layer_numbers(self, *, coarse: bool = False) -> dict[str, int]:
        """The layer of each parameter, by name, from timm's `group_matcher`."""
        from timm.models import group_parameters

        if not hasattr(self.net, "group_matcher"):
            raise ValueError(
                f"timm/{self.spec.name} does not name its layers: leave out layer_decay, "
                "head_lr_scale, freeze_stages and freeze_epochs"
            )
        matcher = self.net.group_matcher(coarse=coarse)
        numbers = cast(dict[str, int], group_parameters(self.net, matcher, reverse=True))
        last = max(numbers.values())
        names = (name for name, _ in self.named_parameters())
        return {name: numbers.get(name.removeprefix("net."), last) for name in names}

    def features(self, x: Tensor, out_indices: Sequence[int] | None = None) -> tuple[Tensor, ...]:
        if not hasattr(self.net, "forward_intermediates"):
            raise ValueError(
                f"timm/{self.spec.name} has no intermediate maps: choose another network"
            )
        maps = self.checked(partial(self.net.forward_intermediates, intermediates_only=True), x)
        maps = tuple({m.shape[2:]: m for m in maps}.values())
        if out_indices is None:
            return maps
        if len(maps) != len(self.strides):  # of a small image, several strides give one pixel
            size, side = f"{x.shape[2]} x {x.shape[3]}", self.spec.resolution
            raise ValueError(
                f"timm/{self.spec.name} has {len(maps)} sizes of maps for {size} images and "
                f"{len(self.strides)} strides: for out_indices use {side} x {side}"
            )
        return tuple(maps[i] for i in self.map_numbers(out_indices))

    @property
    def channels(self) -> tuple[int, ...]:
        return tuple(m.shape[1] for m in self.sample)

    @property
    def strides(self) -> tuple[int, ...]:
        return tuple(_stride(self.spec.resolution, m.shape[2]) for m in self.sample)

    @cached_property
    def sample(self) -> tuple[Tensor, ...]:
        """The pyramid of a blank image, for shapes that timm misstates for some networks."""
        weight = next(self.parameters())
        side, training = self.spec.resolution, self.training
        with torch.no_grad():
            maps = self.eval().features(weight.new_zeros(1, self.spec.in_channels, side, side))
        self.train(training)
        return maps


def _stride(side: int, map_side: int) -> int:
    """The stride of a map. Halvings round up: 176 pixels at stride 32 make 6, a ratio of 29."""
    halvings = (2**power for power in range(side.bit_length()))
    exact = (stride for stride in halvings if math.ceil(side / stride) == map_side)
    return next(exact, round(side / map_side))
