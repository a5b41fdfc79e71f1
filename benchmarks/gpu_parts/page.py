"""The page of what was measured on a GPU, beside goals and published figures."""

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from fullstride.io.writing import Output, begins_with, json_output
from fullstride.tables import PRINTED, speeds
from gpu_parts.answers import BATCHES, FILES, GOAL, PAIRS, REFERENCE, SIDE
from gpu_parts.settings import ROOT, Result, Results, read
from gpu_parts.training import BATCH_FORMS, GIB, NETWORKS

FOLDER, PAGE = ROOT / "benchmarks" / "gpu", ROOT / "docs" / "reproduce" / "gpu.md"
TITLE = "# What a GPU has to show"
JSON = json_output("results on a GPU", "environment", "planned", "results")
MARKDOWN = Output("a page of results on a GPU", ".md", begins_with(TITLE.encode()))
NOT_YET = "not measured"
LEAST_GAIN = 0.03  # of padding channels to multiples of 8, stated before it was measured
PADDING = f"Padding has to make TResNet-L {LEAST_GAIN:.0%} faster"
TRAINING = "network, pixels, form, images/s, spread, peak MiB, x timm eager, x timm compiled"
TRAINING += ", published images/s"
STEPS = """
In bf16, in turn, with goals for our fastest form in brackets. Our compiled forms recompute
activations, timm's networks do not. The spread is over the rounds. The forms fused, fused compiled
and int8 were removed after this race: [the gate](../internals/compiled_training.md#the-gate).
"""
STATE = "part, share of the time, device, software, dates, commits, measured"
OTHERS = "timm eager, estimated, published"
ANSWERS = f"""
ms an image at {SIDE} pixels in bf16, in brackets the speed relative to {REFERENCE}; the goal is
{GOAL:g} at batch {max(BATCHES)}.

The estimate is that of the GPU's data sheet for timm's network, eager, with its 90 % interval.
"""
INTRODUCTION = """
`make gpu MINUTES=30` measures what is below in so many minutes, the most valuable first, and writes
this page and `benchmarks/gpu/*.json`. The same command goes on with what is missing. Published
figures are the papers', on a V100: another GPU with other software. Without a GPU the command runs
on tiny networks, of which nothing is here. The page is written by `benchmarks/gpu_parts/page.py`:
edit that.
"""
RATES: Mapping[str, Callable[[float], float]] = {  # quantities as images/s in training
    "training images/s": lambda value: value,
    "seconds per 128 images": lambda value: 128 / value,
}
MS: Mapping[str, Callable[[float], float]] = {  # and as ms an image in inference
    "inference images/s": lambda value: 1e3 / value,
    "ms per image": lambda value: value,
}
FORMS = (REFERENCE, "compiled", "CUDA graph", *map(" ".join, FILES["cuda"]))


def to_json(data: Any) -> str:
    return json.dumps(data, indent=1, default=str) + "\n"


def line(result: Result) -> str:
    """What came of a work, in one line."""
    if error := result.get("error"):
        return f"error: {error}"
    return ("not passed: " if result.get("ok") is False else "") + result["summary"]


def page(folder: Path, parts: Mapping[str, tuple[object, float]]) -> str:
    """The page of the files in `folder`; `parts` have their shares of the minutes."""
    files = {part: read(folder / f"{part}.json") for part in parts}
    results = {part: file["results"] for part, file in files.items()}
    speed, batches, shipping = (results.get(part, {}) for part in ("speed", "batches", "shipping"))
    every = ([part, name, line(one)] for part in results for name, one in results[part].items())
    return "\n".join(
        (
            f"{TITLE}\n{INTRODUCTION}",
            *table(STATE, (state(part, files[part], parts[part][1]) for part in parts)),
            f"\n## Padded channels\n\n{PADDING}: {padding(speed)}.",
            f"\n## Training steps\n{STEPS}",
            *table(TRAINING, training_rows(speed)),
            f"\n## The largest batch in {GIB:g} GiB\n",
            *table("form, measured, predicted, published", batch_rows(batches)),
            f"\n## Answers\n{ANSWERS}",
            *table(", ".join(("network, batch", *FORMS, OTHERS)), answer_rows(shipping)),
            "\n## Every result\n",
            *table("part, work, result", every),
            "",
        )
    )


def table(columns: str, rows: Iterable[Iterable[object]]) -> Iterator[str]:
    names = columns.split(", ")
    for row in (names, ["---"] * len(names), *rows):
        yield f"| {' | '.join(str(cell).replace('|', '/') for cell in row)} |"


