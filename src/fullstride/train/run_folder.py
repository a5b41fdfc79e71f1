"""What does a run folder hold, and whose is it? What was asked, the log, the last checkpoint, the best weights."""

import json
from collections.abc import Iterator, Mapping
from dataclasses import MISSING, asdict, dataclass, fields
from pathlib import Path
from typing import Any

import torch

from fullstride.nets.efficiency import current_name
from fullstride.storage import atomic_write, read_json, recover_interrupted_write
from fullstride.tasks.task import Metric
from fullstride.train.recipe import Recipe, with_current_names

RUN_CONFIG, LOG, CHECKPOINT = "run.json", "log.jsonl", "checkpoint.pt"
BEST, BUNDLE = "best", "bundle"


@dataclass(frozen=True)
class RunConfig:
    """What makes a run this run and no other: going on in its folder needs the same."""

    model: str
    weights: str  # where the first weights came from; "" for fresh ones
    data: str
    minival: float | None  # share of the training images; None: by their number
    fingerprint: str  # of the images and their labels
    classes: tuple[str, ...]
    spec: Mapping[str, Any]
    preprocessing: Mapping[str, Any]
    recipe: Mapping[str, Any]
    efficiency: str  # of the recipe, or the fastest if that is auto
    task: str = "classify"


def create_or_resume(folder: Path, asked: RunConfig) -> None:
    """Make `folder` this run's, or find that it is. A run without a checkpoint has nothing to lose and gives way."""
    wanted = json.loads(json.dumps(asdict(asked)))
    if folder.is_dir():
        for name in (RUN_CONFIG, LOG, CHECKPOINT, BEST, BUNDLE):
            recover_interrupted_write(folder / name)
    if (folder / RUN_CONFIG).exists() and (
        (folder / CHECKPOINT).exists() or (folder / BUNDLE).exists()
    ):
        found = read_json(folder / RUN_CONFIG)
        if not isinstance(found, dict):
            raise ValueError(
                f"{folder / RUN_CONFIG} does not say what was asked: give another --out"
            )
        if isinstance(
            found.get("recipe"), dict
        ):  # by an earlier version, in which what it does not say was so
            defaults = {
                field.name: field.default
                for field in fields(Recipe)
                if field.default is not MISSING
            }
            found["recipe"] = json.loads(json.dumps(defaults)) | with_current_names(found["recipe"])
            found["efficiency"] = config_efficiency(found)
            if found["recipe"].get("efficiency") != "auto":
                found["recipe"]["efficiency"] = found["efficiency"]
        found.setdefault("task", "classify")
        differ = [
            f"{name} is {old!r} there and {new!r} now"
            for name, old, new in differences(found, wanted)
            if name
            != "data"  # the folder may have moved; the fingerprint says whether the images are the same
        ]
        if differ:
            raise ValueError(
                f"{folder} holds another run: {'; '.join(differ[:5])}. Give another --out or ask the same"
            )
        return
    if folder.exists() and not (folder / RUN_CONFIG).exists():
        strange = [path.name for path in folder.iterdir()] if folder.is_dir() else ["a file"]
        if strange:
            raise ValueError(
                f"{folder} exists and is no run, but holds {strange[0]}: give another --out"
            )
    with atomic_write(folder / RUN_CONFIG) as beside:
        beside.write_text(json.dumps(wanted, indent=1))


def saved_efficiency(folder: Path) -> str:
    """The way of training that the run in `folder` goes on with; "" where there is none."""
    found = (
        read_json(folder / RUN_CONFIG)
        if (folder / CHECKPOINT).exists() and (folder / RUN_CONFIG).exists()
        else None
    )
    return config_efficiency(found) if isinstance(found, dict) else ""


def config_efficiency(config: Mapping[str, Any]) -> str:
    """The efficiency in a run's JSON; timm's networks were always compiled as plain modules."""
    name = str(config.get("efficiency", ""))
    plain = name == "compiled" and "timm" in config.get("spec", ())
    return "plain_compiled" if plain else current_name(name)


def differences(old: Any, new: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    if isinstance(old, dict) and isinstance(new, dict):
        for key in {**old, **new}:
            yield from differences(old.get(key), new.get(key), f"{name}.{key}" if name else key)
    elif old != new:
        yield name, old, new


def load_checkpoint(folder: Path) -> dict[str, Any] | None:
    path = folder / CHECKPOINT
    if not path.exists():
        return None
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise ValueError(
            f"{path} cannot be read ({type(error).__name__}): remove it to begin again at the first epoch"
        ) from None


def read_log(folder: Path, epochs: int | None = None) -> list[dict[str, Any]]:
    """The rows of the first `epochs`: those that a checkpoint holds, as a row written after it is done again."""
    path = folder / LOG
    if not path.exists():
        return []
    try:
        return [upgrade_row(json.loads(line)) for line in path.read_text().splitlines()[:epochs]]
    except ValueError as error:
        raise ValueError(f"{path} is not whole JSON ({error}): give another --out") from None


def upgrade_row(row: dict[str, Any]) -> dict[str, Any]:
    """A row of any version by the current names: earlier logs have "minival_top1" for "minival/top1"."""
    return {key.replace("minival_", "minival/"): value for key, value in row.items()}


def save_epoch(folder: Path, rows: list[dict[str, Any]], state: dict[str, Any]) -> None:
    """Log first, checkpoint second: a stop between the two costs one row, which is written again."""
    with atomic_write(folder / LOG) as beside:
        beside.write_text("".join(json.dumps(row) + "\n" for row in rows))
    save_checkpoint(folder, state)


def save_checkpoint(folder: Path, state: dict[str, Any]) -> None:
    with atomic_write(folder / CHECKPOINT) as beside, beside.open("wb") as file:
        try:
            torch.save(state, file)
        except RuntimeError as error:  # of the archive's own writer, where the disk is full
            raise OSError(
                f"{folder / CHECKPOINT} could not be written whole ({error}): make room"
            ) from error


def best_row(rows: list[dict[str, Any]], metric: Metric) -> dict[str, Any]:
    """The first of the rows with the best minival by `metric`, and among equal ones the lowest loss."""
    return max(
        rows,
        key=lambda row: (metric.rank(row[f"minival/{metric.name}"]), -row.get("minival/loss", 0.0)),
    )


def test_scores(folder: Path) -> dict[str, Any]:
    """The scores on the test split of a finished run."""
    return read_json(folder / BUNDLE / "bundle.json")["scores"]["test"]


def skipped_images(rows: list[dict[str, Any]]) -> dict[str, str]:
    """Images that could not be read in any epoch, and why."""
    return {name: reason for row in rows for name, reason in row["skipped"].items()}


def should_stop_early(rows: list[dict[str, Any]], recipe: Recipe, metric: Metric) -> bool:
    """Whether the last `early_stop_patience` epochs brought no better minival."""
    patience = recipe.early_stop_patience
    return bool(patience and rows) and len(rows) - best_row(rows, metric)["epoch"] >= patience
