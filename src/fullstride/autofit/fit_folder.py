"""What is in the folder of a fit? Its settings, and the results that other settings change."""

from dataclasses import dataclass
from pathlib import Path

from fullstride.autofit.settings import FitSettings
from fullstride.data.dataset import DataSet
from fullstride.search import study_folder
from fullstride.search.study_folder import StudyConfig, StudyKind
from fullstride.train.recipes.choice import RecipeChoice

BY_CASE = RecipeChoice()
# The results that an argument changes; others than these change all but the look at the data.
PLAN = ("plan.json",)
BUDGET = ("times.json", *PLAN)  # the times of each candidate stay
LIST = ("candidates.json", *BUDGET, "times/*.json", "training_times/*.json")
CHANGED_BY = {"hours": PLAN, "minutes": PLAN, "maybe": PLAN}
CHANGED_BY |= {"budget_ms": BUDGET, "images_per_s": BUDGET, "data": ("data.json", *LIST)}


@dataclass(frozen=True, kw_only=True)
class FitConfig(StudyConfig):
    """What a fit folder is for."""

    settings: FitSettings


FIT = StudyKind(
    noun="fit",
    config=FitConfig,
    trained=("trials", "rungs"),
    changed_by=CHANGED_BY,
    changed=LIST,
)


def create_or_resume(
    folder: Path, data: DataSet, settings: FitSettings, recipe: RecipeChoice = BY_CASE
) -> tuple[FitConfig, str]:
    """The folder of a fit, see `study_folder.create_or_resume`."""
    return study_folder.create_or_resume(FIT, folder, data, settings, recipe)
