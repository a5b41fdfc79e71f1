"""Lists released weights: from the package's table, and from files by their names."""

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import torch

from fullstride.autofit.settings import Licence
from fullstride.io.records import read_json
from fullstride.nets import blocks, zoo
from fullstride.nets.bundle import METADATA, read_metadata, spec_from_json
from fullstride.nets.bundle import WEIGHTS as BUNDLE_WEIGHTS
from fullstride.nets.checkpoints import timm_network
from fullstride.nets.families import SPECS
from fullstride.nets.spec import NetSpec, TimmSpec
from fullstride.nets.timm_wrapper import pretrained_config, timm_spec
from fullstride.nets.weights import hub
from fullstride.nets.weights.convert import difference, find, normalize
from fullstride.nets.weights.hub import HUB, by_name
from fullstride.nets.weights.reader import read_shapes
from fullstride.study.trials import Work
from fullstride.tables import PERMISSIVE, PretrainedNetwork, pretrained_networks, resolutions_around
from fullstride.train.run_folder import RUN_CONFIG, read_config

# Initial weights, and the filter of their licences.

RGB = 3  # channels that released weights take
OWN = "own"  # licence of weights from a run with random initial weights: nobody else's applies
FAMILY_OF_STEM: dict[type[blocks.Stem], str] = {
    blocks.SpaceToDepthStem: "tresnet",
    blocks.DeepConvStem: "resnet_rs",
    blocks.ConvStem: "genet",
    blocks.PoolStem: "resnet",
    blocks.DeepStem: "resnet_d",
}


@dataclass(frozen=True, kw_only=True)
class Start:
    """A network with initial weights."""

    label: str  # for people: a path, or the name of released weights
    model: str  # argument of `zoo.create`
    weights: str  # argument of `run.train`
    family: str
    trained_at: int  # pixels a side of the weights' training
    channels: int = RGB
    params: int | None = None
    top1: Mapping[int, float] = field(default_factory=dict)  # resolution -> published top-1
    licence: str = ""  # in the authors' words, or `OWN`; "" if unknown

    @property
    def resolutions(self) -> tuple[int, ...]:
        """The input sizes that the network accepts, near the size of its weights' training."""
        if self.model.startswith("timm/"):
            config = pretrained_config(self.model.removeprefix("timm/"))
            if config and config.fixed_input_size:
                return (self.trained_at,)
        return resolutions_around(self.trained_at)


def family_of(model: str, spec: NetSpec | TimmSpec) -> str:
    """The family by the table of released weights, else by the stem or by timm's name."""
    if isinstance(spec, NetSpec):
        return FAMILY_OF_STEM.get(spec.stem, model)
    architecture = spec.name.partition(".")[0]
    for row in pretrained_networks():
        if row.name == f"timm/{architecture}":
            return row.family
    return re.sub(r"\d+.*", "", architecture.removeprefix("tf_").split("_")[0])


def allowed_by(licence: Licence, starts: Sequence[Start]) -> Work[list[Start]]:
    """The weights that the licence filter permits; yields a line on the others.

    Raises ValueError if none remains.
    """
    others = [start for start in starts if start.licence not in (*PERMISSIVE, OWN)]
    if licence == "any" or not others:
        return list(starts)
    licences = ", ".join(sorted({start.licence or "an unknown licence" for start in others}))
    line = f"weights under {licences}: {len(others)}, such as {others[0].label}"
    if len(others) == len(starts):
        raise ValueError(
            f"no candidate has a permissive licence ({line}): use --licence any, or other networks"
        )
    yield f"left out by the licence filter: {line}; --licence any lifts it"
    return [start for start in starts if start not in others]


# Tags of weights that are better initial weights than more accurate ones of the same network, which
# were trained further on ImageNet-1k (PaddleClas's documentation of HGNetV2).
BETTER_STARTS = ("ssld_stage1_in22k_in1k",)


def listed(names: Sequence[str] = ()) -> list[Start]:
    """All weights of the table, or the weights of `names`, in the table or not.

    Names without released weights are left out.
    """
    rows = pretrained_networks()
    if not names:
        return [of_rows(group) for group in by_weights(rows)]
    starts = []
    for name in names:
        own = [group for group in by_weights(rows) if name in (group[0].name, group[0].weights)]
        starts += [of_rows(group) for group in own] or unlisted(name)
    return starts


