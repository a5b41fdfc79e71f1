"""What is refused in one line, in every room: what was given, and what would work."""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import bundles
import pytest
import torch
from torch import nn

from fullstride import tasks
from fullstride.data.dataset import open_data
from fullstride.data.transforms.crop import Augmentation
from fullstride.deploy.formats import onnx, openvino, torch_export, triton_server
from fullstride.measure import bench as batch_sizes
from fullstride.measure import bench_by_name
from fullstride.measure.bench import BenchOptions, bench
from fullstride.measure.operators import Operators
from fullstride.measure.protocols import THROUGHPUT
from fullstride.measure.workload import EAGER
from fullstride.nets import zoo
from fullstride.nets.blocks import Block, Style
from fullstride.nets.families import SPECS
from fullstride.papers import figures
from fullstride.tasks.classify import Classify
from fullstride.train import run, run_folder
from fullstride.train.batches import check_task
from fullstride.train.compute import SINGLE_PROCESS
from fullstride.train.loop import Trainer, build_trainer
from fullstride.train.recipes.choice import RunOptions
from fullstride.train.recipes.named import FINETUNE
from fullstride.train.scoring import evaluate, matching_data

DIGITS = open_data("digits")


class Detect(Classify):
    name = "detect"
    single_label = False


class Empty:
    """Batches of a data set whose images cannot be read."""

    def __len__(self) -> int:
        return 0

    def epoch(self, number: int, start: int = 0) -> Iterator[Any]:
        return iter(())


def learner(**changes: Any) -> Trainer:
    net = zoo.create("genet_tiny")
    return build_trainer(net, Classify(), replace(FINETUNE, **changes), 10, None, SINGLE_PROCESS)


def timm_without_rate() -> None:
    zoo.create("timm/vgg11", classes=2).regularise(drop_path=0.1)


def dropped_embedding() -> None:
    net = zoo.create("timm/resnet18", classes=2).train()
    net.regularise(dropout=0.1)
    net.embed(torch.zeros(2, 3, 64, 64))


REFUSALS: dict[str, tuple[Callable[[], Any], str]] = {
    "rotation": (
        lambda: Augmentation(rotation_degrees=181),
        "rotation_degrees 181: .* at most 180",
    ),
    "reference": (
        lambda: bench({"a": nn.Conv2d(3, 8, 1)}, THROUGHPUT, options=BenchOptions(reference="b")),
        "reference b is not measured: choose from a",
    ),
    "nothing to measure": (lambda: bench_by_name.plan(()), "name one or more networks"),
    "no operators": (lambda: Operators.of([]), "no operators"),
    "multiplier": (lambda: SPECS["genet_tiny"].scaled(width=0), "width multiplier 0: .* above 0"),
    "task": (lambda: tasks.find_task("detection"), "no task named 'detection': .*classify"),
    "mixed targets": (lambda: check_task(Detect(), replace(FINETUNE, mixup=0.2)), "recipe.mixup"),
    "auto": (lambda: learner(efficiency="auto"), "recipe.efficiency auto .*: use plain"),
    "steps of checkpoints": (
        lambda: next(
            run.train(Path("r"), "m", DIGITS, FINETUNE, RunOptions(checkpoint_every_steps=-1))
        ),
        "checkpoint_every_steps -1: use",
    ),
    "no image to score on": (
        lambda: evaluate(nn.Flatten(), Classify(), Empty()),
        "none of the images to score on can be read",
    ),
    "images of no run": (
        lambda: matching_data("no/run", bundles.small_bundle()),
        "no/run is not a run .*--data",
    ),
    "no times of blocks": (
        lambda: figures.blocks([], figures.Bench()),
        "no times of blocks: name a profile",
    ),
    "drop path of timm": (timm_without_rate, "timm/vgg11 has no drop_path_rate"),
    "dropout of timm": (dropped_embedding, "resnet18 may apply dropout .*dropout to 0"),
    "embedding of timm": (
        lambda: without_head().embed(torch.zeros(1, 3, 64, 64)),
        "no embedding with a linear classifier: choose another",
    ),
    "intermediate maps": (
        lambda: without_maps().features(torch.zeros(1, 3, 32, 32)),
        "no intermediate maps: choose another",
    ),
}


