"""Builds and loads networks by name, `timm/NAME`, folder, or file of weights."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path

from torch import nn

from fullstride.io.console import print_note
from fullstride.io.records import check_bounds
from fullstride.io.writing import EXPORTED_SUFFIXES
from fullstride.nets import checkpoints, families
from fullstride.nets.backbone import Backbone, HeadBuilder, Spec
from fullstride.nets.blocks import DeepConvStem, SpaceToDepthStem
from fullstride.nets.bundle import FILE_LIMITS, Bundle, Metadata, build, no_head, read_spec
from fullstride.nets.preprocessing import (
    BY_DEFAULT,
    IMAGENET_MEAN,
    IMAGENET_STD,
    LoadOptions,
    Preprocessing,
)
from fullstride.nets.spec import NetSpec, TimmSpec
from fullstride.nets.timm_wrapper import TimmNetwork, pretrained_config, timm_names, timm_spec
from fullstride.nets.weights import hub
from fullstride.nets.weights.convert import convert, fit
from fullstride.nets.weights.reader import read_flat
from fullstride.tables import is_repository
from fullstride.tables.class_names import imagenet_words, read_class_names

FRAME_STRIDE = 2  # of clips, arXiv:2103.07579 section 6.4


def spec(name: str) -> NetSpec | TimmSpec:
    """The spec of a network's name, or of a JSON file. Raises ValueError with near misses.

    Examples:
        >>> import fullstride
        >>> fullstride.zoo.spec("resnet50").scaled(width=0.5).stages[0].width
        128
    """
    if is_repository(name):
        raise ValueError(f"{name} is a bundle: give the name of a network here")
    if name.startswith("timm/"):
        return timm_spec(name.removeprefix("timm/"))
    if is_spec_file(name):
        return read_spec(Path(name))
    return families.find(name)


def is_spec_file(name: str) -> bool:
    """Whether `name` is the JSON file of a network's spec."""
    return name.lower().endswith(".json") and not is_repository(name)


def has_own_spec(name: str) -> bool:
    """Whether a name means a file, a folder or a bundle on the hub, not a listed network."""
    return is_repository(name) or Path(name).exists()


def names_weights(name: str) -> bool:
    """Whether a name means weights for `load`, at a path or on the hub, and not a bare spec."""
    return has_own_spec(name) and not is_spec_file(name)


def local_path(name_or_path: str | Path) -> Path:
    """The local path that `load` opens; for `hf:USER/NAME` a folder in the hub's cache."""
    name = str(name_or_path)
    return hub.fetch(name, FILE_LIMITS) if is_repository(name) else Path(name)


def find_spec(name_or_path: str) -> Spec:
    """The spec of a network's name, of a JSON file, or of weights that `load` opens."""
    if names_weights(name_or_path):
        return load(name_or_path).net.spec
    return spec(name_or_path)


@dataclass(frozen=True)
class NamedNetwork:
    """The network of a name or a path, to be built with fresh weights."""

    name: str
    spec: Spec
    head: HeadBuilder | None = None  # None: the classifier

    def build(self) -> Backbone:
        return build(self.spec, self.head)


def create(
    name: str,
    *,
    classes: int | None = None,
    in_channels: int | None = None,
    width: float = 1.0,
    depth: float = 1.0,
    resolution: int | None = None,
    frames: int | None = None,
) -> Backbone:
    """A network with fresh weights: a name of the zoo, or any network of timm as `timm/NAME`.

    The name may also be the path of a JSON file that `to_json` of a spec wrote. `width` and
    `depth` multiply every width and every depth (see `NetSpec.scaled`; not for timm's networks).
    `resolution` is the intended input size, in pixels per side, and `frames` the intended length
    of clips; other sizes work too.

    Examples:
        >>> import torch
        >>> import fullstride
        >>> net = fullstride.zoo.create("resnet50", classes=5)
        >>> net(torch.zeros(2, 3, 64, 64)).shape
        torch.Size([2, 5])
    """
    base = spec(name)
    if width != 1 or depth != 1:
        if isinstance(base, TimmSpec):
            raise ValueError(
                f"{name} cannot be scaled: width and depth are for networks that `fullstride zoo` "
                "lists"
            )
        base = base.scaled(width=width, depth=depth)
    changes = {"classes": classes, "in_channels": in_channels}
    changes |= {"resolution": resolution, "frames": frames}
    changed = {key: value for key, value in changes.items() if value is not None}
    if isinstance(base, TimmSpec) and changed.pop("frames", 0):
        raise ValueError(f"{name} takes images, and no clips of {frames} frames: leave frames out")
    changed_spec = replace(base, **changed)
    check_bounds(changed_spec)  # timm would build it, without a classifier for 0 classes
    return build(changed_spec)


