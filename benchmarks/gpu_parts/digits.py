"""Does the quick suite run, does a fit end with a file, and does the loader keep up?"""

import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from fullstride.data.dataset import open_data
from fullstride.papers import suite
from fullstride.train import timing
from fullstride.train.recipes.named import DIGITS
from gpu_parts.settings import TIME_SHARE, Result, Settings, Work, run_command


def papers(settings: Settings) -> Iterator[Work]:
    yield "quick suite", partial(quick_suite, settings)


def quick_suite(settings: Settings) -> Result:
    """Raises ValueError where contests are left for the next call, which goes on after them."""
    options: dict[str, Any] = {}
    if not settings.gpu:
        options = dict(networks=("genet_tiny",), resolution=32)
    minutes = TIME_SHARE * settings.seconds / 60
    failed, count, out = [], 0, settings.out / "papers"
    for row in suite.run(out, device=settings.device, quick=True, minutes=minutes, **options):
        print(row.summary(), flush=True)
        count, failed = count + 1, [*failed, *row.failed]
    missing = (out / suite.PAGE).read_text().count("not measured yet")
    if missing:
        raise ValueError(f"{missing} cells wait for the next call, after {count} contests")
    return {
        "ok": not failed,
        "contests": count,
        "failed": failed,
        "summary": f"{count} contests, {len(failed)} failures; see papers/{suite.PAGE}",
    }


def training(settings: Settings) -> Iterator[Work]:
    yield "fit of the digits", partial(fit_digits, settings)
    yield "data bench on the digits", partial(bench_data, settings)


def fit_digits(settings: Settings) -> Result:
    """The command that ships a file: it trains, exports and measures on this device."""
    words = ["--candidates", "genet_tiny", "tresnet_tiny", "--resolutions", "32"]
    words += ["--budget-ms", "1", "--minutes", f"{0.6 * settings.seconds / 60:.2f}"]
    if not settings.gpu:
        words = ["--candidates", "genet_tiny", "--resolutions", "16", "--epochs", "1"]
        words += ["--budget-ms", "1000", "--formats", "onnx", "--precisions", "fp32"]
    with tempfile.TemporaryDirectory() as folder:
        words += ["--weights", "none", "--out", f"{folder}/fit", "--device", str(settings.device)]
        code, lines = run_command("fit", "digits", *words)
    scores = [line for line in lines if " as " in line and " test top-1 " in line]
    return {"ok": code == 0, "summary": "; ".join(scores or lines[-1:]), "lines": lines}


def bench_data(settings: Settings) -> Result:
    options: dict[str, Any] = dict(device=settings.device, seconds=5.0 if settings.gpu else 0.1)
    options["workers"] = max(1, min(8, (os.cpu_count() or 1) - 1)) if settings.gpu else 0
    # on a CPU, bf16 with channels last is refused
    fast = replace(DIGITS, precision="bf16", channels_last=settings.gpu, resolution=32)
    result = timing.bench_data("tresnet_tiny", open_data("digits"), fast, **options)
    return {**asdict(result), "summary": result.verdict()}
