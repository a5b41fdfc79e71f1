"""Reads and writes a run folder: configuration, log, last checkpoint and best weights."""

import json
import os
import platform
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fullstride.data.dataset import DataSet
from fullstride.data.readers.splits import SplitRule
from fullstride.io import writing
from fullstride.io.console import count_of
from fullstride.io.locks import RUN_LOCK, hold
from fullstride.io.records import (
    Count,
    NonNegative,
    Positive,
    PositiveInt,
    differences,
    from_json,
    read_json,
    to_json,
    write_json,
)
from fullstride.nets import bundle
from fullstride.nets.preprocessing import Preprocessing, WeightsKind
from fullstride.nets.spec import NetSpec
from fullstride.nets.weights.reader import read_data
from fullstride.tasks import find_task
from fullstride.tasks.task import Metric
from fullstride.train.compute import SINGLE_PROCESS, DistributedContext
from fullstride.train.optimizer import Muon, is_matrix
from fullstride.train.recipes.choice import DEFAULTS, NamedRecipe, RecipeChoice, RunOptions, case_of
from fullstride.train.recipes.recipe import Recipe, saved_recipe

# Types of a checkpoint, and checks of its tensors.


# The state of each optimizer for a parameter, in the library's order.
OPTIMIZER_TENSORS = {
    "SGD": ("momentum_buffer",),
    "SGDW": ("momentum_buffer",),
    "AdamW": ("step", "exp_avg", "exp_avg_sq"),
    "Lamb": ("exp_avg", "exp_avg_sq"),
    "Muon": ("step", "momentum_buffer"),  # of weights of layers
    "RMSpropTF": ("step", "square_avg", "momentum_buffer"),
}


def state_names(optimizer: torch.optim.Optimizer, parameter: Tensor) -> tuple[str, ...]:
    """The names of the tensors that an optimizer stores for a parameter."""
    if isinstance(optimizer, Muon) and not is_matrix(parameter):
        return OPTIMIZER_TENSORS["AdamW"]
    return OPTIMIZER_TENSORS[type(optimizer).__name__]


@dataclass(frozen=True)
class OptimizerState:
    state: Mapping[int, Mapping[str, Tensor | None]]
    param_groups: tuple[Mapping[str, Any], ...]


@dataclass(frozen=True)
class TrainingState:
    """The state after `epochs` whole epochs and `index` steps of the next epoch."""

    epochs: Count
    index: Count
    losses: Tensor  # of these steps
    net: Mapping[str, Tensor]
    average: Mapping[str, Tensor]
    optimizer: OptimizerState
    scaler: Mapping[str, Any]  # empty unless the precision is fp16
    turns: tuple[tuple[int, int], ...]  # of the `Course`
    # the state of `loop.Divergence`
    first_loss: float | None = None
    high_losses: Count = 0


@dataclass(frozen=True)
class ScalerState:
    scale: Positive
    growth_factor: Positive
    backoff_factor: Positive
    growth_interval: PositiveInt
    _growth_tracker: Count


def read_state(data: Any, where: str) -> TrainingState:
    """Read the state in a checkpoint. Raises ValueError, in one line, for any other data."""
    state = from_json(TrainingState, data, where)
    if state.losses.shape != (state.index,) or not is_finite(state.losses):
        raise ValueError(f"{where}: losses has {state.losses.numel()} values for {state.index}")
    return state


def load_optimizer(
    optimizer: torch.optim.Optimizer, saved: OptimizerState, names: list[str], where: str
) -> None:
    """Load the saved state of each parameter; `optimizer` keeps its rates and other options.

    `names` are the names of its parameters, in order. Raises ValueError, in one line, for tensors
    of another optimizer or with other shapes.
    """
    own = optimizer.state_dict()["param_groups"]
    indices = [
        list(from_json(tuple[int, ...], group.get("params"), f"{where}: params"))
        for group in saved.param_groups
    ]
    if indices != [group["params"] for group in own]:
        raise ValueError(f"{where}: param_groups: these are not the parameters of this network")
    parameters = [each for group in optimizer.param_groups for each in group["params"]]
    for index, values in saved.state.items():
        if not 0 <= index < len(parameters):
            raise ValueError(f"{where}: state[{index}] is of no parameter")
        allowed = state_names(optimizer, parameters[index])
        required = set(allowed) - ({"momentum_buffer"} if not own[0].get("momentum") else set())
        if set(values) - set(allowed) or required - set(values):
            raise ValueError(
                f"{where}: {', '.join(values)} of {names[index]}: this optimizer has "
                f"{', '.join(allowed)}"
            )
        for name, value in values.items():
            shape = () if name == "step" else tuple(parameters[index].shape)
            if value is None and name not in required:
                continue
            if value is None or tuple(value.shape) != shape or not is_finite(value):
                raise ValueError(
                    f"{where}: {name} of {names[index]}: use finite floats of shape {shape}"
                )
    if type(optimizer).__name__ == "Lamb":
        steps = [lamb_step(group, where) for group in saved.param_groups]
        own = [{**group, "step": step} for group, step in zip(own, steps, strict=True)]
    optimizer.load_state_dict({"state": dict(saved.state), "param_groups": own})