def load(
    name_or_path: str | Path,
    name: str | None = None,
    head: Callable[[Metadata, Backbone], nn.Module | None] = no_head,
    options: LoadOptions = BY_DEFAULT,
) -> Bundle:
    """A trained network with its preprocessing: `.net` is the network, in evaluation mode.

    The argument is the folder of a bundle or of a run, a bundle on the Hugging Face hub as
    `hf:USER/NAME`, a file of released weights, a name in `weights.hub.HUB`, such a name with timm's
    tag (`tresnet_m.miil_in1k_448`), or `timm/NAME`. Names are looked up in the hub's cache, then on
    the hub; a bundle is the latest in its repository, unless `hf:USER/NAME@REVISION` selects one.
    `name` is the network of a file whose weights fit several networks, or are timm's; for all other
    arguments leave it out. `head` builds the head of a task, see `Bundle.load`;
    `fullstride.tasks.load` knows the heads of all tasks. Assumptions about a file of weights are
    printed on the standard error stream, and `options` replace them. Raises ValueError in one line.

    Examples:
        >>> import fullstride
        >>> _ = fullstride.train_network("digits", "genet_tiny", "runs/few", steps=2)
        >>> fullstride.zoo.load("runs/few").classes
        ('0', '1', '2', '3', '4', '5', '6', '7', '8', '9')
    """
    path = Path(name_or_path)
    if path.exists() and not path.is_dir():
        for whole, kind in (("bundle.json", "bundle"), ("run.json", "run")):
            if (path.parent / whole).exists():
                raise ValueError(f"{path} is a part of a {kind}: give its folder, {path.parent}")
        if path.suffix in EXPORTED_SUFFIXES:
            raise ValueError(
                f"{path} is an exported file: give the run or bundle that it was made from"
            )
        return load_file(path, name, options)
    if name and name != str(name_or_path):
        raise ValueError(
            f"the network {name!r} is for a file of weights, {path} is none: leave it out"
        )
    if options.network or options.weights_kind != "averaged":
        raise ValueError(
            f"--network and --weights-kind are for files of weights, {path} is none: leave them out"
        )
    if path.is_dir():
        bundle = path / "bundle"
        if (path / "run.json").exists() and not bundle.is_dir():
            best = f", or give {path / 'best'}" if (path / "best").is_dir() else ""
            raise ValueError(
                f"{path} is a run that has not ended: train it to its end by the same command{best}"
            )
        if (trials := path / "trials").is_dir() and not bundle.is_dir():
            raise ValueError(f"{path} has many trainings: give one of them, {trials / 'NAME'}")
        return with_options(Bundle.load(bundle if bundle.is_dir() else path, head), options)
    if is_repository(name := str(name_or_path)):
        folder = local_path(name)
        try:
            return with_options(Bundle.load(folder, head), options)
        except ValueError as error:  # which has the name instead of the folder
            raise ValueError(str(error).replace(str(folder), name)) from None
    return with_options(load_released(name), options)


def load_released(name: str) -> Bundle:
    """The weights of a name in `weights.hub.HUB`, of `NAME.TAG`, or of `timm/NAME`.

    Raises ValueError if they do not exist, or if neither the cache nor the hub has them.
    """
    model = hub.timm_name(name)
    config = hub.hub_config(model)
    state = read_flat(hub.fetch_weights(str(config.hf_hub_id)))
    if not name.startswith("timm/"):
        match, state = convert(state, name.partition(".")[0])
        pre = hub.authors_preprocessing(model, config)
        net = build(replace(match.spec, resolution=pre.resolution))
        net.load_state_dict(state)
    else:
        net = TimmNetwork(timm_spec(model, classes=config.num_classes))
        net.net.load_state_dict(fit(net.net.state_dict(), state))
        pre = hub.hub_preprocessing(model, config)
    return Bundle(
        net=net.eval(),
        name=name,
        classes=imagenet_words(config.num_classes),
        preprocessing=pre,
        source=f"huggingface.co/{config.hf_hub_id}",
        licence=config.license or "",
    )


