"""Saves and loads bundles: folders of `weights.safetensors` and `bundle.json`."""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from reprlib import repr as shortened
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import nn

from fullstride.io import records
from fullstride.io.console import count_of
from fullstride.io.records import MAX_JSON_BYTES, Positive, read_json
from fullstride.io.writing import Output, atomic_write, has_keys
from fullstride.nets.backbone import Backbone, HeadBuilder, Spec
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing
from fullstride.nets.spec import NetSpec, TimmSpec
from fullstride.nets.timm_wrapper import TimmNetwork, timm_spec
from fullstride.nets.weights.convert import fit, inflated
from fullstride.nets.weights.key_maps import no_init
from fullstride.nets.weights.reader import COMPILED, UNPACKED_LIMIT, read_flat

FORMAT = 1
HINT = "give the folder of a bundle or of a run"
METADATA, WEIGHTS = "bundle.json", "weights.safetensors"
FILE_LIMITS = {METADATA: MAX_JSON_BYTES, WEIGHTS: UNPACKED_LIMIT}  # bytes, of downloaded files
OUTPUT = Output(
    "a bundle",
    "",
    lambda folder: has_keys("spec", "classes", "preprocessing")(folder / METADATA),
    (METADATA, WEIGHTS),
)


@dataclass(frozen=True, kw_only=True)
class About:
    """The metadata that bundles and exported files have of their network."""

    name: str  # in tables: the name of the network, or one that the user chose
    classes: tuple[str, ...]  # in the order of the outputs
    preprocessing: Preprocessing  # of images
    scores: Mapping[str, Any]  # split -> score -> value
    source: str = ""  # where the weights come from
    licence: str = ""  # of the weights, in the authors' words; "" if unknown
    task: str = "classify"  # name of the task that the network was trained for
    temperature: Positive = 1.0  # divisor of the logits, see `Classify.temperature`
    mirror: bool = True  # whether the mirror image of a picture has the same class
    # further values fitted on the validation split, see `Task.fit`; the task checks them
    task_state: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Metadata(About):
    """The content of `bundle.json`, whose fields are as in `Bundle`."""

    format: Literal[1]
    spec: Mapping[str, Any]  # of `NetSpec`, or {"timm": ...} of `TimmSpec`
    recipe: Mapping[str, Any]
    environment: Mapping[str, Any]

    def __post_init__(self) -> None:
        check_scores(self.scores)


FIELDS = [each.name for each in fields(Metadata) if each.name not in ("format", "spec")]


def check_scores(scores: Mapping[str, Any]) -> None:
    """Raise ValueError unless `scores` has numbers by split and name; "skipped" is an object."""
    for split, values in scores.items():
        if not isinstance(values, Mapping):
            raise ValueError(f"scores of {shortened(split)} are {shortened(values)}: use an object")
        for name, value in values.items():
            if not isinstance(value, Mapping if name == "skipped" else int | float):
                raise ValueError(
                    f"score {shortened(name)} of {shortened(split)} is {shortened(value)}: use a "
                    "number"
                )


def find_score(scores: Mapping[str, Any], split: str, name: str, where: str) -> float:
    """A score of a split. Raises ValueError if it is missing or not finite."""
    value = scores.get(split, {}).get(name)
    if value is None or not math.isfinite(value):
        raise ValueError(f"{where} has no score {name} of the {split} split: train it to its end")
    return value


def read_metadata(folder: Path) -> Metadata:
    """The content of `bundle.json`. Raises ValueError in one line."""
    path = folder / METADATA
    data = read_json(path, HINT)
    version = data.get("format", FORMAT) if isinstance(data, dict) else FORMAT
    if version != FORMAT:
        raise ValueError(f"{path} has format {version!r}, this version reads format {FORMAT}")
    return records.from_json(Metadata, data, str(path))


def no_head(metadata: Metadata, net: Backbone) -> nn.Module | None:
    return None


