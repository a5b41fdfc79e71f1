"""How do networks fare by the papers' own tables here? Their lines measured, ours beside timm's, on one page.

A line is measured in contests: all that stands for it, timm's network, ours plain and ours lean (training only), has
its turn in every round, in one memory layout, eager or compiled. Whatever is finished is a file of its own, which is
not measured again in the same environment.
"""

import gc
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch

from fullstride.measure.bench import bench, fitting
from fullstride.measure.environment import Environment, find_device
from fullstride.measure.protocols import Measurement, Protocol
from fullstride.measure.workload import Precision
from fullstride.papers.lines import QUICK_LINES, Contest, Kind, contests, lines, lines_of
from fullstride.papers.suite_page import Row, alike, data, page
from fullstride.storage import atomic_write

PAGE, DATA, ROWS = "results.md", "results.json", "rows"  # in the folder of a suite
QUICK_MINUTES = 6.5  # the last contest that begins may take more than a minute
WHY_LONGEST = 240  # characters of a reason


def measure(contest: Contest, device: torch.device) -> Row:
    """Together; where that fails each network alone, so that one does not stop the others."""
    how: dict[str, Any] = dict(
        precision=contest.precision, layout=contest.layout, compiled=contest.compiled
    )
    how["memory_gib"] = contest.memory_gib
    kinds: dict[str, Kind] = {entry.name: entry.kind for entry in contest.entries}
    measured: dict[Kind, list[Measurement]] = {kind: [] for kind in get_args(Kind)}
    failed: dict[str, str] = {}

    def attempt(names: Sequence[str], what: str, work: Callable[[], Any]) -> Any:
        """What `work` gives; None, and the reason written down, where it fails."""
        try:
            return work()
        except Exception as error:  # whatever it is: the other contests go on
            if len(names) == 1:
                failed[f"{names[0]}, {what}"] = why(error)
            error.__traceback__ = None  # it holds tensors
        gc.collect()
        return None

    nets = {
        e.name: net
        for e in contest.entries
        if (net := attempt([e.name], "building", e.build)) is not None
    }
    found: dict[str, int] = {}
    if contest.parts[0].fit != "given":
        for name, net in nets.items():
            one = {name: net}
            found |= (
                attempt(
                    [name],
                    "finding its batch",
                    lambda one=one: fitting(one, contest.parts[0], device, **how),
                )
                or {}
            )
        nets = {name: net for name, net in nets.items() if name in found}
    for part in contest.parts:
        # lean networks are plain ones where they do not train
        chosen = {
            name: net
            for name, net in nets.items()
            if part.work == "training" or kinds[name] != "lean"
        }
        how["found"] = found if found else None

        def timed(
            names: Sequence[str], reference: str | None, part: Protocol = part
        ) -> list[Measurement]:
            some = {name: nets[name] for name in names}
            rows = attempt(
                names, part.work, lambda: bench(some, part, device, reference=reference, **how)
            )
            return rows or []

        rows = timed([*chosen], [*chosen][0]) if chosen else []
        if not rows and len(chosen) > 1:
            rows = [row for name in chosen for row in timed([name], None)]
        for row in rows:
            measured[kinds[row.name]].append(row)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return Row(
        contest=contest,
        measured={kind: rows for kind, rows in measured.items() if rows},
        failed=failed,
    )


def why(error: Exception) -> str:
    said = " ".join(str(error).split())
    told = said if isinstance(error, ValueError) else f"{type(error).__name__} {said}"
    return told if len(told) <= WHY_LONGEST else f"{told[:WHY_LONGEST]} ..."


def run(
    out: Path,
    *,
    device: torch.device | str = "cpu",
    quick: bool = False,
    networks: Sequence[str] = (),
    resolution: int | None = None,
    precision: Precision | None = None,
    memory_gib: float | None = None,
    minutes: float | None = None,
) -> Iterator[Row]:
    """Measure what is not measured yet; yields each row when it is done and `out` has the page of all so far.

    `networks` and `resolution` take the place of the papers' lines. After `minutes` no contest begins any more.
    """
    device = find_device(device)
    here = Environment.here(device)
    asked = lines_of(networks, resolution) if networks else lines()
    if quick and not networks:
        told = {
            name: [line for line in asked if (line.table, line.name) == name]
            for name in QUICK_LINES
        }
        asked = [
            *(line[0] for line in told.values()),
            *(line for line in asked if line.table == "TResNet 4"),
        ]
    how: dict[str, Any] = dict(
        quick=quick, device=device, precision=precision, memory_gib=memory_gib
    )
    planned = {line: contests(line, **how) for line in asked}
    # the same contest may stand in several tables; ways come one after the other, so that all lines have the first soon
    most = max((len(each) for each in planned.values()), default=0)
    todo = list(
        dict.fromkeys(each[i] for i in range(most) for each in planned.values() if i < len(each))
    )
    rows: dict[Contest, Row] = {}
    minutes = QUICK_MINUTES if quick and minutes is None else minutes
    deadline = time.monotonic() + 60 * minutes if minutes is not None else float("inf")

    def write() -> None:
        for name, text in (
            (PAGE, page(planned, rows, here, quick)),
            (DATA, data(planned, rows, here)),
        ):
            with atomic_write(out / name) as beside:
                beside.write_text(text)

    write()
    for contest in todo:
        file = out / ROWS / contest.file
        row = load(file, contest, here)
        if row is None:
            if time.monotonic() > deadline:
                continue
            row = measure(contest, device)
            with atomic_write(file) as beside:
                beside.write_text(row.to_json(here))
        rows[contest] = row
        write()
        yield row
        if row.failed:
            check_alive(device)


def load(file: Path, contest: Contest, here: Environment) -> Row | None:
    """A row of before; None where there is none of this environment."""
    try:
        told = json.loads(file.read_text())
        if told["alike"] != alike(here):
            return None
        measured = {
            kind: [Measurement.from_json(json.dumps(one)) for one in m]
            for kind, m in told["measured"].items()
        }
        return Row(contest=contest, measured=measured, failed=dict(told["failed"]))
    except (OSError, KeyError, TypeError, ValueError):
        return None


def check_alive(device: torch.device) -> None:
    """OSError where the GPU is lost to this process, as it is after a bad access: all that follows would fail."""
    try:
        torch.zeros(1, device=device).sum().item()
    except RuntimeError as error:
        raise OSError(
            f"{device} no longer answers: ask again, finished rows are kept ({why(error)})"
        ) from None
