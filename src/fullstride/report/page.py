"""How does the result of a training look on one page? A self-contained HTML file that opens anywhere, also offline."""

import base64
import io
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from fullstride.report import plots
from fullstride.report.format import count, ms, percent, three_digits, wilson
from fullstride.report.plots import EpochRow, Point
from fullstride.storage import atomic_write

TINY = 96  # pixels a side below which a picture is enlarged with sharp pixels
THUMBNAIL = 256  # pixels a side that a picture is reduced to, so that the page stays small
# A browser will load nothing from elsewhere, whatever stands in a name.
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What is told of one network. None: not trained, or not measured."""

    name: str
    data: str  # what it was trained and tested on
    top1: float | None  # per cent of the test images
    test_images: int
    params: int
    macs: int  # multiply-adds of one image
    resolution: int  # pixels a side
    ms_p50: float | None = None  # one image at a time
    ms_p99: float | None = None
    images_per_s: float | None = None  # in batches
    batch: int | None = None
    log: Sequence[EpochRow] = ()
    note: str = ""

    @property
    def interval(self) -> tuple[float, float] | None:
        """The 95 % interval of `top1`."""
        return (
            wilson(self.top1, self.test_images)
            if self.top1 is not None and self.test_images
            else None
        )


@dataclass(frozen=True)
class Prediction:
    """One test image and what the network made of it."""

    picture: np.ndarray  # uint8, (H, W) or (H, W, C)
    truth: str
    guess: str
    probability: float  # of the guess


def render(
    title: str,
    entries: Sequence[Entry],
    predictions: Sequence[Prediction],
    environment: Mapping[str, Any],
    notes: Sequence[str] = (),
) -> str:
    """The page. Speeds are told relative to the first network that was not trained here, else to the first."""
    if not entries:
        raise ValueError("nothing to report: give at least one network")
    entries = distinct(entries)
    sections = (
        ("Accuracy against latency", latency_section(entries)),
        ("The networks", table(entries, reference(entries))),
        ("Learning curves", curves_section(entries)),
        ("Predicted images", pictures(predictions)),
        ("Where the numbers were made", facts(environment)),
        ("Notes", bullets(notes)),
    )
    body = "\n".join(
        f"<section>\n<h2>{name}</h2>\n{html}\n</section>" for name, html in sections if html
    )
    return whole(title, headline(entries), body)


def whole(title: str, lead: str, body: str, more_css: str = "") -> str:
    """An HTML file that loads nothing. `lead` and `body` are HTML."""
    css = resources.files(__package__ or __name__).joinpath("page.css").read_text() + more_css
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{escape(title)}</title>
<style>
{css}</style>
</head>
<body>
<main>
<h1>{escape(title)}</h1>
<p class="lead">{lead}</p>
{body}
</main>
</body>
</html>
"""


def write(path: str | Path, html: str) -> None:
    """Write the page whole or not at all; folders above it are made."""
    path = Path(path)
    if path.is_dir():
        raise ValueError(f"{path} is a folder: give a file, as {path / 'report.html'}")
    try:
        with atomic_write(path) as beside:
            beside.write_bytes(html.encode("utf-8", "xmlcharrefreplace"))
    except OSError as error:
        raise ValueError(f"{path} cannot be written: {error.strerror}; give another file") from None


def picture(entries: Sequence[Entry]) -> bytes:
    """The plot of accuracy against latency as PNG, for a README."""
    return plots.png(plots.accuracy_latency_figure(*points(entries)))


def distinct(entries: Sequence[Entry]) -> list[Entry]:
    """The same with a number after every name that stands there already."""
    seen: Counter[str] = Counter()
    named = []
    for entry in entries:
        seen[entry.name] += 1
        number = seen[entry.name]
        named.append(replace(entry, name=f"{entry.name} ({number})") if number > 1 else entry)
    return named


def reference(entries: Sequence[Entry]) -> Entry:
    return next((entry for entry in entries if entry.top1 is None), entries[0])


def headline(entries: Sequence[Entry]) -> str:
    scored = [(entry.top1, entry) for entry in entries if entry.top1 is not None]
    if not scored:
        return "No network was trained: this page tells costs and times only."
    top1, best = max(scored, key=lambda pair: pair[0])
    words = f"<strong>{escape(best.name)}</strong> names {percent(top1)} of {best.test_images:,} test images"
    words += f" of {escape(best.data)} right" if best.data else " right"
    if best.interval:
        low, high = best.interval
        words += f" (95 % interval {low:.1f} to {high:.1f})"
    if best.ms_p50:
        words += f" and takes {ms(best.ms_p50)} for one image"
        base = reference(entries)
        if base is not best and base.ms_p50:
            words += f", {times(base.ms_p50 / best.ms_p50)} the speed of {escape(base.name)}"
    rivals = [e.name for _, e in scored if e is not best and overlap(e.interval, best.interval)]
    if rivals:
        words += f". By these test images alone {escape(' and '.join(rivals))} may be as good"
    return words + "."


def overlap(a: tuple[float, float] | None, b: tuple[float, float] | None) -> bool:
    return a is not None and b is not None and a[1] >= b[0] and b[1] >= a[0]


