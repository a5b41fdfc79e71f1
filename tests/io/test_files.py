"""Every JSON file that is written: a wrong field is one line of ValueError, never another error."""

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from PIL import Image

from fullstride.data.dataset import open_data
from fullstride.data.pack import pack
from fullstride.deploy.exported import Metadata as ExportMetadata
from fullstride.io.records import from_json, to_json
from fullstride.latency.devices import load_profile
from fullstride.latency.profiles import Profile
from fullstride.measure.environment import Environment
from fullstride.measure.protocols import ONLINE, Measurement
from fullstride.nets.bundle import Bundle
from fullstride.nets.families import SPECS
from fullstride.nets.network import Network
from fullstride.nets.preprocessing import Preprocessing
from fullstride.nets.spec import NetSpec
from fullstride.papers.lines import RowFile, SuiteFile
from fullstride.papers.suite import BlocksFile
from fullstride.tasks import find_task
from fullstride.train.autotune import CacheEntry
from fullstride.train.recipes.named import RECIPES
from fullstride.train.recipes.recipe import saved_recipe
from fullstride.train.run_folder import LOG, RUN_CONFIG, RunConfig, read_config, read_log

SPEC = replace(SPECS["genet_tiny"], classes=2, stages=SPECS["genet_tiny"].stages[:1])
HERE = Environment.here()
MEASUREMENT = Measurement(
    name="genet_tiny",
    protocol=ONLINE,
    images_per_s=5.0,
    spread=0.1,
    ms_p50=1.0,
    samples=(1.0, 2.0),
    precision="float32",
    layout="nchw",
    compiled=False,
    environment=HERE,
)
RUN = RunConfig(
    model="genet_tiny",
    weights="",
    data="digits",
    val=None,
    fingerprint="a",
    classes=("b", "c"),
    spec=json.loads(SPEC.to_json()),
    preprocessing=asdict(Preprocessing(resolution=32)),
    recipe=asdict(RECIPES["digits"]),
    efficiency="plain",
    score_every_epochs=1,
    precision="fp32",
    channels_last=True,
    grad_accum_steps=1,
)
NUMBER = dict(
    table="TResNet 3",
    line="TResNet-M",
    quantity="training images/s",
    network="tresnet_m",
    measured=2000.0,
    published=None,
    batch=512,
    resolution=224,
    layout="nhwc",
    made="compiled",
    precision="float16",
)
BLOCK = dict(kind="XX", ratio=1.0, width=64, resolution=7, depth=4, kernel=3)
BLOCK |= dict(ms_per_image=0.5, ms_low=0.4, ms_high=0.6, params=1000, macs=10**6)
ROW = {"epoch": 1, "epochs": 2, "loss": 2.0, "lr": 0.1, "images_per_s": 9.5}
ROW |= {"data_wait_fraction": 0.5}
ROW |= {"val/top1": 0.5, "val/loss": 1.0, "skipped": {"a.jpg": "it is empty"}}
NUMBERS = [7, 0.5, -1, math.nan, math.inf, 10**12 + 1, 10**30, 10**400]
VALUES = [*NUMBERS, "text", True, None, [], {}, [[]]]


def measurement() -> dict[str, Any]:
    return json.loads(MEASUREMENT.to_json())


def read_metadata(data: dict[str, Any]) -> None:
    texts = {k: v if isinstance(v, str) else json.dumps(v) for k, v in data.items()}
    ExportMetadata.from_strings(texts, Path("file.onnx"))


def metadata() -> dict[str, Any]:
    pre = Preprocessing(resolution=32)
    about = ExportMetadata(name="a", classes=("b", "c"), preprocessing=pre, scores={"test": {}})
    structured = ("classes", "preprocessing", "scores", "float_layers")
    return {k: json.loads(v) if k in structured else v for k, v in about.to_strings().items()}


def in_folder(read: Callable[[Path], object], name: str) -> Callable[[Any], object]:
    """A function that writes JSON as the file `name` of a new folder, then calls `read` on it."""

    def write_and_read(data: Any) -> object:
        with TemporaryDirectory() as folder:
            (Path(folder) / name).write_text(json.dumps(data))
            return read(Path(folder))

    return write_and_read


