"""Which networks do the files of a folder hold? By their names and shapes; no values are read."""

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from fullstride.autofit.listing.starts import Start, family_of
from fullstride.nets.bundle import METADATA, read_metadata, spec_from_json
from fullstride.nets.bundle import WEIGHTS as BUNDLE_WEIGHTS
from fullstride.nets.families import SPECS
from fullstride.nets.spec import NetSpec
from fullstride.nets.timm_wrapper import TimmNetwork, TimmSpec, released, timm_spec
from fullstride.nets.weights.convert import difference, find, normalize
from fullstride.nets.weights.hub import HUB
from fullstride.nets.weights.reader import read_shapes
from fullstride.nets.weights.released_files import by_name
from fullstride.strict_json import read_json
from fullstride.tables import pretrained_networks

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".npz")
MAX_FILES = 10_000  # that are looked at below one folder


def examine(root: Path) -> Iterator[Start | str]:
    """The weights below `root`, in order; a line for every file that holds none that fit here."""
    for path in weight_paths(root):
        try:
            yield of_folder(path) if path.is_dir() else of_file(path, root)
        except ValueError as error:
            yield str(error)


def weight_paths(root: Path) -> Iterator[Path]:
    """Files that may be weights, and folders of bundles and runs, below `root` or `root` itself."""
    if not root.is_dir():
        yield root
        return
    count = 0
    for name, folders, files in os.walk(root):
        folder = Path(name)
        if METADATA in files or "run.json" in files:
            folders.clear()
            yield folder
            continue
        folders.sort()
        for file in sorted(files):
            count += 1
            if count > MAX_FILES:
                raise ValueError(
                    f"{root} has more than {MAX_FILES:,} files: give a folder that has the weights "
                    "alone"
                )
            if file.lower().endswith(SUFFIXES):
                yield folder / file


def of_folder(folder: Path) -> Start:
    """A bundle, or that of a run that has ended. Raises ValueError for others."""
    bundle = folder
    if (folder / "run.json").exists():
        bundle = folder / "bundle"
        if not bundle.is_dir():
            raise ValueError(f"{folder} is a run that has not ended: train it to its end")
    metadata = read_metadata(bundle)
    if not (bundle / BUNDLE_WEIGHTS).is_file():
        raise ValueError(f"{bundle} has no {BUNDLE_WEIGHTS}: save the bundle again")
    spec = spec_from_json(metadata.spec, f"{bundle / METADATA}: spec")
    model = f"timm/{spec.name}" if isinstance(spec, TimmSpec) else name_of(spec)
    model = model or str(bundle / METADATA)
    return Start(
        model=model,
        weights=str(folder),
        label=str(folder),
        family=family_of(model, spec),
        trained_at=metadata.preprocessing.resolution,
        channels=spec.in_channels,
        licence=metadata.licence,
    )


def name_of(spec: NetSpec) -> str:
    """The name of the zoo that stands for a spec, whatever its classes and images; or ""."""
    for name, own in SPECS.items():
        changes = dict(classes=spec.classes, in_channels=spec.in_channels)
        if replace(own, resolution=spec.resolution, source=spec.source, **changes) == spec:
            return name
    return ""


def of_file(path: Path, root: Path) -> Start:
    """The network of a file of weights: one of the zoo by its shapes, or timm's of that name.

    The name may be that of the file or of a folder around it, up to `root`. Raises ValueError, in
    one line, for a file that cannot be read, and for weights of another network.
    """
    state = read_shapes(path)
    names = list(timm_names_of(path, root))
    tagged = next((name for name in names if "." in name), "")
    try:
        # of several networks with these shapes the file's name decides, as in `zoo.load`
        release = by_name(path)
        match = find(normalize(state, ema=None), release.network if release else None)
    except ValueError:
        for name in names:
            if classes := timm_classes(state, name):
                return of_timm(path, name, classes)
        network = f"timm's {names[0]}" if names else "any network of the zoo"
        raise ValueError(
            f"{path}: not weights of {network}: give the file the name of its network, as "
            "timm's NAME.TAG"
        ) from None
    config = released(tagged) if tagged else None
    side = release.resolution if release else match.spec.resolution
    return Start(
        model=match.name,
        weights=str(path),
        label=str(path),
        family=family_of(match.name, match.spec),
        trained_at=config.input_size[1] if config else side,
        channels=match.spec.in_channels,
        top1=published_top1(tagged),
        licence=config.license or "" if config else "",
    )


def of_timm(path: Path, name: str, classes: int) -> Start:
    spec = timm_spec(name, classes=classes)
    config = released(name) if "." in name else None
    return Start(
        model=f"timm/{name}",
        weights=str(path),
        label=str(path),
        family=family_of(f"timm/{name}", spec),
        trained_at=spec.resolution,
        top1=published_top1(name),
        licence=config.license or "" if config else "",
    )


def timm_names_of(path: Path, root: Path) -> Iterator[str]:
    """NAME.TAG or NAME of timm that the file, its `config.json` or a folder around it states."""
    import timm

    folders = [*reversed(path.relative_to(root).parts[:-1]), root.resolve().name]
    words = [config_name(path.with_name("config.json")), path.stem, *folders]
    for word in dict.fromkeys(words):
        name = word.removeprefix("models--").removeprefix("timm--")
        architecture = name.partition(".")[0]
        if timm.is_model(architecture):
            yield name if "." in name and released(name) else architecture


def config_name(path: Path) -> str:
    """The network that the hub's `config.json` beside a file states; "" if there is none."""
    if not path.is_file():
        return ""
    try:
        config: Any = read_json(path)
    except ValueError:
        return ""
    if not isinstance(config, dict) or not isinstance(config.get("architecture"), str):
        return ""
    settings = config.get("pretrained_cfg")
    tag = settings.get("tag") if isinstance(settings, dict) else ""
    return f"{config['architecture']}.{tag}" if tag else config["architecture"]


def timm_classes(state: dict[str, Any], name: str) -> int:
    """The classes of weights of timm's network `name`; 0 for weights of another one."""
    with torch.device("meta"):
        net = TimmNetwork(timm_spec(name))
        classifier = state.get(f"{net.classifier.removeprefix('net.')}.weight")
        if classifier is not None and len(classifier) != net.spec.classes:
            net = TimmNetwork(timm_spec(name, classes=len(classifier)))
    expected = {key: tuple(value.shape) for key, value in net.net.state_dict().items()}
    return 0 if difference(expected, state) else net.spec.classes


def published_top1(name: str) -> dict[int, float]:
    """Of timm's NAME.TAG, by resolution; empty where the table does not have it."""
    own = {weights: f"{model}.{weights.partition('.')[2]}" for model, weights in HUB.items()}
    weights = own.get(name, f"timm/{name}")
    return {row.resolution: row.top1 for row in pretrained_networks() if row.weights == weights}
