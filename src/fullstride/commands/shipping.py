"""Holds the commands that use trained networks: predict, export, report and label."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import arg

from fullstride.commands.flags import Images, Loading, OpenFlags, Run, Runs, refuse_flags
from fullstride.deploy.settings import PART_IMAGES, ShipSettings
from fullstride.io.console import (
    Bar,
    console,
    print_parts,
    printable,
    report_ignored,
    report_skipped,
)
from fullstride.io.records import PositiveInt, check_bounds
from fullstride.nets.preprocessing import BY_DEFAULT

if TYPE_CHECKING:
    from fullstride.deploy.export import ExportResult
    from fullstride.deploy.exported import Model
    from fullstride.deploy.offline import Summary
    from fullstride.deploy.predict import Prediction
    from fullstride.nets.bundle import Bundle

EVERY_S = 1.0
CLASSES = 3  # that are printed for an image by default
Ship = Annotated[ShipSettings, arg(name="")]  # the flags have the names of its fields
SHIP = ShipSettings()


@dataclass(frozen=True, kw_only=True)
class VideoFlags:
    """Which parts of a video a network of clips sees."""

    # Of a video, CLIPSxCROPS such as 10x3: the mean of the probabilities of so many clips all over
    # it, and 3 crops of each or 1; by default its middle clip.
    views: str = ""
    # Where the clips of --views begin: inclusive, evenly up to the last possible start, or
    # slowfast, which does not reach it.
    clip_starts: Literal["inclusive", "slowfast"] = "inclusive"
    # A line for each second of a video as soon as it is computed, by the frames up to there.
    stream: bool = False
    # With --stream: seconds of the video from a line to the next one; by default 1.
    every_s: float | None = None


Videos = Annotated[VideoFlags, arg(name="")]  # the flags have the names of its fields
ONE_CLIP = VideoFlags()


@dataclass(frozen=True, kw_only=True)
class ModelFlags(OpenFlags):
    """How a model is opened, and how it computes."""

    # Images of a call.
    call_batch: PositiveInt = 32

    def __post_init__(self) -> None:
        check_bounds(self, "--")


HowModel = Annotated[ModelFlags, arg(name="")]  # the flags have the names of its fields
MODEL, TEACHER = ModelFlags(), ModelFlags(call_batch=128)


@dataclass(frozen=True, kw_only=True)
class PredictionFlags:
    """Which predictions are made of an image."""

    # How many predictions to print for each, the most probable; by default 3 classes, and all
    # boxes of a detector.
    top: int | None = None
    # The score from which a detector predicts boxes; by default that with the best F1 on its
    # validation images, or 0.3 where none was chosen.
    min_score: float | None = None
    # With flip, the mean of the probabilities of an image and of its mirror image.
    tta: Literal["none", "flip"] = "none"


Which = Annotated[PredictionFlags, arg(name="")]  # the flags have the names of its fields
MOST_PROBABLE = PredictionFlags()


@dataclass(frozen=True, kw_only=True)
class OutputFlags:
    """Where predictions go; by default they are printed."""

    # Print one line of JSON for each image.
    json: bool = False
    # A folder for parquet files with a row for each image, or a single .parquet file.
    out: Path | None = None
    # What --out wrote for other images, by the same model of the task retrieval: print the --top
    # images of it that are nearest to each image.
    nearest: Path | None = None
    # A folder for the images with the predictions drawn, as PNG files.
    draw: Path | None = None
    # A folder for the predictions of each pixel as PNG files without losses: classes as the indices
    # of a palette, or depths in millimetres as 16 bits.
    maps: Path | None = None

    def check(self, videos: VideoFlags) -> None:
        """Raises ValueError for flags that do not fit together."""
        if self.out and self.nearest:
            raise ValueError(
                "--nearest prints images, and --out writes embeddings: give one of them"
            )
        if self.out and (self.draw or self.maps):
            raise ValueError("--out writes rows, and --draw and --maps pictures: give one of them")
        if videos.every_s is not None and not videos.stream:
            raise ValueError(f"--every-s {videos.every_s:g} is for --stream: add it")
        if videos.stream:
            others = {name: getattr(self, name) for name in ("out", "nearest", "draw", "maps")}
            refuse_flags(
                {"views": videos.views, **others},
                "do not go with --stream, a line for each clip: leave them out",
            )


Outputs = Annotated[OutputFlags, arg(name="")]  # the flags have the names of its fields
PRINTED = OutputFlags()


@dataclass(frozen=True, kw_only=True)
class OfflineFlags:
    """How a process takes part in the predictions for many images."""

    # With --out: processes that decode images beside this one.
    workers: int = 0
    # With --out: number of this process, from 0, where several share the images; by default
    # torchrun's.
    rank: int | None = None
    # With --out: processes that share the images, also on other machines with the same folder.
    ranks: int | None = None
    # With --out: images of a part of the output, which is the unit of what is lost by a stop.
    part_images: int = PART_IMAGES

    def write(
        self,
        kind: Literal["predictions", "pseudo_labels"],
        model: "Model",
        images: Sequence[str],
        out: Path,
        top: int,
        how: ModelFlags,
        tta: Literal["none", "flip"] = "none",
    ) -> "Summary":
        """What `deploy.offline.write_outputs` did with the images, after printing it."""
        from fullstride.data.prediction_store import check_store
        from fullstride.deploy.offline import (
            OfflineSettings,
            check_takes_images,
            open_images,
            this_device,
            this_share,
            write_outputs,
        )
        from fullstride.measure.environment import choose_device
        from fullstride.report.console_lines import offline_lines

        check_takes_images(model, out)
        check_store(out)
        rank, ranks = this_share(self.rank, self.ranks)
        settings = OfflineSettings(
            batch=how.call_batch,
            device=this_device(choose_device(how.device)),
            workers=self.workers,
            tta=tta,
            rank=rank,
            ranks=ranks,
            part_images=self.part_images,
        )
        data = open_images(images)
        report_ignored(data.ignored)
        with Bar() as bar:
            summary = write_outputs(kind, model, data, out, top, settings, bar.watch)
        report_skipped(summary.skipped)
        print_parts(offline_lines(summary, out))
        if summary.images and len(summary.skipped) == summary.images:
            raise ValueError(f"none of the images could be read: {out} has the reasons")
        return summary


Offline = Annotated[OfflineFlags, arg(name="")]  # the flags have the names of its fields
OFFLINE = OfflineFlags()


def predict(
    run: Run,
    images: Images,
    which: Which = MOST_PROBABLE,
    outputs: Outputs = PRINTED,
    how: HowModel = MODEL,
    videos: Videos = ONE_CLIP,
    offline: Offline = OFFLINE,
) -> None:
    """Predict what images or videos show: classes, labels, objects, regions or depths, by the task.

    Example: fullstride predict runs/digits photo.jpg

    With --out, any number of images are predicted into parquet files, by one process or several.
    The same command goes on after a stop.

    Args:
        run: A run, a bundle, an exported file, a file of weights, or a name with released weights.
        images: Image files, folders of them, or - for a list of paths on standard input. With
            --out also a list in a .txt, .csv or .tsv file, tar shards, IDX files or digits. For a
            network of clips video files, folders of frames, and folders of these.
    """
    from fullstride.data.readers.folder import IMAGES, VIDEOS
    from fullstride.deploy.predict import find_images, predict, with_min_score
    from fullstride.deploy.streaming import stream_all
    from fullstride.measure.environment import choose_device
    from fullstride.tasks import find_task

    if which.top is not None and which.top < 1:
        raise ValueError(f"--top {which.top}: use 1 or more")
    outputs.check(videos)
    model, tta = how.open(run), which.tta
    if which.min_score is not None:
        model = with_min_score(model, which.min_score)
    top = which.top or max(CLASSES, find_task(model.task).most_objects)
    if outputs.out:
        offline.write("predictions", model, images, outputs.out, top, how, tta)
        return
    device = choose_device(how.device)
    kind = VIDEOS if videos.stream or model.preprocessing.frames else IMAGES
    paths, ignored = find_images(images, kind=kind)
    report_ignored(ignored)
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
    """Print each prediction as it comes, and draw it. Returns whether any image was readable."""
    from fullstride.deploy.nearest import nearest_images
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
            print(printable(str(row)), flush=True)
    report_skipped(skipped)
    return lines > 0


# Settings that choose a run; the others are of a file.
CHOOSING = ("budget_ms", "images_per_s", "call_batch", "bench")


@dataclass(frozen=True, kw_only=True)
class PushFlags:
    """Whether a network also goes to the Hugging Face hub."""

    # A repository of the Hugging Face hub, USER/NAME, for the network, a card, and the file of
    # --out if there is one. It is created if need be, and private.
    push: str = ""
    # With --push: the repository is public.
    public: bool = False

    def check(self, out: Path | None, settings: ShipSettings) -> None:
        """Raises ValueError, before anything that takes time, for what would be refused later."""
        from fullstride.nets.bundle import FILE_LIMITS
        from fullstride.nets.weights.repositories import check_destination

        if self.push:
            check_destination(self.push, self.public, FILE_LIMITS)
        elif self.public:
            raise ValueError("--public is for --push USER/NAME: add it, or leave --public out")
        elif out is None:
            raise ValueError("nothing to write: give --out FILE, --push USER/NAME, or both")
        if out is None:
            of_files = {
                name: getattr(settings, name) != default
                for name, default in vars(SHIP).items()
                if name not in CHOOSING
            }
            refuse_flags(of_files, "without --out, the file to write: add it")

    def commit(self, bundle: "Bundle", exported: Path | None) -> None:
        from fullstride.deploy.choose_form import measure_bundle, measure_files
        from fullstride.deploy.formats import open_file
        from fullstride.report.model_card import push_to_hub

        times = [measure_bundle(bundle)]
        if exported:
            model = open_file(exported, trust=True)
            times += measure_files({exported.name: model}, times[0].protocol)
        address = push_to_hub(bundle, self.push, public=self.public, exported=exported, times=times)
        print(f"hf:{self.push}: {address}")


Push = Annotated[PushFlags, arg(name="")]  # the flags have the names of its fields
NO_PUSH = PushFlags()


def export(
    runs: Runs,
    out: Path | None = None,
    settings: Ship = SHIP,
    loading: Loading = BY_DEFAULT,
    push: Push = NO_PUSH,
) -> None:
    """Write a trained network as a file for another runtime, after comparing it with PyTorch.

    Example: fullstride export runs/digits --out digits.onnx

    With --push the network goes to the Hugging Face hub, with the file or alone.

    Args:
        runs: A run, a bundle or a name with released weights. Of several, the one with the best
            test score, of equal scores the fastest.
        out: The file or folder to write.
    """
    from fullstride.deploy.export_runs import choose_run, export_runs

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
        print_export(exported)
    if push.push:
        push.commit(bundle, exported and exported.path)


def print_export(exported: "ExportResult") -> None:
    from fullstride.report.console_tables import export_table

    console().print(export_table(exported))
    metadata = exported.metadata
    if metadata.float_layers:
        print(f"in float: {', '.join(metadata.float_layers)}")
    print(
        f"{exported.path}: {exported.format}, {metadata.precision}, {metadata.input_kind} in, "
        f"run by {exported.runtime}"
    )


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
        runs: Finished runs on the same data, and bundles and exported files, which are scored on
            its test images.
        out: The page, one file without links to others.
        bench: A file of `fullstride bench --out`, for times; its other networks are shown as
            untrained.
        picture: A PNG file for the plot of accuracy against latency.
        data: The images, where none of the models is a run; by default those of the first run.
        trust: Open files of the formats pt2 and aoti too, which are programs.
    """
    from fullstride.io.writing import PAGE, PLOT, atomic_write, check_output
    from fullstride.report import page
    from fullstride.report.gather import gather

    if not runs:
        raise ValueError("nothing to report: name one or more run folders")
    check_output(out, PAGE)
    check_output(picture, PLOT)
    content = gather(runs, bench, data=data, trust=trust)
    page.write(out, page.render(content))
    if picture:
        with atomic_write(picture, PLOT) as beside:
            beside.write_bytes(page.picture(content.entries))
    print(out.resolve())


