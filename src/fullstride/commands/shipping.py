"""Holds the commands that use trained networks: predict, export, report and label."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from fullstride.commands.flags import Images, OpenFlags, Run, Runs
from fullstride.deploy.settings import OfflineFlags, ShipSettings, Tta
from fullstride.io.console import Bar, console, print_parts, report_ignored, report_skipped
from fullstride.io.records import PositiveInt, check_bounds, refuse_flags
from fullstride.nets.preprocessing import LoadOptions

if TYPE_CHECKING:
    from fullstride.deploy.export import ExportResult
    from fullstride.deploy.exported import Model
    from fullstride.deploy.offline import Summary
    from fullstride.deploy.predict import Prediction
    from fullstride.nets.bundle import Bundle

EVERY_S = 1.0
CLASSES = 3  # printed for an image by default
SHIP = ShipSettings()


@dataclass(frozen=True, kw_only=True)
class VideoFlags:
    """The parts of a video that a network of clips sees."""

    # For videos, CLIPSxCROPS such as 10x3: the mean of the probabilities of so many clips all over
    # the video, with 1 or 3 crops of each; by default the middle clip.
    views: str = ""
    # Where the clips of --views begin: inclusive, evenly up to the last possible start, or
    # slowfast, which does not reach it.
    clip_starts: Literal["inclusive", "slowfast"] = "inclusive"
    # Print a line for each second of a video while it is decoded, computed from the frames so far.
    stream: bool = False
    # With --stream: seconds of video between lines; by default 1.
    every_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class ModelFlags(OpenFlags):
    """How a model is opened, and how it computes."""

    # Images per call.
    call_batch: PositiveInt = 32

    def __post_init__(self) -> None:
        check_bounds(self, "--")


TEACHER = ModelFlags(call_batch=128)
ALONE = OfflineFlags()


@dataclass(frozen=True, kw_only=True)
class PredictionFlags:
    """The predictions to make for an image."""

    # Number of most probable predictions to print for each image; by default 3 classes, and all
    # boxes of a detector.
    top: int | None = None
    # The lowest score of a detector's boxes; by default the score with the best F1 on its
    # validation images, or 0.3 if none was chosen.
    min_score: float | None = None
    # With flip, the mean of the probabilities of an image and its mirror image.
    tta: Tta = "none"


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """Where predictions go; by default they are printed."""

    # Print one line of JSON for each image.
    json: bool = False
    # A folder for parquet files with a row for each image, or a single .parquet file.
    out: Path | None = None
    # A store of other images, written by --out with the same model of the task retrieval: print its
    # --top images nearest to each image.
    nearest: Path | None = None
    # A folder for PNG files of the images with drawn predictions.
    draw: Path | None = None
    # A folder for lossless PNG files of pixel predictions: classes as palette indices, or 16-bit
    # depths in millimetres.
    maps: Path | None = None

    def check(self, videos: VideoFlags, offline: OfflineFlags) -> None:
        """Raise ValueError for flags that do not fit together."""
        has_starts = videos.clip_starts != VideoFlags.clip_starts
        if self.out and self.nearest:
            raise ValueError(
                "--nearest prints images, and --out writes embeddings: give one of them"
            )
        if self.out and (self.draw or self.maps):
            raise ValueError("--out writes rows, and --draw and --maps pictures: give one of them")
        if self.draw and self.maps and self.draw.resolve() == self.maps.resolve():
            raise ValueError(f"--draw and --maps are both {self.draw}: give each its own folder")
        if not self.out:
            of_rows = {name: value != getattr(ALONE, name) for name, value in vars(offline).items()}
            refuse_flags(of_rows, "without --out, the files of rows: add it")
        elif not videos.stream:
            printed = {"json": self.json, "views": videos.views, "clip_starts": has_starts}
            refuse_flags(printed, "with --out, which writes rows of images: leave it out")
        if videos.every_s is not None and not videos.stream:
            raise ValueError(f"--every-s {videos.every_s:g} is for --stream: add it")
        if videos.stream:
            others = {name: getattr(self, name) for name in ("out", "nearest", "draw", "maps")}
            refuse_flags(
                {"views": videos.views, "clip_starts": has_starts, **others},
                "do not go with --stream, a line for each clip: leave them out",
            )


def write_offline(
    kind: Literal["predictions", "pseudo_labels"],
    model: "Model",
    images: Sequence[str],
    out: Path,
    top: int,
    how: ModelFlags,
    offline: OfflineFlags,
    tta: Tta = "none",
) -> "Summary":
    """Run `deploy.offline.write_outputs` on the images, and print and return its summary."""
    from fullstride.data.prediction_store import check_store
    from fullstride.deploy.offline import (
        OfflineSettings,
        check_takes_images,
        open_images,
        this_device,
        write_outputs,
    )
    from fullstride.measure.environment import choose_device
    from fullstride.report.console_lines import offline_lines

    check_takes_images(model, out)
    check_store(out)
    device = this_device(choose_device(how.device))
    settings = OfflineSettings(**vars(offline), batch=how.call_batch, device=device, tta=tta)
    data = open_images(images)
    report_ignored(data.ignored)
    with Bar() as bar:
        summary = write_outputs(kind, model, data, out, top, settings, bar.watch)
    report_skipped(summary.skipped)
    print_parts(offline_lines(summary, out))
    if summary.images and len(summary.skipped) == summary.images:
        raise ValueError(f"none of the images could be read: {out} has the reasons")
    return summary


def predict(
    run: Run,
    images: Images,
    which: PredictionFlags,
    outputs: OutputFlags,
    how: ModelFlags,
    videos: VideoFlags,
    offline: OfflineFlags,
) -> None:
    """Predict what images or videos show, by task: classes, labels, objects, regions or depths.

    Example: fullstride predict runs/digits photo.jpg

    With --out, predictions for any number of images go to parquet files, by one or more processes.
    After a stop, the same command continues.

    Args:
        run: A run, a bundle, an exported file, a file of weights, or a name with released weights.
        images: Image files, folders of images, or - for a list of paths on standard input. With
            --out also a list in a .txt, .csv or .tsv file, tar shards, IDX files or digits. For a
            network of clips: video files, folders of frames, and folders of these.
    """
    from fullstride.data.readers.folder import IMAGES, VIDEOS
    from fullstride.deploy.predict import check_pictures, find_images, predict, with_min_score
    from fullstride.deploy.streaming import stream_all
    from fullstride.measure.environment import choose_device
    from fullstride.tasks import find_task

    if which.top is not None and which.top < 1:
        raise ValueError(f"--top {which.top}: use 1 or more")
    outputs.check(videos, offline)
    model, tta = how.open(run), which.tta
    if which.min_score is not None:
        model = with_min_score(model, which.min_score)
    top = which.top or max(CLASSES, find_task(model.task).most_objects)
    if outputs.out:
        write_offline("predictions", model, images, outputs.out, top, how, offline, tta)
        return
    device = choose_device(how.device)
    kind = VIDEOS if videos.stream or model.preprocessing.frames else IMAGES
    paths, ignored = find_images(images, kind=kind)
    report_ignored(ignored)
    for flag, folder in (("draw", outputs.draw), ("maps", outputs.maps)):
        if folder:
            check_pictures(flag, folder, paths)
    if videos.stream:
        every_s = EVERY_S if videos.every_s is None else videos.every_s
        rows = stream_all(model, paths, every_s=every_s, top=top, device=device, tta=tta)
    else:
        views, starts = videos.views, videos.clip_starts
        rows = predict(model, paths, top, how.call_batch, device, tta, views, starts)
    if not print_predictions(rows, model, outputs, top):
        raise ValueError(f"none of the {kind.name} could be read")


def print_predictions(
    rows: "Iterable[Prediction]", model: "Model", outputs: OutputFlags, top: int
) -> bool:
    """Print and draw each prediction as it comes; return whether any image was readable."""
    from fullstride.deploy.offline import nearest_images
    from fullstride.deploy.predict import drawings, map_files

    folders = [drawings(model, outputs.draw)] if outputs.draw else []
    folders += [map_files(model, outputs.maps)] if outputs.maps else []
    skipped: dict[str, str] = {}
    lines = 0
    if outputs.nearest:
        rows = nearest_images(rows, outputs.nearest, model, top)
    for row in rows:
        if row.unreadable:
            skipped[row.path] = row.unreadable
        else:
            lines += 1
            for folder in folders:
                folder.write(row)
        if outputs.json:
            print(dumps(row.to_json()), flush=True)
        elif not row.unreadable:
            print_parts([str(row)])
    report_skipped(skipped)
    return lines > 0


# Settings that choose a run; the others belong to a file.
CHOOSING = ("budget_ms", "images_per_s", "call_batch", "bench")


@dataclass(frozen=True, kw_only=True)
class PushFlags:
    """Whether a network also goes to the Hugging Face hub."""

    # A repository of the Hugging Face hub, USER/NAME, for the network, a card, and the file of
    # --out, if any. It is created as private if needed.
    push: str = ""
    # With --push: the repository is public.
    public: bool = False

    def check(self, out: Path | None, settings: ShipSettings) -> None:
        """Raise ValueError for wrong flags before slow work begins."""
        from fullstride.nets.bundle import FILE_LIMITS
        from fullstride.nets.weights.hub import check_destination

        if self.push:
            check_destination(self.push, self.public, FILE_LIMITS)
        elif self.public:
            raise ValueError("--public is for --push USER/NAME: add it, or leave --public out")
        elif out is None:
            raise ValueError("nothing to write: give --out FILE, --push USER/NAME, or both")
        if out is None:
            others = [name for name in vars(SHIP) if name not in CHOOSING]
            of_files = {name: getattr(settings, name) != getattr(SHIP, name) for name in others}
            refuse_flags(of_files, "without --out, the file to write: add it")

    def commit(self, bundle: "Bundle", exported: "ExportResult | None") -> None:
        from fullstride.deploy.choose_form import measure_bundle, measure_files
        from fullstride.deploy.formats import FORMATS, open_file
        from fullstride.report.model_card import push_to_hub

        times, path = [measure_bundle(bundle)], exported.path if exported else None
        if exported and not FORMATS[exported.format].runs_on:
            model = open_file(exported.path, trust=True)
            times += measure_files({exported.path.name: model}, times[0].protocol)
        address = push_to_hub(bundle, self.push, public=self.public, exported=path, times=times)
        print(f"hf:{self.push}: {address}")


def export(
    runs: Runs,
    *,
    out: Path | None = None,
    settings: ShipSettings,
    loading: LoadOptions,
    push: PushFlags,
) -> None:
    """Write a trained network as a file for another runtime, and compare it with PyTorch.

    Example: fullstride export runs/digits --out digits.onnx

    With --push the network goes to the Hugging Face hub, alone or with the file.

    Args:
        runs: A run, a bundle or a name with released weights. With several, the best test score
            decides which is exported, and among ties the time.
        out: The file or folder to write.
    """
    from fullstride.deploy.export_runs import choose_run, export_runs
    from fullstride.report.console_tables import export_table

    push.check(out, settings)
    exported = None
    with Bar() as bar:
        if out is None:
            _, bundle = choose_run(runs, settings, loading=loading, progress=bar.print)
        else:
            bundle, exported = export_runs(
                runs, out, settings, loading=loading, progress=bar.print, watch=bar.watch
            )
    if exported:
        console().print(export_table(exported))
        metadata = exported.metadata
        if metadata.float_layers:
            print(f"in float: {', '.join(metadata.float_layers)}")
        print(
            f"{exported.path}: {exported.format}, {metadata.precision}, {metadata.input_kind} in, "
            f"run by {exported.runtime}"
        )
    if push.push:
        push.commit(bundle, exported)


def report(
    runs: Runs,
    out: Path = Path("report.html"),
    bench: Path | None = None,
    picture: Path | None = None,
    data: str = "",
    trust: bool = False,
) -> None:
    """Write an HTML page about models: accuracy against latency, learning curves, predicted images.

    Example: fullstride report runs/digits --out report.html

    Args:
        runs: Finished runs on the same data, and bundles and exported files to score on its test
            images.
        out: The page, a self-contained file.
        bench: A file of `fullstride bench --out`, for times; its other networks are shown as
            untrained.
        picture: With --bench: a PNG file for the plot of accuracy against latency.
        data: The images, if none of the models is a run; by default the first run's images.
        trust: Also open files of the formats pt2 and aoti, which are programs.
    """
    from fullstride.io.writing import PAGE, PLOT, check_output
    from fullstride.report import page, plots
    from fullstride.report.gather import gather

    if not runs:
        raise ValueError("nothing to report: name one or more run folders")
    check_output(out, PAGE)
    check_output(picture, PLOT)
    if not bench:
        refuse_flags({"picture": picture}, "is a plot of measured times: give them by --bench")
    content = gather(runs, bench, data=data, trust=trust)
    page.write(out, page.render(content))
    if picture:
        plots.save_png(page.picture(content.entries), picture)
    print(out.resolve())


def pseudo_label(
    teacher: Run,
    images: Images,
    out: Path,
    *,
    top: int = 10,
    min_confidence: float = 0.3,
    per_class: int = 0,
    how: ModelFlags = TEACHER,
    offline: OfflineFlags,
) -> None:
    """Store a teacher's probabilities for images without labels, for --recipe.unlabelled.

    Example: fullstride data label runs/teacher photos --out labels

    After a stop, the same command continues. Several processes share the work by --rank and
    --ranks, or under torchrun.

    Args:
        teacher: A run, a bundle, an exported file, a file of weights, or a name with released
            weights.
        images: A folder with images at any depth, a list of images in a .txt, .csv or .tsv file,
            tar shards, IDX files or digits.
        out: The folder of the store, or a single .parquet file.
        top: Number of largest probabilities to store for each image; the other classes share the
            rest of the mass.
        min_confidence: For the printed table: lowest probability of the best class of a used image,
            see --recipe.unlabelled-min-confidence.
        per_class: For the printed table: images per class, see --recipe.unlabelled-per-class.
    """
    from fullstride.report.console_tables import pseudo_label_table
    from fullstride.train.distill import read_pseudo_labels, select

    if top < 1 or per_class < 0 or not 0 <= min_confidence <= 1:
        raise ValueError(
            f"--top {top} --per-class {per_class} --min-confidence {min_confidence:g}: use 1 or "
            "more, 0 or more, and a number from 0 to 1"
        )
    model = how.open(teacher)
    if not write_offline("pseudo_labels", model, images, out, top, how, offline).missing:
        chosen = select(read_pseudo_labels(out), min_confidence, per_class)
        console().print(pseudo_label_table(chosen))