def by_weights(rows: Iterable[PretrainedNetwork]) -> Iterable[list[PretrainedNetwork]]:
    """Group rows by weights; the rows of a group differ in the resolution of top-1."""
    groups: dict[str, list[PretrainedNetwork]] = {}
    for row in rows:
        groups.setdefault(row.weights, []).append(row)
    return groups.values()


def of_rows(rows: Sequence[PretrainedNetwork]) -> Start:
    row = rows[0]
    ours = not row.name.startswith("timm/")
    is_default = ours and hub.HUB[row.name].partition(".")[2] == row.tag
    return Start(
        label=row.weights,
        model=row.name if ours else row.weights,
        weights=row.weights if ours and not is_default else "hub",
        family=row.family,
        trained_at=row.trained_at,
        params=row.params,
        top1={row.resolution: row.top1 for row in rows},
        licence=row.licence,
    )


def unlisted(name: str) -> list[Start]:
    """The released weights of a name that is not in the table; [] without any."""
    if zoo.is_spec_file(name):
        return []
    try:
        config = hub.hub_config(hub.timm_name(name))
    except ValueError:
        return []
    model = without_tag(name)
    return [
        Start(
            label=name,
            model=model,
            weights="hub" if model == name else name,
            family=family_of(model, zoo.spec(model)),
            trained_at=config.input_size[1],
            channels=RGB,
            licence=config.license or "",
        )
    ]


def without_tag(name: str) -> str:
    """The network of `NAME.TAG` if the zoo has it; other names stay as they are."""
    network = name.partition(".")[0]
    return network if network in hub.HUB else name


def best_starts(starts: Iterable[Start], most: int) -> Iterator[Start]:
    """The best initial weights of each network and training resolution.

    Weights for images of more than `most` pixels a side only if the network has no others.
    """

    def quality(start: Start) -> tuple[bool, float]:
        return start.label.partition(".")[2] in BETTER_STARTS, max(start.top1.values(), default=0)

    networks: dict[str, dict[int, list[Start]]] = {}
    for start in starts:
        sides = networks.setdefault(start.model.partition(".")[0], {})
        sides.setdefault(start.trained_at, []).append(start)
    for sides in networks.values():
        suitable = [side for side in sides if side <= most] or [min(sides)]
        yield from (max(sides[side], key=quality) for side in suitable)


def cached(starts: Iterable[Start]) -> Iterator[Start]:
    """The weights in the hub's local cache."""
    for start in starts:
        try:
            is_cached = hub.is_cached(start.label)
        except ValueError:  # an earlier timm does not list them
            continue
        if is_cached:
            yield start


# Files of weights are recognised by names and shapes; no values are read.

SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".npz")
MAX_FILES = 10_000  # most files below one folder


def examine(root: Path) -> Iterator[Start | str]:
    """The weights below `root`, in order, and a line for every file without usable weights."""
    for path in weight_paths(root):
        try:
            yield of_folder(path) if path.is_dir() else of_file(path, root)
        except ValueError as error:
            yield str(error)


def in_repository(name: str) -> Iterator[Start | str]:
    """The bundle `hf:USER/NAME` at its latest commit, or a line if it does not fit.

    Raises ValueError, in one line, if it cannot be downloaded.
    """
    folder = zoo.local_path(name)
    try:
        start = of_folder(folder)
    except ValueError as error:
        yield str(error).replace(str(folder), name)
    else:
        yield replace(start, label=name, weights=f"{name.partition('@')[0]}@{folder.name}")


def weight_paths(root: Path) -> Iterator[Path]:
    """Files that may be weights, and folders of bundles and runs, below `root` or `root` itself."""
    if not root.is_dir():
        yield root
        return
    count = 0
    for name, folders, files in os.walk(root):
        folder = Path(name)
        if METADATA in files or RUN_CONFIG in files:
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
    """The weights of a bundle or a finished run. Raises ValueError for other folders."""
    bundle, begins_at_random = folder, False
    if (folder / RUN_CONFIG).exists():
        bundle = folder / "bundle"
        if not bundle.is_dir():
            raise ValueError(f"{folder} is a run that has not ended: train it to its end")
        begins_at_random = not read_config(folder, f"give {bundle}").weights
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
        licence=metadata.licence or (OWN if begins_at_random else ""),
    )