def load_file(path: Path, name: str | None, options: LoadOptions) -> Bundle:
    """The network in a file of weights, with the preprocessing of its authors or its family."""
    name = name or options.network
    if name.startswith("timm/"):
        loaded = checkpoints.load_timm(path, name.removeprefix("timm/"), options.weights_kind)
    else:
        loaded = checkpoints.load_with_notes(path, name or None, options.weights_kind)
    net, release, spec = loaded.net.eval(), loaded.release, loaded.net.spec
    pre, origin = family_preprocessing(spec), "assumed: --resolution, --fit and --crop change it"
    classes = tuple(map(str, range(spec.classes)))
    if release:
        pre = replace(pre, resolution=release.resolution, fit=release.fit, crop=release.crop)
        net.spec = replace(spec, resolution=release.resolution)
        origin, classes = f"as in {release.source}", imagenet_words(spec.classes)
    elif isinstance(spec, TimmSpec) and (config := pretrained_config(spec.name)):
        pre, origin = hub.hub_preprocessing(spec.name, config), f"timm's for {name}"
    opened = Bundle(
        net=net, name=name or path.stem, classes=classes, preprocessing=pre, source=path.name
    )
    bundle = with_options(opened, options)
    if bundle.preprocessing != pre:
        origin = f"in place of {pre}"
    for note in (*loaded.notes, f"{loaded.name}, for {bundle.preprocessing}, {origin}"):
        print_note(f"{path.name}: {note}")
    return bundle


def with_options(bundle: Bundle, options: LoadOptions) -> Bundle:
    """The bundle with the preprocessing and the class names in `options`."""
    names = ("resolution", "fit", "crop")
    changes = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    pre = replace(bundle.preprocessing, **changes)
    if options.crop is not None and pre.fit != "crop":
        raise ValueError(f"--crop {options.crop:g} is for --fit crop: add it, or leave --crop out")
    classes = bundle.classes
    if options.class_names:
        classes = read_class_names(options.class_names, len(classes))
    return replace(bundle, preprocessing=pre, classes=classes)


def measurable(
    names: Sequence[str],
    others: Mapping[str, int] | None = None,
    head: Callable[[Metadata, Backbone], nn.Module | None] = no_head,
) -> dict[str, Backbone]:
    """Networks to be measured on the same input: runs and bundles, and names with fresh weights.

    `others` maps names of other measured modules to input channels; `head` builds the heads of
    bundles, see `load`. Names are built for the channels of the first of `others`, else of the
    first folder. Raises ValueError if these differ.
    """
    folders = {name: load(name, head=head).net for name in names if names_weights(name)}
    channels = {**(others or {}), **{name: net.spec.in_channels for name, net in folders.items()}}
    if len(set(channels.values())) > 1:
        counts = ", ".join(f"{name} takes {count}" for name, count in channels.items())
        raise ValueError(f"the networks need one input: {counts} channels")
    in_channels = next(iter(channels.values()), None)
    return {name: folders.get(name) or create(name, in_channels=in_channels) for name in names}


def family_preprocessing(spec: Spec) -> Preprocessing:
    """The preprocessing of a network's paper, by default ImageNet's mean and standard deviation.

    Clips, and images without three channels, are scaled to 0..1 only.
    """
    stem = spec.stem if isinstance(spec, NetSpec) else None
    mean, std = IMAGENET_MEAN, IMAGENET_STD
    if spec.in_channels != len(mean) or stem is SpaceToDepthStem or spec.frames:
        mean, std = (0.0,) * spec.in_channels, (1.0,) * spec.in_channels
    kernel = "bicubic" if stem is DeepConvStem else "bilinear"
    return Preprocessing(
        resolution=spec.resolution,
        mean=mean,
        std=std,
        kernel=kernel,
        frames=spec.frames,
        frame_stride=FRAME_STRIDE if spec.frames else 1,
    )


def list(pattern: str = "*") -> tuple[str, ...]:  # the last function, as it hides the built-in one
    """The names of the networks that match a pattern, such as `resnet_rs_*` or `timm/*resnet*`.

    Examples:
        >>> import fullstride
        >>> fullstride.zoo.list("genet_*")
        ('genet_light', 'genet_normal', 'genet_large', 'genet_tiny')
    """
    names: Iterable[str] = families.SPECS
    if pattern.startswith("timm/"):
        names = (f"timm/{name}" for name in timm_names())
    return tuple(name for name in names if fnmatchcase(name, pattern))