def lamb_step(group: Mapping[str, Any], where: str) -> Tensor:
    """The number of steps so far, which timm's LAMB counts per group of parameters."""
    step = from_json(Tensor, group.get("step"), f"{where}: step")
    if step.shape != () or not is_finite(step) or step < 0:
        raise ValueError(f"{where}: step of the optimizer: use a number of steps")
    return step.clone()


def is_finite(value: Tensor) -> bool:
    return value.is_floating_point() and bool(value.isfinite().all())


def load_scaler(scaler: torch.amp.GradScaler, saved: Mapping[str, Any], where: str) -> None:
    """Load the scale of the losses, if there is one. Raises ValueError for other data."""
    if scaler.is_enabled():
        from_json(ScalerState, saved, f"{where}: scaler")
        scaler.load_state_dict(dict(saved))


RUN_CONFIG, LOG, CHECKPOINT = "run.json", "log.jsonl", "checkpoint.pt"
BEST, PROBE, BUNDLE, SCORES = "best", "probe", "bundle", "scores.json"
SOUP = "soup"  # subfolder with the ingredients of an average, which are bundles
OUTPUTS = {
    RUN_CONFIG: writing.Output(
        "a run's configuration", "", writing.has_keys("model", "fingerprint", "recipe")
    ),
    LOG: writing.Output("a run's log", "", writing.begins_with(b'{"epoch": ', b'"images_per_s"')),
    CHECKPOINT: writing.Output("a checkpoint", "", writing.begins_with(b"PK", b"data.pkl")),
    BEST: bundle.OUTPUT,
    PROBE: bundle.OUTPUT,
    BUNDLE: bundle.OUTPUT,
    SCORES: writing.json_output("a file of scores", "network", "data", "classes", "splits"),
}
MAX_LOG_BYTES = 256 * 2**20  # a row has some hundred bytes and the names of unreadable images


@dataclass(frozen=True, kw_only=True)
class RunConfig(SplitRule):
    """The arguments of a run, which must be the same to resume it; only `data` may have moved."""

    model: str
    weights: str  # source of the initial weights; "" for random weights
    data: str
    fingerprint: str  # of the images and their labels
    classes: tuple[str, ...]
    spec: Mapping[str, Any]
    preprocessing: Mapping[str, Any]
    recipe: Mapping[str, Any]
    efficiency: str  # the recipe's, or the fastest if that is auto
    score_every_epochs: PositiveInt  # the recipe's, or by the length of epochs
    # the recipe's, or by the device that the run began on if the recipe leaves them open
    precision: str
    channels_last: bool
    grad_accum_steps: PositiveInt
    task: str = "classify"
    weights_kind: WeightsKind = "averaged"  # of the file of initial weights
    pseudo_labels: str = ""  # fingerprint of the pseudo-labels in training
    recipe_name: str = ""  # the named recipe behind `recipe`; "" for another recipe

    @property
    def rule(self) -> SplitRule:
        """The rule for the splits of the run."""
        return SplitRule(**{each.name: getattr(self, each.name) for each in fields(SplitRule)})


@dataclass(frozen=True)
class LogRow:
    """A row of the log, without the validation scores of a scored epoch."""

    epoch: PositiveInt
    epochs: PositiveInt
    loss: float
    lr: NonNegative
    images_per_s: NonNegative
    data_wait_fraction: NonNegative
    skipped: Mapping[str, str] = field(default_factory=dict)
    unscored: str = ""  # why the epoch could not be scored


def check_folder(folder: Path) -> None:
    """Raise ValueError unless `folder` has a run, is empty, or can be created; write nothing.

    A run is recognised by its configuration, and all files that training would replace must belong
    to it. Leftovers of a killed process are removed.
    """
    for name, output in OUTPUTS.items():
        writing.check_output(folder / name, output)
    if (folder / RUN_CONFIG).exists():
        read_config(folder, "give another --out")
        return
    names = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    starting = RUN_LOCK, f".{RUN_CONFIG}."  # of another process that has just begun
    if files := [name for name in names if not name.startswith(starting)]:
        raise ValueError(
            f"{folder} exists and is not a run, but has {files[0]}: give another --out"
        )


