"""Where does a network come from? A name, `timm/NAME`, or a folder becomes a network."""

import socket
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal
from urllib.parse import urlsplit
from urllib.request import getproxies

from fullstride.nets import checkpoints, families
from fullstride.nets.blocks import DeepConvStem, SpaceToDepthStem
from fullstride.nets.bundle import Bundle, build
from fullstride.nets.fused.padding import padded_form
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import IMAGENET_MEAN, IMAGENET_STD, Preprocessing
from fullstride.nets.spec import NetSpec
from fullstride.nets.timm_wrapper import TimmNetwork, TimmSpec, released, timm_spec

# The weights that `load` takes for a name: a model of the Hugging Face hub under `timm/`, without that prefix.
# For TResNet-M and -L-V2 those pretrained on ImageNet-21K, the most accurate ones; another tag may be asked for.
HUB = {
    "tresnet_m": "tresnet_m.miil_in21k_ft_in1k",
    "tresnet_l": "tresnet_l.miil_in1k",
    "tresnet_xl": "tresnet_xl.miil_in1k",
    "tresnet_v2_l": "tresnet_v2_l.miil_in21k_ft_in1k",
    **{
        f"resnet_rs_{depth}": f"resnetrs{depth}.tf_in1k"
        for depth in (50, 101, 152, 200, 270, 350, 420)
    },
    "genet_light": "gernet_s.idstcv_in1k",
    "genet_normal": "gernet_m.idstcv_in1k",
    "genet_large": "gernet_l.idstcv_in1k",
    "resnet18": "resnet18.a1_in1k",
    "resnet34": "resnet34.a1_in1k",
    "resnet50": "resnet50.a1_in1k",
    "resnet101": "resnet101.a1h_in1k",
    "resnet152": "resnet152.a1h_in1k",
    "resnet50d": "resnet50d.ra2_in1k",
}


def spec(name: str) -> NetSpec | TimmSpec:
    """The spec of a network's name. Raises ValueError with near misses."""
    if name.startswith("timm/"):
        return timm_spec(name.removeprefix("timm/"))
    return families.find(name)


def create(
    name: str,
    *,
    classes: int | None = None,
    in_channels: int | None = None,
    width: float = 1.0,
    depth: float = 1.0,
    resolution: int | None = None,
    efficiency: Literal["plain", "lean"] = "plain",
    padded: bool = False,
    int8: bool = False,
) -> Network | TimmNetwork:
    """A network with fresh weights: a name of ours, or any of timm's as `timm/NAME`.

    `width` and `depth` multiply every width and every depth (see `NetSpec.scaled`; ours only).
    `resolution` is what it is meant for, in pixels a side; it takes other sizes too. A lean one keeps less while it
    is trained, and with `int8` less yet (see `Network.lean`; ours only); `fit` trains it as its recipe says. A padded
    one has channels of zeros up to multiples of 8 (see `nets.padded`; ours only).
    """
    if efficiency not in ("plain", "lean"):
        raise ValueError(
            f"efficiency {efficiency!r} of a network: use plain or lean; compiled and auto are a recipe's"
        )
    if int8 and efficiency == "plain":
        raise ValueError(
            f"int8 says what lean training keeps, and {name} is plain: add efficiency lean"
        )
    base = spec(name)
    if width != 1 or depth != 1:
        if isinstance(base, TimmSpec):
            raise ValueError(
                f"{name} cannot be scaled: width and depth are for networks that `fullstride zoo` lists"
            )
        base = base.scaled(width=width, depth=depth)
    changes = dict(classes=classes, in_channels=in_channels, resolution=resolution)
    net = build(
        replace(base, **{key: value for key, value in changes.items() if value is not None})
    )
    if padded:
        net = padded_form(net, name)
    if efficiency == "plain":
        return net
    if isinstance(net, TimmNetwork):
        raise ValueError(
            f"{name} has no lean form: use efficiency plain, or a network that `fullstride zoo` lists"
        )
    return net.lean(int8=int8)


def load(what: str | Path, name: str | None = None) -> Bundle:
    """A trained network with its preprocessing: `.net` is the network, in evaluation mode.

    `what` is the folder of a bundle or of a run, a file of released weights (see `checkpoints`; `name`
    says which network it holds where that is not plain), a name that `HUB` lists, a name with
    timm's tag (`tresnet_m.miil_in1k_448`), or `timm/NAME`. Names need the hub.
    """
    path = Path(what)
    if path.is_dir():
        whole = path / "bundle"
        if (path / "run.json").exists() and not whole.is_dir():
            best = f", or give {path / 'best'}" if (path / "best").is_dir() else ""
            raise ValueError(
                f"{path} is a run that has not ended: train it to its end by the same command{best}"
            )
        return Bundle.load(whole if whole.is_dir() else path)
    if path.is_file():
        net = checkpoints.load(path, name)
        return Bundle(
            net=net.eval(),
            name=name or path.stem,
            classes=numbered(net.spec.classes),
            preprocessing=family_preprocessing(net.spec),
            source=path.name,
        )
    return from_hub(str(what))


