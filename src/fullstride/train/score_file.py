"""What is in a file of scores? For each split all scores, those by class, and the confusions."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fullstride.strict_json import from_json, read_json, to_json
from fullstride.tasks.confusion import ClassScore, ConfusionMatrix
from fullstride.train import run_folder
from fullstride.train.scoring import Evaluation
from fullstride.writing import atomic_write

OUTPUT = run_folder.OUTPUTS[run_folder.SCORES]


@dataclass(frozen=True)
class SplitScores:
    scores: Mapping[str, float]
    skipped: Mapping[str, str]  # unreadable images, and why
    by_class: tuple[ClassScore, ...]  # in the order of the classes
    confusion: ConfusionMatrix | None  # by the indices of classes


@dataclass(frozen=True)
class ScoreFile:
    network: str
    data: str
    classes: tuple[str, ...]
    splits: Mapping[str, SplitScores]


def save(
    path: Path, network: str, data: str, classes: tuple[str, ...], results: Mapping[str, Evaluation]
) -> None:
    """Write what `network` achieves on splits of `data`, in place of an earlier such file."""
    splits = {
        split: SplitScores(
            result.scores,
            result.skipped,
            tuple(result.by_class(classes)),
            result.confusion,
        )
        for split, result in results.items()
    }
    with atomic_write(path, OUTPUT) as beside:
        beside.write_text(to_json(ScoreFile(network, data, classes, splits)))


def load(path: Path) -> ScoreFile:
    """What `save` wrote of a task with one class for each image. Raises ValueError in one line."""
    return from_json(ScoreFile, read_json(path), str(path))