def pseudo_label(
    teacher: Run,
    images: Images,
    out: Path,
    top: int = 10,
    min_confidence: float = 0.3,
    per_class: int = 0,
    how: HowModel = TEACHER,
    offline: Offline = OFFLINE,
) -> None:
    """Store a teacher's probabilities for images without labels, for --recipe.unlabelled.

    Example: fullstride data label runs/teacher photos --out labels

    The same command goes on after a stop, and several processes share the work by --rank and
    --ranks, or under torchrun.

    Args:
        teacher: A run, a bundle, an exported file, a file of weights, or a name with released
            weights.
        images: A folder with images at any depth, a list of them in a .txt, .csv or .tsv file, tar
            shards, IDX files or digits.
        out: The folder of the store, or a single .parquet file.
        top: Probabilities that are stored for each image, the largest; the rest of the mass is
            spread over the other classes.
        min_confidence: For the table that is printed: probability of the best class below which an
            image is left out, as by --recipe.unlabelled-min-confidence.
        per_class: For the same: images of each class, as by --recipe.unlabelled-per-class.
    """
    from fullstride.report.console_tables import pseudo_label_table
    from fullstride.train.distill import read_pseudo_labels, select

    if top < 1 or per_class < 0 or not 0 <= min_confidence <= 1:
        raise ValueError(
            f"--top {top} --per-class {per_class} --min-confidence {min_confidence:g}: use 1 or "
            "more, 0 or more, and a number from 0 to 1"
        )
    model = how.open(teacher)
    if not offline.write("pseudo_labels", model, images, out, top, how).missing:
        chosen = select(read_pseudo_labels(out), min_confidence, per_class)
        console().print(pseudo_label_table(chosen))