def without_head() -> Any:
    net = zoo.create("timm/resnet18", classes=2, resolution=64)
    net.net.forward_head = None
    return net


def without_maps() -> Any:
    net = zoo.create("timm/resnet18", classes=2)
    net.net = nn.Identity()
    return net


@pytest.mark.parametrize(("call", "message"), REFUSALS.values(), ids=REFUSALS)
def test_what_cannot_be_is_refused_in_one_line(call, message):
    with pytest.raises(ValueError, match=message) as refused:
        call()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("package", "call"),
    [
        ("onnx", lambda: onnx.trace(None, torch.float32)),
        ("onnxruntime.quantization", lambda: onnx.quantize(None, None)),
        ("openvino", openvino.openvino),
    ],
)
def test_a_package_that_is_not_installed_is_named_with_its_command(package, call, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ValueError, match=f"{package.partition('.')[0]}.*pip install"):
        call()
    if package == "openvino":
        assert "pip install" in openvino.missing()


def test_tensorboard_is_named_with_its_command(monkeypatch, tmp_path):
    monkeypatch.setattr(run_folder, "find_spec", lambda _: None)
    with pytest.raises(ValueError, match=r"pip install 'fullstride\[log\]'"):
        run_folder.open_board(tmp_path)


def test_without_a_compiler_no_file_is_compiled_ahead_of_time(monkeypatch):
    from torch._inductor import cpp_builder

    def missing() -> str:
        raise RuntimeError("no compiler")

    assert torch_export.compiler_missing() == ""
    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", missing)
    assert "C++ compiler" in torch_export.compiler_missing()


@pytest.mark.parametrize("open_file", [torch_export.open_pt2, torch_export.open_aoti])
def test_a_damaged_program_is_refused_in_one_line(open_file, tmp_path):
    path = tmp_path / "net.pt2"
    path.write_bytes(b"PK\3\4 not an archive")
    with pytest.raises(ValueError, match=str(path)) as refused:
        open_file(path, 1)
    assert "\n" not in str(refused.value)


def test_a_program_without_metadata_is_not_ours(tmp_path):
    with pytest.raises(ValueError, match=str(tmp_path)):
        torch_export.exported_model(tmp_path, "{", lambda x: x, "graph", 1)


def test_a_repository_of_models_without_one_is_refused(tmp_path):
    with pytest.raises(ValueError, match="no model that can be run here"):
        triton_server.open_file(tmp_path, 1)


def test_figures_are_not_written_over_a_file(tmp_path):
    (tmp_path / "out").write_text("mine")
    with pytest.raises(ValueError, match="out is a file: give a path in a folder"):
        list(figures.write_figures((), (), (), tmp_path / "out"))
    assert (tmp_path / "out").read_text() == "mine"


def test_a_block_of_ones_own_must_say_what_it_is():
    style = dict(inner=4, kernel=3, stride=1, groups=1, se=None, style=Style())
    with pytest.raises(NotImplementedError):
        Block(4, 4, **style)


def test_a_path_that_is_missing_is_not_a_network():
    with pytest.raises(ValueError, match="runs/a"):
        zoo.create(str(Path("runs") / "a"))


def test_memory_that_a_cpu_does_not_have_is_refused_before_a_measurement(monkeypatch):
    monkeypatch.setattr(batch_sizes.max_batch, "available_bytes", lambda: 2**20)
    part = replace(THROUGHPUT, work="training", resolution=64)
    with pytest.raises(MemoryError):
        batch_sizes.check_room(zoo.create("genet_tiny"), part, torch.device("cpu"), 3, EAGER)
    batch_sizes.check_room(zoo.create("genet_tiny"), part, torch.device("cuda"), 3, EAGER)


def test_networks_that_take_other_channels_are_not_measured_together():
    with pytest.raises(ValueError, match="one input: a takes 1, b takes 3 channels"):
        zoo.measurable(["genet_tiny"], {"a": 1, "b": 3})