def latency_section(entries: Sequence[Entry]) -> str:
    shown, data = points(entries)
    if not shown:
        return (
            "<p>No times: measure with <code>fullstride bench --out</code> and give its file.</p>"
        )
    caption = "Up and to the left is better. Bars are 95 % intervals; hollow rings were timed here but not trained."
    return f"<figure>{plots.accuracy_latency(shown, data)}\n<figcaption>{caption}</figcaption></figure>"


def points(entries: Sequence[Entry]) -> tuple[list[Point], str]:
    """What the plot shows, and the data set where it is one."""
    shown = [Point(e.name, e.ms_p50, e.top1, e.interval) for e in entries if e.ms_p50 is not None]
    data = {e.data for e in entries if e.top1 is not None}
    return shown, data.pop() if len(data) == 1 else ""


def table(entries: Sequence[Entry], base: Entry) -> str:
    names = (
        "network", "top-1<small>95 % interval</small>", "parameters", "MACs", "pixels",
        "one image<small>median, p99</small>", "in batches<small>median</small>",
    )  # fmt: skip
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    rows = "\n".join(row(entry, base) for entry in entries)
    caption = (
        "Intervals are Wilson's, at 95 %. MACs are multiply-adds of one image; FLOPs are twice as many. "
        f"The reference of speeds is {escape(base.name)}."
    )
    return (
        f'<div class="wide"><table><caption>{caption}</caption>\n<thead><tr>{head}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody></table></div>"
    )


def row(entry: Entry, base: Entry) -> str:
    top1 = "not trained here"
    if entry.top1 is not None:
        top1 = percent(entry.top1)
        if entry.interval:
            top1 += "<small>{:.1f} to {:.1f}</small>".format(*entry.interval)
    online = batched = "not measured"
    if entry.ms_p50 is not None:
        tail = f"p99 {ms(entry.ms_p99)}" if entry.ms_p99 is not None else ""
        ratio = base.ms_p50 / entry.ms_p50 if base.ms_p50 else None
        online = ms(entry.ms_p50) + small(tail) + relative(ratio, entry is base)
    if entry.images_per_s is not None:
        ratio = entry.images_per_s / base.images_per_s if base.images_per_s else None
        size = f"batch {entry.batch}" if entry.batch else ""
        batched = f"{three_digits(entry.images_per_s)} images/s{small(size)}{relative(ratio, entry is base)}"
    cells = (top1, count(entry.params), count(entry.macs), str(entry.resolution), online, batched)
    note = f"<small>{escape(entry.note)}</small>" if entry.note else ""
    return (
        f'<tr><th scope="row">{escape(entry.name)}{note}</th>'
        + "".join(f"<td>{c}</td>" for c in cells)
        + "</tr>"
    )


def small(words: str) -> str:
    return f"<small>{words}</small>" if words else ""


def relative(ratio: float | None, is_reference: bool) -> str:
    if is_reference or ratio is None:
        return small("reference" if is_reference else "")
    return small(f"{times(ratio)} as fast")


def times(ratio: float) -> str:
    return f"{ratio:.2f} ×" if ratio < 10 else f"{ratio:.0f} ×"


def curves_section(entries: Sequence[Entry]) -> str:
    curves = {entry.name: entry.log for entry in entries if entry.log}
    if not curves:
        return ""
    caption = "Training loss, and top-1 on images held back from training, after every epoch."
    return f"<figure>{plots.learning_curves(curves)}\n<figcaption>{caption}</figcaption></figure>"


def pictures(predictions: Sequence[Prediction]) -> str:
    if not predictions:
        return ""
    wrong = sum(p.truth != p.guess for p in predictions)
    cards = "\n".join(card(p) for p in predictions)
    told = f"{len(predictions) - wrong} right and {wrong} wrong ones are shown; how often each happens is in the table."
    return f'<p class="soft">{told}</p>\n<ul class="pictures">\n{cards}\n</ul>'


def card(prediction: Prediction) -> str:
    image = Image.fromarray(np.squeeze(prediction.picture))
    crisp = ' class="pixels"' if max(image.size) < TINY else ""
    image.thumbnail((THUMBNAIL, THUMBNAIL))
    out = io.BytesIO()
    image.save(out, "png")
    uri = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
    truth, guess = escape(prediction.truth), escape(prediction.guess)
    right = prediction.truth == prediction.guess
    verdict = (
        '<span class="right">✓ right</span>' if right else '<span class="wrong">✗ wrong</span>'
    )
    told = f"{guess}, {100 * prediction.probability:.0f} %" + (
        "" if right else f"<br>truth: {truth}"
    )
    return f'<li><img{crisp} src="{uri}" alt="test image of class {truth}">{verdict}<br>{told}</li>'


def facts(environment: Mapping[str, Any]) -> str:
    rows = "\n".join(
        f'<tr><th scope="row">{escape(str(name))}</th><td>{escape(str(value))}</td></tr>'
        for name, value in environment.items()
        if value is not None
    )
    return f'<table class="facts"><tbody>\n{rows}\n</tbody></table>' if rows else ""


def bullets(notes: Sequence[str]) -> str:
    return (
        "<ul>\n" + "\n".join(f"<li>{escape(note)}</li>" for note in notes) + "\n</ul>"
        if notes
        else ""
    )
