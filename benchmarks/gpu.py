"""What do the kernels, the lean networks and the papers' tables do on this GPU? Everything that wants one, in one go.

    python benchmarks/gpu.py --out benchmarks/results_gpu --commit $(git rev-parse --short HEAD)

Needs torch, timm, triton, torchvision, rich, safetensors and numpy, and pytest for a part; the package need not be
installed. Each part is a process of its own, which ends when its minutes are over; whatever fails is written down and
stops nothing else. `--device cpu --tiny` shows that the script itself works.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SOURCE, TESTS = ROOT / "src", ROOT / "tests" / "fused"
sys.path[:0] = [str(SOURCE), str(TESTS)]

import numpy as np  # noqa: E402
import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
from torch import Tensor, nn  # noqa: E402

from fullstride.deploy.fold_batch_norm import fold_batch_norm  # noqa: E402
from fullstride.measure.bench import measure_all  # noqa: E402
from fullstride.measure.environment import Environment, choose_device  # noqa: E402
from fullstride.measure.memory.max_batch import Trial, largest, predict, search  # noqa: E402
from fullstride.measure.protocols import THROUGHPUT  # noqa: E402
from fullstride.measure.workload import Step, compiling, exact_float32  # noqa: E402
from fullstride.nets import fused_form, zoo  # noqa: E402
from fullstride.nets.fused import reference  # noqa: E402
from fullstride.nets.fused.dispatch import choose  # noqa: E402
from fullstride.nets.fused.reference import Affine, Slopes  # noqa: E402
from fullstride.nets.network import Network  # noqa: E402
from fullstride.papers import suite  # noqa: E402

FORMATS = {"nhwc": torch.channels_last, "nchw": torch.contiguous_format}
LINES, WIDTH = 100, 160  # of the summary
GRACE = 0.9  # of a part's minutes, after which nothing begins any more


@dataclass(frozen=True, kw_only=True)
class Asked:
    device: torch.device
    tiny: bool
    out: Path
    seconds: float  # that the part may take

    @property
    def gpu(self) -> bool:
        return self.device.type == "cuda"


Finding = dict[str, Any]  # what is written down; "told" is its line in the summary
Work = tuple[str, Callable[[], Finding]]


# ---- Are the numbers right?

NETWORKS = {"tresnet_m": 160, "resnet_rs_50": 160, "genet_large": 192}
TINY = {"tresnet_tiny": 32}
IMAGES = 8
WORSE = 2.0  # times the error of the plain network that a lean one may have: its sums are in another order
NOISE = {"float32": 1e-4, "bfloat16": 1e-2}  # relative error that says nothing
BEYOND = 2**31  # elements: more than 32 bits count
WANTED_BYTES = 60 * 2**30  # free on the GPU for maps of so many elements


def correctness(asked: Asked) -> Iterator[Work]:
    if asked.gpu:
        yield "kernels, main sentences", partial(sentences, "not slow")
    for name, side in (TINY if asked.tiny else NETWORKS).items():
        for precision in NOISE:
            for layout in FORMATS:
                yield (
                    f"gradients of {name}, {precision}, {layout}",
                    partial(gradients, asked, name, side, precision, layout),
                )
    for layout in FORMATS:
        yield f"maps beyond 2^31 elements, {layout}", partial(beyond, asked, layout)
    if asked.gpu:
        yield "kernels, all shapes", partial(sentences, "slow")


def sentences(mark: str) -> Finding:
    """What pytest says of the kernels' own tests; its settings are for other versions' warnings too."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-o",
        "filterwarnings=default",
    ]
    done = subprocess.run(
        [*command, "-m", mark, str(TESTS / "kernels_in_triton.py")],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    lines = (
        done.stdout.strip().splitlines()
        or done.stderr.strip().splitlines()
        or ["pytest said nothing"]
    )
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    return {
        "ok": done.returncode == 0,
        "told": lines[-1],
        "failed": failed,
        "end": lines[-60:] if failed else [],
    }


def gradients(asked: Asked, name: str, side: int, precision: str, layout: str) -> Finding:
    """Of lean and plain networks against the plain one in float64, over all weights and for the worst of them."""
    torch.manual_seed(0)
    net = zoo.create(name)
    for norm in net.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.uniform_(norm.weight, 0.2, 1.2)
            nn.init.normal_(norm.bias, std=0.1)
    images, labels = torch.randn(IMAGES, 3, side, side), torch.arange(IMAGES) % net.spec.classes

    def of(lean: bool, kind: torch.dtype, half: bool) -> list[Tensor]:
        twin = zoo.create(name)
        twin.load_state_dict(net.state_dict())
        twin = twin.to(asked.device, kind).to(memory_format=FORMATS[layout]).train()  # pyright: ignore
        assert isinstance(twin, Network)
        x = images.to(asked.device, kind).contiguous(memory_format=FORMATS[layout])
        with torch.autocast(asked.device.type, torch.bfloat16, enabled=half):
            loss = F.cross_entropy(
                (fused_form.fused(twin) if lean else twin)(x).to(kind), labels.to(asked.device)
            )
        loss.backward()
        return [p.grad.double().flatten() for p in twin.parameters() if p.grad is not None]

    half = precision == "bfloat16"
    with exact_float32():
        true = of(False, torch.float64, False)
        found = {"lean": of(True, torch.float32, half), "plain": of(False, torch.float32, half)}
    error = {
        kind: ((torch.cat(g) - torch.cat(true)).norm() / torch.cat(true).norm()).item()
        for kind, g in found.items()
    }
    cosine = {
        kind: min(
            F.cosine_similarity(a, b, 0).item()
            for a, b in zip(g, true, strict=True)
            if b.numel() >= 1000
        )
        for kind, g in found.items()
    }
    ok = error["lean"] <= WORSE * error["plain"] + NOISE[precision]
    told = ", ".join(
        f"{kind} off by {error[kind]:.1e}, worst cosine {cosine[kind]:.5f}" for kind in found
    )
    return {"ok": ok, "error": error, "worst_cosine": cosine, "told": told}


def beyond(asked: Asked, layout: str) -> Finding:
    """The last two images of maps of more than 2^31 elements, against the plain pass over those two in float64."""
    if not asked.gpu and not asked.tiny:
        raise ValueError("maps of 2^31 elements are for a GPU")
    if asked.gpu and torch.cuda.mem_get_info(asked.device)[0] < WANTED_BYTES:
        raise ValueError(f"less than {WANTED_BYTES / 2**30:.0f} GiB are free")
    channels, side = (4, 6) if asked.tiny else (64, 56)
    images = 4 if asked.tiny else BEYOND // (channels * side**2) + 3
    kernels, one = (
        choose(torch.zeros(1, device=asked.device)),
        given(asked, images, channels, side, layout),
    )
    sentences = tests_of_kernels()
    last = sentences.each(one, lambda t: t[-2:].clone() if t.ndim > 1 and len(t) == images else t)
    wrong = {}
    for number, form in enumerate(sentences.FORMS):
        ours = [t[-2:].double() for t in sentences.answers(kernels, form, one)]
        true = sentences.answers(reference, form, sentences.each(last, Tensor.double))
        off = max(
            ((a - b).abs().max() / b.abs().max().clamp(min=1)).item()
            for a, b in zip(ours, true, strict=True)
        )
        if not off <= 2**-7:
            wrong[f"{form[0]}-{number}"] = off
    told = (
        f"wrong: {', '.join(wrong)}"
        if wrong
        else f"{len(sentences.FORMS)} forms right, {one.x.numel():,} elements"
    )
    return {"ok": not wrong, "wrong": wrong, "elements": one.x.numel(), "told": told}


@cache
def tests_of_kernels() -> Any:
    """The tests' table of all passes; Triton is wanted to read it."""
    if not torch.cuda.is_available():
        os.environ["TRITON_INTERPRET"] = "1"  # it reads its device from this
    try:
        return import_module("kernels_in_triton")
    finally:
        os.environ.pop("TRITON_INTERPRET", None)


def given(asked: Asked, n: int, c: int, side: int, layout: str) -> Any:
    """Something for each argument of a pass, in bf16, made on the device."""
    torch.manual_seed(0)

    def maps(side: int = side) -> Tensor:
        made = torch.empty(
            n,
            c,
            side,
            side,
            dtype=torch.bfloat16,
            device=asked.device,
            memory_format=FORMATS[layout],
        )
        return made.normal_()

    def numbers() -> Tensor:
        return torch.rand(n, c, device=asked.device) + 0.5

    affines = [Affine(torch.randn(c, device=asked.device), numbers(), numbers()) for _ in range(2)]
    slopes = [Slopes(numbers(), numbers(), numbers()) for _ in range(2)]
    four = [maps() for _ in range(4)]
    return tests_of_kernels().Given(
        *four, maps((side + 1) // 2), *affines, *slopes, numbers(), numbers()
    )


# ---- How near to the memory's speed is each pass?

TAILS = (
    (64, 56),
    (128, 28),
    (1024, 14),
    (2048, 7),
)  # channels and pixels a side at the ends of stages
ELEMENTS = 2**28  # of a map: many times what the cache holds, and calls longer than their launch
CALLS = 20


def bandwidth(asked: Asked) -> Iterator[Work]:
    for layout in FORMATS:
        for channels, side in TAILS[:1] if asked.tiny else TAILS:
            yield (
                f"{side}x{side}x{channels}, {layout}",
                partial(gigabytes, asked, channels, side, layout, "as trained"),
            )
    for channels, side in TAILS if asked.gpu else ():
        yield (
            f"{side}x{side}x{channels}, nhwc, plain passes compiled by torch",
            partial(gigabytes, asked, channels, side, "nhwc", "compiled"),
        )


def gigabytes(asked: Asked, channels: int, side: int, layout: str, how: str) -> Finding:
    """GB/s of every pass: maps in and out, each counted once, and the time of a call; `copy` is what a copy gets."""
    images = 2 if asked.tiny else max(1, ELEMENTS // (channels * side**2))
    one = given(asked, images, channels, side, layout)
    kernels = choose(one.x)
    found, failed = {}, {}
    if how == "as trained":
        found["copy"] = 2 * size_bytes(one.x) / seconds(asked, one.x.clone) / 1e9
    seen = set()
    for number, (name, arguments) in enumerate(tests_of_kernels().FORMS):
        if how == "compiled" and name in seen:
            continue  # one form of each: compiling takes longer than all calls
        seen.add(name)
        taken = arguments(one)
        call = getattr(kernels, name)
        if how == "compiled":
            torch.compiler.reset()
            call = torch.compile(getattr(reference, name), dynamic=False)
        try:
            gave = call(*taken)
            gave = gave if isinstance(gave, tuple) else (gave,)
            moved = sum(
                size_bytes(t) for t in (*taken, *gave) if isinstance(t, Tensor) and t.ndim == 4
            )
            found[f"{name}-{number}"] = moved / seconds(asked, partial(call, *taken)) / 1e9
        except Exception as error:
            failed[f"{name}-{number}"] = suite.reason(error)
    rates = sorted(rate for name, rate in found.items() if name != "copy")
    if not rates:
        raise ValueError(f"no pass ran: {next(iter(failed.values()))}")
    slowest = min(
        (name for name in found if name != "copy"), key=lambda name: found[name], default="none"
    )
    told = f"copy {found['copy']:,.0f} GB/s, " if "copy" in found else ""
    told += f"passes {rates[0]:,.0f} to {rates[-1]:,.0f}, median {np.median(rates):,.0f}, slowest {slowest}"
    told += f"; failed: {', '.join(failed)}" if failed else ""
    return {
        "gb_per_s": found,
        "failed": failed,
        "images": images,
        "passes": kernels.__name__,
        "told": told,
    }


def size_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def seconds(asked: Asked, call: Callable[[], object]) -> float:
    """Of a call, the median."""
    for _ in range(1 if asked.tiny else 5):
        call()
    if not asked.gpu:
        start = time.perf_counter()
        call()
        return time.perf_counter() - start
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(CALLS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        call()
        mark.record()
    torch.cuda.synchronize()
    return (
        float(np.median([a.elapsed_time(b) for a, b in zip(marks, marks[1:], strict=False)])) / 1e3
    )


# ---- Numbers to reach

# Network -> timm's, pixels, images, and how many times as fast as timm eager and compiled ours should train.
GOALS = {
    "tresnet_m": ("tresnet_m", 224, 256, 1.4, 1.2),
    "resnet_rs_50": ("resnetrs50", 160, 256, 1.65, 1.3),
    "genet_large": ("gernet_l", 256, 256, 1.25, 1.1),
    "resnet_rs_101": ("resnetrs101", 192, 256, 1.65, 1.3),
}
TINY_GOALS = {"tresnet_tiny": ("test_resnet", 32, 4, 0.0, 0.0)}
# For widths that are not multiples of 8: the same, with ours as it is in the place of timm's.
PADDED = {"tresnet_l": ("tresnet_l", 224, 256, 1.0, 1.0)}
GOAL_INFERENCE = 1.15  # of ours, folded and compiled, to timm's compiled


def ratios(asked: Asked) -> Iterator[Work]:
    goals = TINY_GOALS if asked.tiny else GOALS
    for name in goals:
        yield f"{name}, training", partial(race, asked, name, goals[name], "training")
    for name in goals:
        yield f"{name}, inference", partial(race, asked, name, goals[name], "inference")
    for name, goal in (TINY_GOALS if asked.tiny else PADDED).items():
        yield f"{name}, training padded", partial(race, asked, name, goal, "training", padded=True)


def runners(
    name: str, twin: str, work: str, padded: bool
) -> dict[str, tuple[Callable[[], nn.Module], bool]]:
    """Who races: how each is built, and whether torch.compile has it."""
    if padded:
        narrow, wide = (
            partial(zoo.create, name, efficiency="lean", padded=each) for each in (False, True)
        )
        ways = {"ours lean": narrow, "ours padded lean": wide}
        return {
            who + how: (build, bool(how))
            for how in ("", " compiled")
            for who, build in ways.items()
        }
    timm, ours = partial(zoo.create, f"timm/{twin}"), partial(zoo.create, name)
    found: dict[str, tuple[Callable[[], nn.Module], bool]] = {
        "timm eager": (timm, False),
        "timm compiled": (timm, True),
    }
    if work == "inference":
        fold: Callable[[], nn.Module] = lambda: fold_batch_norm(ours())  # noqa: E731
        return {
            **found,
            "ours plain": (ours, False),
            "ours folded": (fold, False),
            "ours folded compiled": (fold, True),
        }
    lean = partial(zoo.create, name, efficiency="lean")
    found |= {
        "ours plain": (ours, False),
        "ours lean": (lean, False),
        "ours lean compiled": (lean, True),
    }
    if name == "tresnet_m":
        resnet = partial(zoo.create, "timm/resnet50")
        found |= {"resnet50 eager": (resnet, False), "resnet50 compiled": (resnet, True)}
    return found


def race(
    asked: Asked,
    name: str,
    goal: tuple[str, int, int, float, float],
    work: str,
    padded: bool = False,
) -> Finding:
    """All in turn in every round, each in the layout that is its best; a compiled one has that of its eager twin."""
    twin, side, batch, over_eager, over_compiled = goal
    short = (
        dict(warmup_s=0.0, rounds=2, round_s=0.01)
        if asked.tiny
        else dict(warmup_s=0.5, rounds=3, round_s=0.2)
    )
    trial = replace(THROUGHPUT, batch=batch, resolution=side, work=work, **short)
    full = trial if asked.tiny else replace(trial, warmup_s=1.0, rounds=15)
    layouts: dict[str, str] = {}
    tried: dict[str, dict[str, float]] = {}
    steps: dict[str, Step] = {}
    failed: dict[str, str] = {}

    def step(build: Callable[[], nn.Module], layout: str, compiled: bool) -> Step:
        how: dict[str, Any] = dict(precision="bfloat16", layout=layout, compiled=compiled)
        made = Step(build(), work, batch, side, asked.device, **how)  # pyright: ignore[reportArgumentType]
        made()  # compiles, picks algorithms
        return made

    with exact_float32(), compiling(True):
        for who, (build, compiled) in runners(name, twin, work, padded).items():
            if compiled and not asked.gpu:
                continue
            try:
                if compiled:
                    layout = (
                        layouts.get(who.removesuffix("compiled") + "eager")
                        or layouts[who.removesuffix(" compiled")]
                    )
                    steps[who] = step(build, layout, True)
                else:
                    both = {layout: step(build, layout, False) for layout in FORMATS}
                    rates = measure_all(both, trial, asked.device, precision="bfloat16")
                    tried[who] = {one.name: one.images_per_s for one in rates}
                    layout = max(tried[who], key=lambda key: tried[who][key])
                    steps[who] = both.pop(layout)
                layouts[who] = layout
            except Exception as error:
                failed[who] = suite.reason(error)
                error.__traceback__ = None
        found = {
            one.name: one for one in measure_all(steps, full, asked.device, precision="bfloat16")
        }
    rates = {who: one.images_per_s for who, one in found.items()}
    ours = "ours padded" if padded else "ours"
    best = max((who for who in rates if who.startswith(ours)), key=lambda who: rates[who])
    times = {
        who: float(np.median(np.divide(found[best].samples, found[who].samples)))
        for who in found
        if who != best
    }
    goals = {"timm eager": over_eager, "timm compiled": over_compiled}
    goals |= {"ours lean": over_eager, "ours lean compiled": over_compiled} if padded else {}
    goals = goals if work == "training" else {"timm compiled": GOAL_INFERENCE}
    if name == "tresnet_m" and work == "training":
        goals |= {"resnet50 eager": 1.0, "resnet50 compiled": 1.0}
    goals = {who: least for who, least in goals.items() if who in times}
    told = f"{best} {rates[best]:,.0f}/s; " + ", ".join(
        f"x{times[w]:.2f} {w} (goal {g:g})" for w, g in goals.items()
    )
    told += f"; failed: {', '.join(failed)}" if failed else ""
    samples = {who: one.samples for who, one in found.items()}
    here = {who: asdict(one.environment) for who, one in found.items()}
    return {
        **dict(
            ok=all(times[w] >= g for w, g in goals.items()) and not failed,
            told=told,
            best=best,
            times=times,
        ),
        **dict(
            goals=goals,
            images_per_s=rates,
            batch=batch,
            resolution=side,
            precision="bfloat16",
            layouts=layouts,
        ),
        **dict(layouts_tried=tried, failed=failed, samples=samples, environments=here),
    }


# ---- The largest batch

GIB = 16.0


def batches(asked: Asked) -> Iterator[Work]:
    lean = partial(zoo.create, "tresnet_m", efficiency="lean")
    nets: dict[str, tuple[Callable[[], nn.Module], bool]] = {
        "timm/tresnet_m": (partial(zoo.create, "timm/tresnet_m"), False),
        "timm/resnet50": (partial(zoo.create, "timm/resnet50"), False),
        "tresnet_m lean": (lean, False),
        "tresnet_m lean compiled": (lean, True),
        "tresnet_m": (partial(zoo.create, "tresnet_m"), False),
        "tresnet_m lean int8 compiled": (partial(lean, int8=True), True),
    }
    if asked.tiny:
        nets = {
            "tresnet_tiny lean": (partial(zoo.create, "tresnet_tiny", efficiency="lean"), False)
        }
    for label, (build, compiled) in nets.items():
        yield f"{label} under {GIB:g} GiB", partial(batch_of, asked, label, build, compiled)


def batch_of(asked: Asked, label: str, build: Callable[[], nn.Module], compiled: bool) -> Finding:
    net, side = build(), 32 if asked.tiny else 224
    room = GIB * 2**30 if asked.gpu else 2**28
    guess = predict(
        net, room, side, "bfloat16", device="cuda" if asked.gpu else "cpu", compiled=compiled
    )
    trial = Trial(
        net=net,
        resolution=side,
        device=str(asked.device),
        memory_bytes=room,
        precision="bfloat16",
        layout="nhwc",
        compiled=compiled,
        map_batch=guess.map_batch,
    )
    probes = list(
        islice(search(trial.probe, 8 if asked.tiny else guess.batch), 1 if asked.tiny else None)
    )
    found = largest(probes, label)
    told = f"{found}, predicted {guess.batch}, {len(probes)} tries"
    return {
        "largest_batch": found,
        "predicted": guess.batch,
        "probes": [asdict(p) for p in probes],
        "told": told,
    }


# ---- The papers' tables


def papers(asked: Asked) -> Iterator[Work]:
    yield "quick suite", partial(quick_suite, asked)


def quick_suite(asked: Asked) -> Finding:
    """Rows lie in a folder that is lost; the page and its data are brought out after each."""
    given: dict[str, Any] = dict(networks=("genet_tiny",), resolution=32) if asked.tiny else {}
    failed, count, page = [], 0, ""
    with tempfile.TemporaryDirectory() as folder:
        rows = Path(folder)
        for row in suite.run(
            rows, device=asked.device, quick=True, minutes=GRACE * asked.seconds / 60, **given
        ):
            print(row.summary(), flush=True)
            count, failed = count + 1, [*failed, *row.failed]
            for name in (suite.PAGE, suite.DATA):
                shutil.copy(rows / name, asked.out / f"suite_{name}")
        page = (rows / suite.PAGE).read_text()
    left = page.count("not measured yet")
    told = f"{count} contests, {left} left for want of time, {len(failed)} failures; see suite_{suite.PAGE}"
    return {
        "ok": not failed and not left,
        "contests": count,
        "left": left,
        "failed": failed,
        "told": told,
    }


# ---- Does training learn, and is it fed?


def training(asked: Asked) -> Iterator[Work]:
    from fullstride.train.recipes import DIGITS

    # on a CPU, bf16 and NHWC do not go together
    how = dict(channels_last=True, efficiency="lean") if asked.gpu else {}
    recipe = replace(DIGITS, precision="bf16", **how)
    if asked.tiny:
        recipe = replace(recipe, steps=2, warmup_epochs=0, batch=16, resolution=32)
    yield "digits, tresnet_tiny", partial(learn, asked, recipe)
    yield "bench-data on the digits", partial(fed, asked, recipe)


def learn(asked: Asked, recipe: Any) -> Finding:
    """Epochs for two minutes, of a recipe that would go on; its scores are of the weights at that time."""
    from fullstride.data.dataset import open_data
    from fullstride.train import run

    last, limit = {}, 1.0 if asked.tiny else min(120.0, 0.6 * asked.seconds)
    began, rates = time.perf_counter(), []
    with tempfile.TemporaryDirectory() as folder:
        rows = run.train(
            Path(folder),
            "tresnet_tiny",
            open_data("digits"),
            recipe,
            device=asked.device,
            workers=workers(asked),
        )
        for last in rows:
            rates.append(last["images_per_s"])
            if time.perf_counter() - began > limit:
                break
        rows.close()  # pyright: ignore[reportAttributeAccessIssue]
    told = f"{len(rates)} epochs, loss {last['loss']:.3f}, minival {last['minival/top1']:.1f} %"
    told += f", {np.median(rates):,.0f} images/s, {last['data_share']:.0%} of the time waiting"
    return {
        "ok": asked.tiny or last["minival/top1"] > 90,
        "epochs": rates,
        "last": last,
        "told": told,
    }


def fed(asked: Asked, recipe: Any) -> Finding:
    from fullstride.data.dataset import open_data
    from fullstride.train import data_bench

    how = dict(workers=workers(asked), device=asked.device, seconds=0.1 if asked.tiny else 5.0)
    found = data_bench.bench_data("tresnet_tiny", open_data("digits"), recipe, **how)  # pyright: ignore[reportArgumentType]
    return {**asdict(found), "told": found.verdict()}


def workers(asked: Asked) -> int:
    return 0 if asked.tiny else max(1, min(8, (os.cpu_count() or 1) - 1))


# ---- Part by part

# What it is called -> its work, and the minutes it has where none are given.
PARTS: dict[str, tuple[Callable[[Asked], Iterator[Work]], float]] = {
    "correctness": (correctness, 4),
    "bandwidth": (bandwidth, 3),
    "ratios": (ratios, 9),
    "batches": (batches, 5),
    "papers": (papers, 8),
    "training": (training, 3.5),
}


def do(part: str, asked: Asked, commit: str = "", match: str = "") -> None:
    """One part, in this process; the file grows with every finding."""
    here = Environment.here(asked.device)
    told = {
        "part": part,
        "environment": asdict(replace(here, commit=commit or here.commit)),
        "findings": [],
    }
    deadline = time.monotonic() + GRACE * asked.seconds
    for name, work in PARTS[part][0](asked):
        if match not in name:
            continue
        began = time.monotonic()
        if began > deadline:
            finding: Finding = {"error": "not begun: the part's minutes were over"}
        else:
            try:
                finding = work()
            except Exception as error:
                finding = {"error": suite.reason(error)}
                error.__traceback__ = None  # it holds maps
        if asked.gpu:
            free()
        told["findings"].append(
            {"name": name, **finding, "seconds": round(time.monotonic() - began, 1)}
        )
        write(asked.out / f"{part}.json", told)
        print(line(part, told["findings"][-1]), flush=True)


def free() -> None:
    with suppress(RuntimeError):  # a bad access before: all that follows says so itself
        torch.cuda.empty_cache()


def line(part: str, finding: Finding) -> str:
    sign = ("ok   " if finding["ok"] else "BAD  ") if "ok" in finding else "     "
    said = (
        f"error: {finding['error']}" if isinstance(finding.get("error"), str) else finding["told"]
    )
    return f"{sign}{part}: {finding['name']}: {said}"[:WIDTH]


def write(path: Path, told: Any) -> None:
    beside = path.with_suffix(".new")
    beside.write_text(json.dumps(told, indent=1, default=str) + "\n")
    beside.replace(path)


def start(part: str, words: Sequence[str], seconds: float) -> str | None:
    """The part in a process of its own with all that it starts; returns why it ended, where it was not by itself."""
    variables = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")]),
    }
    command = [sys.executable, __file__, "--only", part, "--minutes", str(seconds / 60), *words]
    process = subprocess.Popen(command, env=variables, start_new_session=True)
    try:
        code = process.wait(seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return f"ended after its {seconds / 60:g} minutes"
    return f"exit code {code}" if code else None


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--device", default="auto")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--minutes", type=float, help="of each part; each has its own otherwise")
    parser.add_argument(
        "--out", type=Path, default=os.environ.get("OUT") or ROOT / "benchmarks" / "results_gpu"
    )
    parser.add_argument("--commit", default="", help="where git cannot be asked")
    parser.add_argument(
        "--match", default="", help="only what has this in its name, as resnet_rs or nhwc"
    )
    parser.add_argument(
        "--tiny", action="store_true", help="tiny networks and maps, to try the script itself"
    )
    parser.add_argument("--only", choices=list(PARTS), help=argparse.SUPPRESS)
    args = parser.parse_args()
    device, out = choose_device(args.device), Path(args.out)
    out.mkdir(parents=True, exist_ok=True)
    if args.only:
        asked = Asked(device=device, tiny=args.tiny, out=out, seconds=60 * args.minutes)
        do(args.only, asked, args.commit, args.match)
        return
    words = [
        "--device",
        str(device),
        "--out",
        str(out),
        "--commit",
        args.commit,
        "--match",
        args.match,
    ]
    words += ["--tiny"] * args.tiny
    ends, summary = {}, []
    for part in args.parts:
        (out / f"{part}.json").unlink(missing_ok=True)
        ends[part] = start(part, words, 60 * (args.minutes or PARTS[part][1]))
        written = out / f"{part}.json"
        summary += (
            [line(part, f) for f in json.loads(written.read_text())["findings"]]
            if written.exists()
            else []
        )
        summary += [f"BAD  {part}: {ends[part]}"] if ends[part] else []
        write(out / "summary.json", {"ends": ends, "lines": summary})
    print("\n".join(["", *summary[: LINES - 1]]))


if __name__ == "__main__":
    main()
