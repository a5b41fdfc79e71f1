"""How fast do networks train and answer, in each form, beside those of timm, and at what batch?"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import islice
from typing import Any, NamedTuple, get_args

import numpy as np
import torch
from torch import nn

from fullstride.measure.bench import BenchOptions, measure_all
from fullstride.measure.max_batch import Trial, largest, peak_mib, search
from fullstride.measure.protocols import THROUGHPUT, Protocol
from fullstride.measure.workload import Step, StepOptions
from fullstride.nets import padding, zoo
from fullstride.nets.efficiency import Efficiency, is_compiled
from gpu_parts.in_turn import time_in_turn
from gpu_parts.settings import FORMATS, Result, Settings, Work


class Network(NamedTuple):
    timm: str
    resolution: int  # pixels per side
    batch: int
    over_eager: float  # goal: times the training speed of timm's network, eager
    over_compiled: float  # the same of timm's network, compiled


NETWORKS = {
    "tresnet_m": Network("tresnet_m", 224, 256, 1.4, 1.2),
    "resnet_rs_50": Network("resnetrs50", 160, 256, 1.65, 1.3),
    "genet_large": Network("gernet_l", 256, 256, 1.25, 1.1),
    "resnet_rs_101": Network("resnetrs101", 192, 256, 1.65, 1.3),
}
TINY = {"tresnet_tiny": Network("test_resnet", 32, 4, 0.0, 0.0)}
PADDED = {"tresnet_l": Network("tresnet_l", 224, 256, 1.0, 1.0)}  # widths that 8 does not divide


BF16 = BenchOptions(precision="bfloat16")


class Form(NamedTuple):
    """How a network is built and run in a race."""

    build: Callable[[], nn.Module]
    efficiency: Efficiency = "plain"
    compiled: bool = False  # by torch.compile alone


def training_forms(name: str, timm: str) -> dict[str, Form]:
    """The two ways of training that a recipe has, and timm's network."""
    theirs, ours = partial(zoo.create, f"timm/{timm}"), partial(zoo.create, name)
    forms = {
        "timm eager": Form(theirs),
        "timm compiled": Form(theirs, compiled=True),
        "plain": Form(ours),
        "plain compiled": Form(ours, "plain_compiled"),
    }
    if name == "tresnet_m":
        resnet = partial(zoo.create, "timm/resnet50")
        forms["resnet50 eager"] = Form(resnet)
        forms["resnet50 compiled"] = Form(resnet, compiled=True)
    return forms


def padded(name: str) -> nn.Module:
    return padding.to_padded(zoo.create(name), name)


def padding_forms(name: str) -> dict[str, Form]:
    return {
        f"{efficiency.replace('_', ' ')}{suffix}": Form(partial(build, name), efficiency)
        for build, suffix in ((zoo.create, ""), (padded, " padded"))
        for efficiency in get_args(Efficiency)
    }


def speed(settings: Settings) -> Iterator[Work]:
    networks = NETWORKS if settings.gpu else TINY
    for number, (name, network) in enumerate(networks.items()):
        forms = partial(training_forms, name, network.timm)
        goals = {"timm eager": network.over_eager, "timm compiled": network.over_compiled}
        if name == "tresnet_m":
            goals |= {"resnet50 eager": 1.0, "resnet50 compiled": 1.0}
        yield f"{name}, training", partial(race, settings, forms, network, goals)
        for padded, other in (PADDED if settings.gpu else TINY).items() if number == 0 else ():
            forms = partial(padding_forms, padded)
            yield f"{padded}, training padded", partial(race, settings, forms, other, {})


@dataclass(frozen=True)
class StepMaker:
    """Makes the training step of a form: eager ones in the faster layout, compiled ones in NHWC."""

    form: Form
    trial: Protocol  # by which the layouts are compared
    device: torch.device

    def __call__(self) -> tuple[Step, dict[str, Any]]:
        form = self.form
        compiled = form.compiled or is_compiled(form.efficiency)
        steps = {layout: self.step(layout) for layout in (["nhwc"] if compiled else FORMATS)}
        rates: dict[str, float] = {}
        if not compiled:
            rows = measure_all(steps, self.trial, self.device, BF16)
            rates = {row.name: row.images_per_s for row in rows}
        layout = max(rates, key=rates.__getitem__, default="nhwc")
        step = steps[layout]
        peak = peak_mib(step.resident(), step, self.device)
        return step, {"layout": layout, "peak_memory_mib": peak, "layouts": rates}

    def step(self, layout: Any) -> Step:
        options = StepOptions(
            precision="bfloat16",
            layout=layout,
            compiled=self.form.compiled,
            efficiency=self.form.efficiency,
        )
        net, trial = self.form.build(), self.trial
        first = Step(net, "training", trial.batch, trial.resolution, self.device, options=options)
        first()  # compiles and selects algorithms
        return first