def measurable(
    names: Sequence[str], beside: Mapping[str, int] | None = None
) -> dict[str, Network | TimmNetwork]:
    """Networks to be measured on the same input: runs and bundles as they are, names with fresh weights.

    Names are built for the input channels of the first folder, or of what else is measured: `beside` gives those by
    name. Raises ValueError where they differ.
    """
    folders = {name: load(name).net for name in names if Path(name).exists()}
    channels = {**(beside or {}), **{name: net.spec.in_channels for name, net in folders.items()}}
    if len(set(channels.values())) > 1:
        raise ValueError(
            f"one input cannot serve all: {', '.join(f'{n} takes {c}' for n, c in channels.items())} channels"
        )
    wanted = next(iter(channels.values()), None)
    return {name: folders.get(name) or create(name, in_channels=wanted) for name in names}


def from_hub(name: str) -> Bundle:
    """Weights from the Hugging Face hub, with the preprocessing that stands beside them."""
    ours, _, tag = name.partition(".")
    if name.startswith("timm/"):
        base, model = None, name.removeprefix("timm/")
    else:
        base = spec(ours)
        if ours not in HUB:
            raise ValueError(
                f"no released weights for {ours}: train it, or choose from {', '.join(HUB)}"
            )
        model = f"{HUB[ours].partition('.')[0]}.{tag}" if tag else HUB[ours]
    config = hub_config(model)
    state = checkpoints.read(download(str(config.hf_hub_id), name))
    if isinstance(base, NetSpec):
        found, state = checkpoints.convert(state, ours)
        net = Network(replace(found, resolution=config.input_size[1]))
        net.load_state_dict(state)
    else:
        net = TimmNetwork(timm_spec(model, classes=config.num_classes))
        checkpoints.check(
            {key: tuple(value.shape) for key, value in net.net.state_dict().items()}, state
        )
        net.net.load_state_dict(state)
    return Bundle(
        net=net.eval(),
        name=name,
        classes=imagenet_names(config.num_classes),
        preprocessing=hub_preprocessing(model, config),
        source=f"huggingface.co/{config.hf_hub_id}",
        licence=config.license or "",
    )


def hub_config(model: str):
    """timm's record of one set of weights; raises ValueError with the tags there are."""
    import timm

    config = released(model)
    if config is None or not config.hf_hub_id:
        tags = timm.list_pretrained(f"{model.partition('.')[0]}.*")
        hint = f"choose from {', '.join(tags)}" if tags else "it has none"
        raise ValueError(f"timm knows no released weights {model!r}: {hint}")
    return config


def download(repository: str, name: str) -> Path:
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    cached = try_to_load_from_cache(repository, "model.safetensors")
    if isinstance(cached, str):
        return Path(cached)
    try:
        if no_network():  # the hub's client would try again for half a minute
            raise LocalEntryNotFoundError("no network")
        return Path(hf_hub_download(repository, "model.safetensors"))
    except (HfHubHTTPError, OSError) as error:
        raise ValueError(
            f"the weights of {name} are not in the local cache, and huggingface.co/{repository} cannot be reached "
            f"({type(error).__name__}): connect to the network, or give a file of weights"
        ) from None


def no_network() -> bool:
    """Whether the hub's name cannot even be looked up; with a proxy that says nothing."""
    from huggingface_hub.constants import ENDPOINT

    try:
        return not getproxies() and not socket.getaddrinfo(urlsplit(ENDPOINT).hostname, 443)
    except OSError:
        return True


def hub_preprocessing(model: str, config) -> Preprocessing:
    return Preprocessing(
        resolution=config.input_size[1],
        mean=config.mean,
        std=config.std,
        kernel=config.interpolation,
        # The authors bend pictures to 448 x 448 and report their scores so (Alibaba-MIIL/TResNet#6).
        fit="squish" if model.startswith("tresnet") and model.endswith("_448") else "crop",
        crop=config.crop_pct,
    )


def family_preprocessing(spec: NetSpec | TimmSpec) -> Preprocessing:
    """What the papers feed their networks; ImageNet's mean and deviation for all others. Gray pictures stay in 0..1."""
    stem = spec.stem if isinstance(spec, NetSpec) else None
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    if spec.in_channels != len(mean) or stem is SpaceToDepthStem:
        mean, std = (0.0,) * spec.in_channels, (1.0,) * spec.in_channels
    kernel = "bicubic" if stem is DeepConvStem else "bilinear"
    return Preprocessing(resolution=spec.resolution, mean=mean, std=std, kernel=kernel)


def imagenet_names(classes: int) -> tuple[str, ...]:
    from timm.data.imagenet_info import ImageNetInfo

    subset = {1000: "imagenet-1k", 11221: "imagenet-21k-miil"}.get(classes)
    if subset is None:
        return numbered(classes)
    info = ImageNetInfo(subset)
    return tuple(info.index_to_description(index) for index in range(classes))


def numbered(classes: int) -> tuple[str, ...]:
    return tuple(str(index) for index in range(classes))
