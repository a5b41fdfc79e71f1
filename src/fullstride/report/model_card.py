"""Writes the card of a bundle, and commits both to the Hugging Face hub."""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from fullstride.io.console import count_of, first_names, printable
from fullstride.measure.protocols import Measurement
from fullstride.nets.bundle import FILE_LIMITS, Bundle
from fullstride.nets.efficiency import short_precision
from fullstride.nets.weights.hub import CARD, EXPORTED, commit
from fullstride.report.console_tables import score_interval, three_digits
from fullstride.tables import PERMISSIVE, REPOSITORY
from fullstride.tasks import common_metric, find_task
from fullstride.tasks.task import Metric

# Name of a task -> the hub's name, if it has one.
PIPELINES = {
    "classify": "image-classification",
    "multilabel": "image-classification",
    "detect": "object-detection",
    "retrieval": "image-feature-extraction",
    "segment": "image-segmentation",
    "depth": "depth-estimation",
    "video": "video-classification",
}
MOST_CLASSES = 50  # named on a card


def push_to_hub(
    bundle: Bundle,
    repository: str,
    *,
    public: bool = False,
    exported: Path | None = None,
    times: Sequence[Measurement] = (),
) -> str:
    """Commit a bundle and its card to a repository of the Hugging Face hub, and return its address.

    The repository USER/NAME is created if needed, private unless `public`. `zoo.load` opens it as
    `hf:USER/NAME`. All files are one commit; exported files of earlier commits are replaced.

    Raises ValueError, in one line and before anything is written, without a token or a network, for
    a repository with files that are not a bundle's, and for a public repository that should be
    private or vice versa.

    Args:
        exported: A file or folder of `export`, committed to the folder `exported`.
        times: Measurements of the network and the file by `bench`, for the card.

    Examples:
        >>> import fullstride
        >>> bundle = fullstride.train_network("digits", "genet_tiny", "runs/few", steps=2)
        >>> address = fullstride.push_to_hub(bundle, "USER/digits")  # doctest: +SKIP
    """
    with TemporaryDirectory() as temporary:
        folder = Path(temporary) / "bundle"
        bundle.save(folder)
        files: dict[str, Path | bytes] = {name: folder / name for name in FILE_LIMITS}
        files |= {EXPORTED + name: path for name, path in files_in(exported).items()}
        files[CARD] = model_card(bundle, repository, [*files], times).encode()
        return commit(repository, files, public, FILE_LIMITS)


def files_in(path: Path | None) -> dict[str, Path]:
    """The file, or the files in a folder, by path relative to its parent folder."""
    if path is None:
        return {}
    files = [path] if path.is_file() else sorted(each for each in path.rglob("*") if each.is_file())
    return {each.relative_to(path.parent).as_posix(): each for each in files}


def model_card(
    bundle: Bundle, repository: str, files: Sequence[str], times: Sequence[Measurement] = ()
) -> str:
    """Markdown with the hub's header: a network's task, facts, use, scores and times."""
    from huggingface_hub import ModelCardData

    pre, environment = bundle.preprocessing, bundle.environment
    names = first_names(bundle.classes, MOST_CLASSES)
    trained = [environment.get(key) for key in ("date", "device")]
    if images := environment.get("train_images"):
        trained.insert(0, f"on {images:,} images")
    facts = [
        ("task", bundle.task),
        ("network", repr(bundle.net)),
        ("classes", f"{len(bundle.classes):,}: {names}"),
        ("input", f"{count_of(pre.channels, 'channel')}, {pre}"),
        ("pixels", f"0 to 1, minus {list(pre.mean)}, divided by {list(pre.std)}"),
        ("resizing", f"{pre.kernel}, by Pillow"),
        ("weights", bundle.source or "unknown"),
        ("licence of the initial weights", bundle.licence or "none stated"),
        ("trained", ", ".join(str(each) for each in trained if each) or "unknown"),
        ("files", ", ".join(files)),
    ]
    rows = []
    for split, metric, values in scores(bundle):
        between = score_interval(metric, values)
        limits = f"{between[0]:.2f} to {between[1]:.2f}" if between else ""
        images = f"{values['images']:,}" if "images" in values else ""
        rows.append((split, images, metric.text(values[metric.name]), limits))
    header = ModelCardData(**header_fields(bundle)).to_yaml()
    parts = [
        f"---\n{header}\n---",
        f"# {escape(printable(bundle.name))}",
        use(bundle, repository),
        markdown_table(("", ""), facts),
        "## Scores",
        markdown_table(("split", "images", "score", "95 % interval"), rows),
    ]
    if times:
        columns = ("what", "device", "computed by", "ms p50", "ms p99", "images/s", "protocol")
        parts += ["## Times", markdown_table(columns, map(time_row, times))]
    return "\n\n".join(parts) + "\n"


def header_fields(bundle: Bundle) -> dict[str, Any]:
    """The fields of the YAML header, which the hub lists and searches models by."""
    from huggingface_hub import EvalResult

    pipeline = PIPELINES.get(bundle.task)
    licence: dict[str, str] = {}
    if bundle.licence in PERMISSIVE:  # names that the hub knows
        licence = {"license": bundle.licence}
    elif bundle.licence:
        licence = {"license": "other", "license_name": bundle.licence}
    data = bundle.source.removeprefix("trained on ").partition(",")[0] or "unknown"
    results = [
        EvalResult(
            task_type=pipeline or bundle.task,
            dataset_type="images",
            dataset_name=data,
            dataset_split=split,
            metric_type=metric.name,
            metric_name=metric.label,
            metric_value=values[metric.name],
        )
        for split, metric, values in scores(bundle)
    ]
    return {
        **licence,
        "library_name": "fullstride",
        "pipeline_tag": pipeline,
        "tags": ["fullstride", "convnet", bundle.task],
        "metrics": list(dict.fromkeys(each.metric_type for each in results)) or None,
        **({"model_name": bundle.name, "eval_results": results} if results else {}),
    }


def scores(bundle: Bundle) -> list[tuple[str, Metric, Mapping[str, Any]]]:
    """The splits of a bundle with each scored metric of its task, and the split's scores."""
    metrics = find_task(bundle.task).metrics(common_metric([bundle]))
    return [
        (split, metric, values)
        for split, values in bundle.scores.items()
        for metric in metrics
        if metric.name in values
    ]


def time_row(row: Measurement) -> tuple[str, ...]:
    how, times = row.protocol, (row.ms_p50, row.ms_p99)
    return (
        row.name,
        row.environment.device,
        row.runtime or f"PyTorch {row.environment.torch}, {short_precision(row.precision)}",
        *("" if each is None else three_digits(each) for each in times),
        three_digits(row.images_per_s),
        f"{how.name}, batch {how.batch}, {how.resolution} pixels, {how.rounds} rounds of "
        f"{how.round_s:g} s, {count_of(row.environment.threads, 'thread')}",
    )


def use(bundle: Bundle, repository: str) -> str:
    """Example code that predicts with the bundle."""
    name = f"{REPOSITORY}{repository}"
    picture = "clip.mp4" if bundle.preprocessing.frames else "photo.jpg"
    return f"""```bash
fullstride predict {name} {picture}
```

```python
from fullstride import predict, tasks

bundle = tasks.load("{name}")
for prediction in predict(bundle, "{picture}"):
    print(prediction)
```"""


def markdown_table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table with escaped cells, which may have names by others."""
    cells = [[escape(printable(cell)).replace("|", "&#124;") for cell in row] for row in rows]
    lines = [columns, ["---"] * len(columns), *cells]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)
