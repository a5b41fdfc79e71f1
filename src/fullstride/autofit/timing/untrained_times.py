"""How long do a candidate's files take here? They are written untrained, timed, and removed."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

from fullstride.autofit.listing.candidates import Candidate
from fullstride.autofit.timing.budget_rule import CandidateTime
from fullstride.deploy.exported import ExportedModel, InputKind
from fullstride.deploy.formats.base import last_line
from fullstride.deploy.select import (
    Label,
    measure_files,
    quickly_written,
)
from fullstride.deploy.untrained import UntrainedFiles, untrained_files
from fullstride.measure.budget import Budget
from fullstride.measure.call_times import MEDIANS, quiet_times
from fullstride.measure.protocols import ONLINE, Protocol
from fullstride.nets import zoo
from fullstride.nets.preprocessing import Preprocessing
from fullstride.storage import remove

# The largest ratio of the first format's time to the budget at which others are tried: int8 is up
# to 3.4 times as fast as fp32 on a processor with the instructions for it.
QUICK_RATIO = 4.0
QUICK = replace(ONLINE, rounds=3, warmup_s=0.1, round_s=0.05)


@dataclass(frozen=True, kw_only=True)
class Conditions:
    """What is the same for the times of all candidates."""

    budget: Budget
    classes: int
    channels: int
    labels: tuple[Label, ...]
    percentile: float = 50  # of the times of a call
    threads: int | None = None  # of the CPU; None: PyTorch's number
    input_kind: InputKind = "normalised"

    @property
    def quick(self) -> Label:
        """The first to be measured."""
        return quickly_written(self.labels)

    @property
    def quick_limit_ms(self) -> float:
        """Up to this time in the first format the others are tried."""
        return QUICK_RATIO * self.budget.ms_per_image

    def has_all(self, rows: Sequence[CandidateTime]) -> bool:
        """Whether times of a candidate, maybe for another budget, are all that this one asks."""
        ms = next((row.ms for row in rows if (row.format, row.precision) == self.quick), None)
        return len(rows) >= len(self.labels) or ms is None or ms > self.quick_limit_ms

    @property
    def protocol(self) -> Protocol:
        """Percentiles other than the median need some hundred calls."""
        return MEDIANS if self.percentile == 50 else ONLINE


def time_one(
    candidate: Candidate,
    conditions: Conditions,
    scratch: Path,
    earlier: UntrainedFiles | None,
) -> tuple[tuple[CandidateTime, ...], UntrainedFiles | None]:
    """Its times, that of the first format first, and its files; None where it cannot be built."""
    quick, batch = conditions.quick, conditions.budget.batch
    others = [label for label in conditions.labels if label != quick]
    models, failures = dict[Label, ExportedModel](), dict[Label, str]()
    rows = dict[Label, CandidateTime]()

    def write(files: UntrainedFiles, labels: Sequence[Label]) -> None:
        for label in labels:
            try:
                models[label] = files.open(*label, scratch, conditions.threads, batch)
            except (ValueError, MemoryError) as error:
                failures[label] = last_line(error).replace(f"{scratch}/", "")

    try:
        files = files_of(candidate, conditions, earlier)
        write(files, [quick])
        rows = timed(candidate, models, conditions, QUICK)
        if quick in failures or cast(float, rows[quick].ms) <= conditions.quick_limit_ms:
            write(files, others)
            rows = timed(candidate, models, conditions, conditions.protocol)
    except OSError:  # such as a full disk, which is not the candidate's fault
        raise
    except Exception as error:  # a network of others, which may raise anything
        files, failures = None, {**failures, quick: last_line(error)}
    finally:
        models.clear()
        for path in scratch.iterdir():
            remove(path)
    for (format, precision), reason in failures.items():
        rows[format, precision] = CandidateTime(
            candidate=candidate.name, format=format, precision=precision, ms=None, failure=reason
        )
    return tuple(rows[label] for label in (quick, *others) if label in rows), files


def files_of(
    candidate: Candidate, conditions: Conditions, earlier: UntrainedFiles | None
) -> UntrainedFiles:
    """`earlier` are those of the same network. Raises whatever its network raises."""
    if earlier is not None:
        pre = earlier.job.metadata.preprocessing
        return earlier.at(candidate.name, at_candidate(pre, candidate))
    net = zoo.create(
        candidate.model,
        classes=conditions.classes,
        in_channels=candidate.channels or conditions.channels,
        width=candidate.width,
        depth=candidate.depth,
        resolution=candidate.resolution,
    )
    pre = at_candidate(zoo.family_preprocessing(net.spec), candidate)
    return untrained_files(net, candidate.name, pre, conditions.classes, conditions.input_kind)


def at_candidate(pre: Preprocessing, candidate: Candidate) -> Preprocessing:
    return replace(pre, resolution=candidate.resolution, fit=candidate.fit)


def timed(
    candidate: Candidate,
    models: Mapping[Label, ExportedModel],
    conditions: Conditions,
    protocol: Protocol,
) -> dict[Label, CandidateTime]:
    """The times of opened files, in turn inside every round; none where there are no files."""
    if not models:
        return {}
    side, batch = candidate.resolution, conditions.budget.batch
    protocol = replace(protocol, resolution=side, batch=batch)
    by_name = {" ".join(label): model for label, model in models.items()}
    measure = partial(measure_files, by_name, protocol, conditions.threads)
    times = quiet_times(measure, conditions.percentile)
    return {
        (format, precision): CandidateTime(
            candidate=candidate.name,
            format=format,
            precision=precision,
            **asdict(times[f"{format} {precision}"]),
        )
        for format, precision in models
    }