def state(part: str, data: Mapping[str, Any], share: float) -> list[object]:
    """What is there of a part, and where it was measured."""
    where, results = data["environment"], data["results"].values()
    if not results:
        return [part, share, *[""] * 4, NOT_YET]
    software = f"torch {where['torch']}, CUDA {where['cuda']}, driver {where['driver']}"
    dates, commits = ({str(one[key])[:10] for one in results} for key in ("date", "commit"))
    count = f"{len(results) - len(problems(data)[0])} of {len(data['planned'])}"
    return [
        part,
        share,
        where["device"],
        software,
        *map(", ".join, map(sorted, (dates, commits))),
        count,
    ]


def problems(data: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """The works that failed, and those that are wrong or missed their goal."""
    results = data["results"].items()
    failed = [name for name, one in results if "error" in one]
    return failed, [name for name, one in results if one.get("ok") is False]


def padding(speed: Results) -> str:
    """How much faster the fastest padded form is than the fastest other one."""
    rates = speed.get("tresnet_l, training padded", {}).get("images_per_s", {})
    padded = [rate for form, rate in rates.items() if form.endswith("padded")]
    others = [rate for form, rate in rates.items() if not form.endswith("padded")]
    if not padded or not others:
        return NOT_YET
    gain = max(padded) / max(others) - 1
    return f"{gain:+.1%}, so it {'stays' if gain >= LEAST_GAIN else 'has to go'}"


def published(name: str, side: int, units: Mapping[str, Callable[[float], float]]) -> str:
    """The papers' figures for a network, in one unit, each with the first table that has it."""
    figures = dict[str, str]()
    for each in speeds():
        if (PRINTED.get(each.line), each.resolution) == (name, side) and each.quantity in units:
            figures.setdefault(f"{units[each.quantity](each.value):,.3g}", each.table)
    return "; ".join(f"{value} ({table})" for value, table in figures.items())


def training_rows(speed: Results) -> Iterator[list[object]]:
    for name, network in NETWORKS.items():
        side, paper = network.resolution, published(name, network.resolution, RATES)
        goals = {"timm eager": network.over_eager, "timm compiled": network.over_compiled}
        one = speed.get(f"{name}, training", {})
        rates = one.get("images_per_s", {})
        if not rates:
            yield [
                name,
                side,
                NOT_YET,
                *[""] * 3,
                *(f"({goal:g})" for goal in goals.values()),
                paper,
            ]
        for form, rate in rates.items():
            is_best, peak = form == one["best"], one["peak_memory_mib"][form]
            times = [
                f"{rate / rates[theirs]:.2f}" + f" ({goal:g})" * is_best if theirs in rates else ""
                for theirs, goal in goals.items()
            ]
            figures = f"{rate:,.0f}", f"{one['spreads'][form]:.1%}", f"{peak:,.0f}" if peak else ""
            yield [name, side, form, *figures, *times, paper if is_best else ""]


def ratio(one: Result, form: str) -> str:
    value = one.get("ratios", {}).get(form)
    return f"{value:.2f}" if value else ""


def batch_rows(batches: Results) -> Iterator[list[object]]:
    figures = {"plain compiled": "tresnet_m", "resnet50 eager": "resnet50"}
    for form in BATCH_FORMS:
        one = batches.get(f"tresnet_m, {form}", {})
        own = published(figures.get(form, ""), SIDE, {"largest batch": lambda value: value})
        yield [form, one.get("largest_batch", NOT_YET), one.get("predicted", ""), own]


def answer_rows(shipping: Results) -> Iterator[list[object]]:
    for name in PAIRS:
        for batch in sorted(BATCHES):
            one = shipping.get(f"{name}, batch {batch}", {})
            ms = one.get("ms_per_image", {})
            cells = [f"{ms[form]:.3g} ({ratio(one, form)})" if form in ms else "" for form in FORMS]
            eager = f"{ms['timm eager']:.3g}" if "timm eager" in ms else ""
            by_sheet = (
                "{1:.3g} ({0:.3g} to {2:.3g})".format(*one["estimated"])
                if one.get("estimated")
                else ""
            )
            paper = published(name, SIDE, MS) if batch == max(BATCHES) else ""
            yield [name, batch, cells[0] or NOT_YET, *cells[1:], eager, by_sheet, paper]


def ending(folder: Path, parts: Iterable[str], gpu: bool) -> Iterator[str]:
    """The last lines of the command: what each part came to, and padding."""
    files = {part: read(folder / f"{part}.json") for part in parts}
    for part, data in files.items():
        failed, wrong = problems(data)
        missing = [name for name in data["planned"] if name not in data["results"]]
        words = {"failed": failed, "wrong, or below the goal": wrong, "for the next call": missing}
        note = "".join(f"; {word}: {'; '.join(names)}" for word, names in words.items() if names)
        yield f"{part}: {len(data['results'])} of {len(data['planned'])}{note}"
    if not gpu:
        yield "not measured without a GPU: speeds, batches and times"
        return
    yield f"{PADDING}: {padding(files['speed']['results'])}"