# kind of file -> its valid content and the function that reads it
FILES: dict[str, tuple[Callable[[], dict[str, Any]], Callable[[dict[str, Any]], object]]] = {
    "spec": (lambda: json.loads(SPEC.to_json()), NetSpec.from_json),
    "profile": (
        load_profile("rtx3090").to_dict,
        lambda data: Profile.from_json(json.dumps(data)),
    ),
    "measurement": (measurement, Measurement.from_json),
    "export": (metadata, read_metadata),
    "recipe": (
        lambda: {"recipe": json.loads(json.dumps(asdict(RECIPES["digits"])))},
        partial(saved_recipe, where="run.json"),
    ),
    "run": (
        lambda: json.loads(to_json(RUN)),
        in_folder(partial(read_config, hint="give --data"), RUN_CONFIG),
    ),
    "log": (
        lambda: dict(ROW),
        in_folder(partial(read_log, metric=find_task().metric), LOG),
    ),
    "autotune's cache": (
        lambda: dict(fastest="plain", images_per_s={"plain": 5.0}, environment=asdict(HERE)),
        partial(from_json, CacheEntry, where="cache"),
    ),
    "suite's row": (
        lambda: dict(alike={"device": "a"}, measured={"timm": [measurement()]}, failed={"a": "b"}),
        partial(from_json, RowFile, where="row.json"),
    ),
    "suite's results": (
        lambda: dict(environment=asdict(HERE), numbers=[NUMBER], not_measured=["a"]),
        partial(from_json, SuiteFile, where="results.json"),
    ),
    "blocks": (
        lambda: dict(
            how="measured",
            protocol=asdict(ONLINE),
            precision="float16",
            layout="nhwc",
            environment=asdict(HERE),
            rows=[BLOCK],
        ),
        partial(from_json, BlocksFile, where="blocks.json"),
    ),
}


def paths(data: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in parsed JSON; of a list only the first item."""
    if path:
        yield path
    items = data.items() if isinstance(data, dict) else enumerate(data[:1])
    for key, value in items if isinstance(data, dict | list) else ():
        if isinstance(value, dict | list):
            yield from paths(value, (*path, key))
        else:
            yield (*path, key)


def changed(data: Any, path: tuple[Any, ...], *value: Any) -> Any:
    """A copy of `data` with `value` at `path`, or without that item."""
    copy = json.loads(json.dumps(data))
    parent = copy
    for key in path[:-1]:
        parent = parent[key]
    if value:
        parent[path[-1]] = value[0]
    else:
        del parent[path[-1]]
    return copy


def check(read: Callable[[Any], object], data: Any, path: tuple[Any, ...]) -> int:
    """1 if `read` refuses `data` in one line, 0 if it accepts it."""
    try:
        read(data)
    except ValueError as error:
        lines = str(error).splitlines()
    except Exception as error:
        raise AssertionError(f"{path}: {type(error).__name__} {error}") from error
    else:
        return 0
    assert len(lines) == 1, (path, lines)
    return 1


def check_all(valid: Any, read: Callable[[Any], object], values: list[Any]) -> None:
    read(valid)
    refused = 0
    for path in paths(valid):
        refused += check(read, changed(valid, path), path)
        if isinstance(path[-1], str):
            refused += check(read, changed(valid, (*path[:-1], "unknown field"), 1), path)
        for value in values:
            refused += check(read, changed(valid, path, value), path)
    assert refused > len(list(paths(valid)))


@pytest.mark.parametrize("kind", FILES)
def test_a_wrong_field_of_a_file_is_refused_in_one_line_or_documented(kind):
    valid, read = FILES[kind]
    check_all(valid(), read, VALUES)


def test_a_wrong_field_of_a_bundle_is_refused_in_one_line(tmp_path):
    torch.manual_seed(0)
    Bundle(
        Network(SPEC), name="mine", classes=("a", "b"), preprocessing=Preprocessing(resolution=32)
    ).save(tmp_path / "b")
    path = tmp_path / "b" / "bundle.json"

    def read(data: Any) -> None:
        path.write_text(json.dumps(data))
        Bundle.load(path.parent)

    check_all(
        json.loads(path.read_text()), read, ["text", True, None, math.nan, 10**12 + 1, -1, []]
    )


def test_a_wrong_field_of_an_index_of_shards_is_refused_in_one_line(tmp_path):
    for number in range(10):
        image = tmp_path / "data" / "ab"[number % 2] / f"{number}.png"
        image.parent.mkdir(parents=True, exist_ok=True)
        Image.new("L", (4, 4), number).save(image)
    for _ in pack(open_data(str(tmp_path / "data")), tmp_path / "shards"):
        pass
    path = tmp_path / "shards" / "index.json"
    valid = json.loads(path.read_text())

    def read(data: Any) -> None:
        path.write_text(json.dumps(data))
        open_data(str(path.parent))

    check_all(valid, read, ["text", True, None, math.nan, 10**30, -1, []])
