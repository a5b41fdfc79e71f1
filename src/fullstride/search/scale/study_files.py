"""Which trainings of a study are in its folder, and which failed?"""

from pathlib import Path
from typing import NamedTuple

from fullstride.search.scale.costs import PointCost
from fullstride.search.scale.finished import TABLE_7, Training, read_trainings, table_7
from fullstride.search.scale.plan import PlannedTraining
from fullstride.search.study_folder import saved_stage
from fullstride.search.trials import Failure, Trial
from fullstride.search.tuning.block_tuning import TRAINING

TRIALS, COSTS = "trials", "costs"


def trial_folder(folder: Path, planned: PlannedTraining) -> Path:
    return folder / TRIALS / planned.regime / f"{planned.point}-seed{planned.seed}"


def read_study(folder: Path) -> tuple[list[Training], dict[str, str]]:
    """The finished trainings in the folder of a study, and why others failed, by their folder.

    The error is that of the first choice, in per cent of the minival. Raises ValueError where there
    is no study.
    """
    costs = saved_stage(folder, COSTS, tuple[PointCost, ...])
    if costs is None:
        raise ValueError(f"{folder} has no study: give a folder that `fullstride scale` wrote")
    by_name = {cost.name: cost for cost in costs}
    trainings: list[Training] = []
    failures: dict[str, str] = {}
    for regime in sorted((folder / TRIALS).glob("*")):
        results = {
            path.parent: TRAINING.read(Trial(folder=path.parent, result=path))
            for path in sorted(regime.glob("*/result.json"))
        }
        scores = {at: each for at, each in results.items() if not isinstance(each, Failure)}
        failed = {at: each for at, each in results.items() if isinstance(each, Failure)}
        failures |= {f"{at.parent.name}/{at.name}": each.failure for at, each in failed.items()}
        epochs = max((each.epochs for each in scores.values()), default=0)
        for at, score in scores.items():
            cost = by_name.get(at.name.rpartition("-seed")[0])
            if cost is None:  # of a grid that was larger
                continue
            point, images = cost.point, len(score.correct)
            training = Training(
                name=point.name,
                width=point.width,
                depth=point.depth,
                resolution=point.resolution,
                epochs=epochs,
                seed=score.seed,
                error=100 * score.correct.count("0") / images,
                ms=cost.ms,
                images=images,
                correct=score.correct,
                regime=regime.name,
            )
            trainings.append(training)
    return trainings, failures


class Source(NamedTuple):
    """Finished trainings."""

    trainings: list[Training]
    device: str  # where their times are from
    by_time: bool = False  # whether they are not one network scaled


def find_trainings(source: str) -> Source:
    """Trainings of a folder, a CSV file or a family of Table 7. Raises ValueError for others."""
    if source in ("resnet_rs", "efficientnet"):
        return Source(table_7(source), TABLE_7)
    path = Path(source)
    if path.is_dir():
        trainings, _ = read_study(path)
        costs = saved_stage(path, COSTS, tuple[PointCost, ...])
        return Source(trainings, str(path), len({cost.point.model for cost in costs}) > 1)
    if path.suffix == ".csv":
        return Source(read_trainings(path), path.name)
    raise ValueError(
        f"no trainings in {source!r}: give a folder of `fullstride scale`, a .csv file, or "
        "resnet_rs or efficientnet"
    )