def create_or_resume(folder: Path, config: RunConfig) -> None:
    """Create the folder of a run, or check that it has a run with the same `config`.

    A run without any result is overwritten. Raises ValueError for another run or other files.
    """
    check_folder(folder)
    saved = resumable_config(folder)
    if saved is None:
        write_json(folder / RUN_CONFIG, OUTPUTS[RUN_CONFIG], config)
        return
    defaults = vars(find_task(config.task).options())
    changes = differences(comparable(saved, defaults), comparable(config, defaults))
    if "fingerprint" in changes:
        changes["fingerprint"] = "its images or labels are others"
    if changes:
        words = "; ".join([*changes.values()][:5])
        raise ValueError(
            f"{folder} has another run: {words}. Give another --out, or the same arguments"
        )


def comparable(config: RunConfig, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The values to compare two runs by; missing options of the task have their `defaults`.

    Data may have moved, and a recipe's name is compared when it is resolved.
    """
    recipe = {**config.recipe, "task_options": {**defaults, **config.recipe["task_options"]}}
    return json.loads(to_json(replace(config, data="", recipe_name="", recipe=recipe)))


def read_config(folder: Path, hint: str) -> RunConfig:
    """Read the configuration of a run. Raises ValueError, in one line that ends with `hint`."""
    path = folder / RUN_CONFIG
    try:
        config = from_json(RunConfig, read_json(path), str(path))
        recipe = asdict(saved_recipe(config.recipe, str(path)))
        preprocessing = from_json(Preprocessing, config.preprocessing, f"{path}: preprocessing")
        spec = config.spec
        if "stages" in spec:
            spec = json.loads(NetSpec.from_json(spec, f"{path}: spec").to_json())
    except ValueError as error:
        raise ValueError(f"{error}; or {hint}") from None
    return replace(config, recipe=recipe, preprocessing=asdict(preprocessing), spec=spec)


def resumable_config(folder: Path) -> RunConfig | None:
    """The configuration of a run that can be resumed or has ended; None without such a run."""
    has_results = any((folder / name).exists() for name in (CHECKPOINT, PROBE, BUNDLE))
    if not (has_results and (folder / RUN_CONFIG).exists()):
        return None
    return read_config(folder, "give another --out")


def resolve(
    choice: RecipeChoice, folder: Path, data: DataSet, options: RunOptions = DEFAULTS
) -> NamedRecipe:
    """Resolve `choice` to a recipe for `data` with `options`.

    A resumable run in `folder` keeps its recipe, with the changes of the choice.
    """
    config = resumable_config(folder)
    saved = config and NamedRecipe(Recipe(**config.recipe), config.recipe_name)
    task = find_task(options.task)
    return choice.resolve(case_of(data, options.weights, options.width, task), saved)


@contextmanager
def locked(folder: Path, context: DistributedContext = SINGLE_PROCESS) -> Iterator[None]:
    """Hold the lock of a run's folder, so that no other process trains in it during the block.

    Nothing is written to a folder that is not a run's. Raises LockedError with the holder.
    """
    with ExitStack() as stack:

        def lock() -> None:
            check_folder(folder)
            stack.enter_context(hold(folder / RUN_LOCK))

        context.on_rank_zero(lock)
        yield


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    path = folder / CHECKPOINT
    if not os.path.lexists(path):
        return None
    hint = "the run cannot go on from it; give another --out"

    def whole(data: Any) -> dict[str, Any]:
        read_state(data, "checkpoint")
        return data

    return read_data(path, whole, hint)


def read_log(folder: Path, metric: Metric, epochs: int | None = None) -> list[dict[str, Any]]:
    """Read the rows of the first `epochs`. A row after the last checkpoint is written again.

    Raises ValueError, in one line, for missing or wrong rows, and for rows whose scores lack
    `metric`.
    """
    path, text = folder / LOG, b""
    with suppress(FileNotFoundError):
        text = writing.read_regular(path, MAX_LOG_BYTES)
    lines = text.decode(errors="replace").splitlines()[:epochs]
    if epochs is not None and len(lines) < epochs:
        raise ValueError(
            f"{path} has {count_of(len(lines), 'row')} for the {epochs} epochs of the checkpoint: "
            "give another --out"
        )
    rows = [read_row(line, number, f"{path} line {number}") for number, line in enumerate(lines, 1)]
    for row in rows:
        if val_scores(row) and f"val/{metric.name}" not in row:
            raise ValueError(f"{path} line {row['epoch']} lacks val/{metric.name}")
    return rows


def read_row(text: str, number: int, where: str) -> dict[str, Any]:
    """Read the row of epoch `number` in a log. Raises ValueError in one line."""
    row = from_json(dict[str, Any], text, where)
    scores = {key: row.pop(key) for key in [*row] if key.startswith("val/")}
    fixed = asdict(from_json(LogRow, row, where))
    if fixed["epoch"] != number:
        raise ValueError(f"{where}: epoch is {fixed['epoch']}: rows are of the epochs from 1 on")
    if not fixed["unscored"]:
        del fixed["unscored"]
    return {**fixed, **from_json(dict[str, float], scores, where)}


def save_epoch(folder: Path, rows: list[dict[str, Any]], state: dict[str, Any]) -> None:
    """Write the log, then the checkpoint; after a stop between them, a row is written again."""
    with writing.atomic_write(folder / LOG, OUTPUTS[LOG]) as temporary:
        temporary.write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_checkpoint(folder, state)


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    # PyTorch's own way to open a file does not report a full disk.
    with (
        writing.atomic_write(folder / CHECKPOINT, OUTPUTS[CHECKPOINT]) as temporary,
        temporary.open("wb") as file,
    ):
        torch.save(state, file)


Row = Mapping[str, Any]


def val_scores(row: Row) -> dict[str, float]:
    """The scores of an epoch by name; none if it is not scored."""
    prefix = "val/"
    return {key.removeprefix(prefix): row[key] for key in row if key.startswith(prefix)}


def best_row(rows: Sequence[Row], metric: Metric) -> Row | None:
    """The row with the best validation score by `metric`; of ties, the lowest loss, then the first.

    None if no row has scores.
    """
    return next(iter(best_rows(rows, metric, 1)), None)


def best_rows(rows: Sequence[Row], metric: Metric, count: int) -> list[Row]:
    """The `count` best rows, in the order of `best_row`."""
    scored = [row for row in rows if f"val/{metric.name}" in row]
    return sorted(scored, key=lambda row: metric.quality(val_scores(row)), reverse=True)[:count]


def final_scores(folder: Path, split: str, metric: Metric) -> dict[str, Any]:
    """The scores of a finished run on a split, among them `metric` and `images`."""
    scores = bundle.read_metadata(folder / BUNDLE).scores
    for name in (metric.name, "images"):
        bundle.find_score(scores, split, name, str(folder))
    return dict(scores[split])


def should_stop_early(rows: Sequence[Row], recipe: Recipe, metric: Metric) -> bool:
    """Whether the last `early_stop_patience` epochs did not improve the validation score."""
    best = best_row(rows, metric)
    if not recipe.early_stop_patience or not best:
        return False
    last = max(row["epoch"] for row in rows if val_scores(row) or row.get("unscored"))
    return last - best["epoch"] >= recipe.early_stop_patience


PREFIX = "events.out.tfevents"  # of TensorBoard's files


def open_board(folder: Path) -> Callable[[Mapping[str, Any]], None]:
    """A function that writes a log row as TensorBoard scalars, and replaces earlier logs.

    The calling thread writes, because a writer with its own thread prints a traceback when the disk
    is full. Raises ValueError if a file has the folder's name, or if the package tensorboard is not
    installed.
    """
    if find_spec("tensorboard") is None:
        raise ValueError(
            "--tensorboard needs tensorboard: pip install 'fullstride[log]', or leave it out"
        )
    if folder.exists() and not folder.is_dir():
        raise ValueError(f"{folder} is a file: move it, or leave --tensorboard out")
    log = folder / f"{PREFIX}.{time.time():.0f}.{platform.node()}"
    is_new = True

    def write(row: Mapping[str, Any]) -> None:
        nonlocal is_new
        from tensorboard.compat.proto.event_pb2 import Event  # pyright: ignore  # it is generated
        from tensorboard.summary.writer.record_writer import RecordWriter
        from torch.utils.tensorboard.summary import scalar

        events = [
            Event(step=row["epoch"], wall_time=time.time(), summary=scalar(name, value))
            for name, value in row.items()
            if isinstance(value, float)
        ]
        if is_new:
            folder.mkdir(exist_ok=True)
            for each in folder.glob(f"{PREFIX}.*"):
                each.unlink()
            events.insert(0, Event(file_version="brain.Event:2", wall_time=time.time()))
            is_new = False
        try:
            with log.open("ab") as file:
                records = RecordWriter(file)
                for event in events:
                    records.write(event.SerializeToString())
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(log)) from None

    return write
