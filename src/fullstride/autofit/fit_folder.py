"""What is in the folder of a fit? Its settings, and the results that other settings change."""

from dataclasses import dataclass

from fullstride.autofit.settings import FitSettings
from fullstride.search.study_folder import StudyConfig, StudyKind

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
