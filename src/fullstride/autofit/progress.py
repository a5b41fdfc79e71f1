"""What does a user see of a fit? Lines on the progress of each stage, and tables of its results."""

from collections.abc import Sequence
from pathlib import Path

from rich.table import Table

from fullstride.autofit.inspection.data_report import report_lines
from fullstride.autofit.listing.candidates import Candidate
from fullstride.autofit.results import closing_lines
from fullstride.autofit.timing.budget_table import budget_note, budget_table
from fullstride.autofit.training.plan import plan_lines
from fullstride.autofit.training.teaching import Teaching
from fullstride.search.study_folder import Event


def shown(event: Event, folder: Path) -> Sequence[str | Table]:
    """The lines and tables that the command prints for an event of a fit in `folder`."""
    if event.line:
        return [event.line]
    result = event.result
    if event.stage == "data":
        return report_lines(result)
    if event.stage == "candidates":
        return [candidates_line(result)]
    if event.stage == "budget":
        return [budget_table(result), budget_note(result)]
    if event.stage == "plan":
        return [*plan_lines(result)]
    if event.stage == "teaching":
        return [teaching_line(result)]
    if event.stage == "results":
        return closing_lines(result, folder)
    return []


def candidates_line(candidates: Sequence[Candidate]) -> str:
    """How many there are, of how many networks and families."""
    networks = {(each.model, each.width, each.depth) for each in candidates}
    families = sorted({each.family for each in candidates})
    sides = ", ".join(map(str, sorted({each.resolution for each in candidates})))
    return (
        f"{len(candidates)} candidates: {len(networks)} networks of {', '.join(families)} at "
        f"{sides} pixels"
    )


def teaching_line(teaching: Teaching) -> str:
    if teaching.student and teaching.is_better:
        return f"{teaching.student.name} is better by its teacher {teaching.teacher}"
    return f"no student of a larger network: {teaching.reason}"