def name_of(spec: NetSpec) -> str:
    """The name in the zoo of a spec, whatever its classes and images; or ""."""
    for name, own in SPECS.items():
        changes = dict(classes=spec.classes, in_channels=spec.in_channels)
        if replace(own, resolution=spec.resolution, source=spec.source, **changes) == spec:
            return name
    return ""


def of_file(path: Path, root: Path) -> Start:
    """The network of a file of weights: from the zoo by its shapes, or from timm by a name.

    The name is the name of the file or of a folder around it, up to `root`. Raises ValueError, in
    one line, for an unreadable file, and for weights of another network.
    """
    state = read_shapes(path)
    names = list(timm_names_of(path, root))
    tagged = next((name for name in names if "." in name), "")
    try:
        # if several networks have these shapes, the file's name decides, as in `zoo.load`
        release = by_name(path)
        match = find(normalize(state, ema=None), release.network if release else None)
    except ValueError:
        why = unnamed(path)
        for name in names:
            try:
                spec = timm_spec(name, classes=timm_classes(state, name))
                return of_network(path, f"timm/{name}", spec, name)
            except ValueError as error:
                why = f"{path}: {error}"
        raise ValueError(why) from None
    spec = replace(match.spec, resolution=release.resolution) if release else match.spec
    return of_network(path, match.name, spec, tagged)


def of_network(path: Path, model: str, spec: NetSpec | TimmSpec, name: str) -> Start:
    """The weights of a known network; `name`: timm's NAME.TAG if the weights are released."""
    config = pretrained_config(name) if "." in name else None
    return Start(
        model=model,
        weights=str(path),
        label=str(path),
        family=family_of(model, spec),
        trained_at=config.input_size[1] if config else spec.resolution,
        channels=spec.in_channels,
        top1=published_top1(name),
        licence=config.license or "" if config else "",
    )


def timm_names_of(path: Path, root: Path) -> Iterator[str]:
    """timm's NAME.TAG or NAME in the names of the file and its folders and in `config.json`."""
    import timm

    folders = [*reversed(path.relative_to(root).parts[:-1]), root.resolve().name]
    words = [config_name(path.with_name("config.json")), path.stem, *folders]
    for word in dict.fromkeys(words):
        name = word.removeprefix("models--").removeprefix("timm--")
        architecture = name.partition(".")[0]
        if timm.is_model(architecture):
            yield name if "." in name and pretrained_config(name) else architecture


def config_name(path: Path) -> str:
    """The network in the hub's `config.json` beside a file; "" if there is none."""
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


def unnamed(path: Path) -> str:
    """An error for weights whose shapes are not in the zoo and whose name is not timm's."""
    names = [row.weights.removeprefix("timm/") for row in pretrained_networks()]
    stem = re.sub(r"-[0-9a-f]{8}$", "", path.stem)  # without the hash that torch.hub adds
    close = get_close_matches(stem.replace("-", "_"), names, n=1)
    hint = f", such as {close[0]}" if close else ""
    return f"{path}: weights of no network of the zoo: name the file as timm's NAME.TAG{hint}"


def timm_classes(state: dict[str, Any], name: str) -> int:
    """The classes of the weights of timm's network `name`. Raises ValueError for others."""
    with torch.device("meta"):
        net = timm_network(name, state)
    expected = {key: tuple(value.shape) for key, value in net.net.state_dict().items()}
    if reason := difference(expected, state):
        alien = next((f"{key} is no tensor of it" for key in state if key not in expected), reason)
        raise ValueError(f"not weights of timm's {name}: {alien}")
    return net.spec.classes


def published_top1(name: str) -> dict[int, float]:
    """Published top-1 of timm's NAME.TAG by resolution; {} if it is not in the table."""
    own = {weights: f"{model}.{weights.partition('.')[2]}" for model, weights in HUB.items()}
    weights = own.get(name, f"timm/{name}")
    return {row.resolution: row.top1 for row in pretrained_networks() if row.weights == weights}