@dataclass(frozen=True, kw_only=True)
class Bundle(About):
    """A trained network with its metadata: enough to use it, and to know its origin.

    Examples:
        >>> import fullstride
        >>> bundle = fullstride.train_network("digits", "genet_tiny", "runs/few", steps=2)
        >>> bundle.task, bundle.preprocessing.resolution, bundle.scores["test"]["images"]
        ('classify', 48, 500)
        >>> bundle.save("bundles/few")
        >>> fullstride.zoo.load("bundles/few").name
        'few'
    """

    net: Backbone = field(kw_only=False)  # in evaluation mode
    scores: Mapping[str, Any] = field(default_factory=dict)  # split -> score -> value
    recipe: Mapping[str, Any] = field(default_factory=dict)  # how it was trained
    environment: Mapping[str, Any] = field(default_factory=dict)  # where it was trained

    def __repr__(self) -> str:
        classes = f"{len(self.classes):,}: {shortened(self.classes)}"
        return (
            f"Bundle({self.name!r}, {self.task}, classes {classes}, {self.preprocessing},\n"
            f"  scores {shortened(self.scores)}, {self.source!r},\n"
            f"  {self.net!r})"
        )

    @property
    def has_class_names(self) -> bool:
        """Whether `classes` are names; numbers are names if the network was trained on them."""
        numbers = tuple(map(str, range(len(self.classes))))
        return bool(self.recipe) or self.classes != numbers

    @property
    def may_mirror(self) -> bool:
        """Whether mirror images have the same class, by the data and by the recipe."""
        return self.mirror and self.recipe.get("hflip_prob", 0.5) != 0

    def score(self, split: str, name: str) -> float:
        """A score of a split. Raises ValueError if it is missing or not finite."""
        return find_score(self.scores, split, name, self.name)

    def save(self, folder: str | Path) -> None:
        """Write the folder atomically, in place of an earlier bundle.

        Raises ValueError for a folder with other files, which stays as it is.
        """
        metadata = Metadata(
            format=FORMAT,
            spec=json.loads(self.net.spec.to_json()),
            **{name: getattr(self, name) for name in FIELDS},
        )
        with atomic_write(Path(folder), OUTPUT) as temporary:
            temporary.mkdir()
            state = {
                name.replace(COMPILED, ""): value.detach().cpu().contiguous()
                for name, value in self.net.state_dict().items()
            }
            save_file(state, temporary / WEIGHTS)
            (temporary / METADATA).write_text(json.dumps(asdict(metadata), indent=1))

    @staticmethod
    def load(
        folder: str | Path, head: Callable[[Metadata, Backbone], nn.Module | None] = no_head
    ) -> "Bundle":
        """The bundle in `folder`. `head` builds the network's `task_head` from the metadata.

        Raises ValueError, in one line, for a folder that is not a complete bundle.
        """
        folder = Path(folder)
        metadata = read_metadata(folder)
        try:
            net = load_network(metadata.spec, folder / WEIGHTS, partial(head, metadata))
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
        bundle = Bundle(net, **{name: getattr(metadata, name) for name in FIELDS})
        if len(bundle.classes) != bundle.net.spec.classes:
            raise ValueError(
                f"{folder}: {count_of(len(bundle.classes), 'class name')} for "
                f"{bundle.net.spec.classes} logits"
            )
        return bundle


def build(spec: Spec, head: HeadBuilder | None = None) -> Backbone:
    """The network of a spec with fresh weights; `head` builds its `task_head`."""
    net = Network(spec) if isinstance(spec, NetSpec) else TimmNetwork(spec)
    if head is not None:
        net.task_head = head(net)
    return net


def spec_from_json(data: Any, where: str) -> Spec:
    """Read the JSON of either spec. Raises ValueError in one line that begins with `where`."""
    if isinstance(data, Mapping) and "timm" in data:
        timm = records.from_json(TimmSpec, data["timm"], where)
        return timm_spec(**{name: getattr(timm, name) for name in data["timm"]})
    return NetSpec.from_json(data, where)


def read_spec(path: Path) -> Spec:
    """The spec in a JSON file, written by `to_json` or a part of a `bundle.json` or `run.json`."""
    data = read_json(path, "give the JSON file of a network's spec, or a name")
    where = str(path)
    if isinstance(data, Mapping) and "spec" in data:
        data, where = data["spec"], f"{path}: spec"
    return spec_from_json(data, where)


def load_network(spec_data: Mapping[str, Any], weights: Path, head: HeadBuilder) -> Backbone:
    """The network of a bundle's spec. Shapes are compared before memory is allocated."""
    spec = spec_from_json(spec_data, "bundle.json: spec")
    state = read_flat(weights)
    # The initialisation is slow on the meta device, and needless.
    bare = replace(spec, init=no_init) if isinstance(spec, NetSpec) else spec
    with torch.device("meta"):
        expected = build(bare, head)
    if expected.task_head is None and any(name.startswith("task_head.") for name in state):
        raise ValueError("the network has the head of a task: load it by fullstride.tasks.load")
    state = fit(expected.state_dict(), state)
    net = build(spec, head)
    net.load_state_dict(state)
    return net.eval()


def copy_weights(source: nn.Module, target: nn.Module, leave: tuple[str, ...] = ()) -> list[str]:
    """Copy every weight whose name and shape agree; returns the other names in `target`.

    Names that begin with one of `leave` are not copied. Kernels of a network of images are inflated
    for a network of clips, see `inflated`.
    """
    old = target.state_dict()
    state = inflated(source.state_dict(), old)
    unchanged = [
        name
        for name, value in old.items()
        if name.startswith(leave) or name not in state or state[name].shape != value.shape
    ]
    weights = {name: state[name] for name in old if name not in unchanged}
    target.load_state_dict(weights, strict=False)
    return unchanged


def reorder_outputs(net: Backbone, outputs: Sequence[int]) -> None:
    """Reorder the outputs of classifiers and of the head: new output i is the old `outputs[i]`."""
    for path, each in (dict.fromkeys(net.classifiers, 1) | net.class_rows).items():
        modules = net.get_submodule(path).modules()
        layers = [layer for layer in modules if isinstance(layer, nn.Linear | nn.Conv2d)]
        for parameter in layers[-1].parameters() if layers else ():
            rows = parameter.data.unflatten(0, (-1, each))
            first = len(rows) - len(outputs)
            order = [*range(first), *(first + output for output in outputs)]
            parameter.data = rows[order].flatten(0, 1)