def race(
    settings: Settings,
    build_forms: Callable[[], Mapping[str, Form]],
    network: Network,
    goals: Mapping[str, float],
) -> Result:
    """Images/s of all forms, in turn in every round, and peak memory."""
    side, batch = network.resolution, network.batch
    short: dict[str, Any] = dict(warmup_s=0.3, rounds=3, round_s=0.2)
    if not settings.gpu:
        short = dict(warmup_s=0.0, rounds=2, round_s=0.01)
    trial = replace(THROUGHPUT, batch=batch, resolution=side, work="training", **short)
    final = replace(trial, warmup_s=0.5, rounds=15) if settings.gpu else trial
    makers = {
        name: StepMaker(form, trial, settings.device)
        for name, form in build_forms().items()
        if settings.gpu or not (form.compiled or is_compiled(form.efficiency))
    }
    rows, failed = time_in_turn(makers, final, settings.device, settings.seconds / 2)
    rates = {name: row.rate for name, row in rows.items()}
    ours = [name for name in rates if not name.startswith(("timm", "resnet50"))]
    best = max(ours, key=rates.__getitem__)
    ratios = {
        name: float(np.median(np.divide(rows[best].images_per_s, row.images_per_s)))
        for name, row in rows.items()
        if name != best
    }
    goals = {name: goal for name, goal in goals.items() if name in ratios}
    summary = "images/s: " + ", ".join(f"{name} {rate:,.0f}" for name, rate in rates.items())
    if goals:
        factors = ", ".join(f"{ratios[n]:.2f}x {n} (goal {goal:g})" for n, goal in goals.items())
        summary += f"; {best} is {factors}"
    summary += f"; failed: {', '.join(failed)}" if failed else ""
    return {
        "ok": all(ratios[name] >= goal for name, goal in goals.items()) and not failed,
        "summary": summary,
        "best": best,
        "ratios": ratios,
        "goals": goals,
        "images_per_s": rates,
        "spreads": {name: row.spread for name, row in rows.items()},
        "peak_memory_mib": {name: row.facts["peak_memory_mib"] for name, row in rows.items()},
        "batch": batch,
        "resolution": side,
        "layouts": {
            name: row.facts["layouts"] or row.facts["layout"] for name, row in rows.items()
        },
        "failed": failed,
        "samples": {name: row.samples for name, row in rows.items()},
    }


# ---- The largest batch

GIB = 16.0
BATCH_FORMS = ("timm eager", "resnet50 eager", "plain", "plain compiled")


def batches(settings: Settings) -> Iterator[Work]:
    name = "tresnet_m" if settings.gpu else "tresnet_tiny"
    forms = training_forms(name, (TINY | NETWORKS)[name].timm)
    for label in BATCH_FORMS if settings.gpu else ("plain",):
        yield f"{name}, {label}", partial(largest_batch, settings, label, forms[label])


def largest_batch(settings: Settings, label: str, form: Form) -> Result:
    """The largest batch under 16 GiB, predicted, then proven in fresh processes."""
    net, side = form.build(), 224 if settings.gpu else 32
    memory_bytes = GIB * 2**30 if settings.gpu else 2**28
    trial = Trial(
        net=net,
        resolution=side,
        device=str(settings.device),
        memory_bytes=memory_bytes,
        options=StepOptions(precision="bfloat16", layout="nhwc", efficiency=form.efficiency),
    )
    probes = search(trial.probe, trial.prediction.batch if settings.gpu else 8)
    probes = list(islice(probes, None if settings.gpu else 1))
    batch = largest(probes, label)
    return {
        "largest_batch": batch,
        "predicted": trial.prediction.batch,
        "probes": [asdict(probe) for probe in probes],
        "summary": f"{batch}, predicted {trial.prediction.batch}, {len(probes)} tries",
    }
