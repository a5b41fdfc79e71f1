"""What can be done with a trained network? Commands that predict, export and report."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from fullstride.commands.flags import Device, Images, Loading, Run, Runs, refuse_flags
from fullstride.io.console import (
    Bar,
    console,
    print_parts,
    printable,
    report_ignored,
    report_skipped,
)
from fullstride.nets.preprocessing import BY_DEFAULT

if TYPE_CHECKING:
    from fullstride.deploy.exported import ExportedModel
    from fullstride.deploy.offline import Model, Summary
    from fullstride.nets.bundle import Bundle


# How does a command predict for videos? By flags for several views and for a sliding window.


EVERY_S = 1.0


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

    def check(self, **elsewhere: Path | None) -> None:
        """Raises ValueError for flags that do not fit together; `elsewhere` go to files."""
        if self.every_s is not None and not self.stream:
            raise ValueError(f"--every-s {self.every_s:g} is for --stream: add it")
        if self.stream:
            others = {"views": self.views, **elsewhere}
            refuse_flags(others, "do not go with --stream, a line for each clip: leave them out")

    def print_windows(
        self,
        model: "Bundle | ExportedModel",
        videos: Sequence[str],
        how: dict[str, Any],
        json: bool,
    ) -> None:
        """Print a line for each window of each video, at once, for programs that read them."""
        from fullstride.data.readers.decode import UnreadableImage
        from fullstride.data.readers.folder import VIDEOS
        from fullstride.deploy.predict import Prediction, find_images
        from fullstride.deploy.streaming import stream

        paths, ignored = find_images(videos, kind=VIDEOS)
        report_ignored(ignored)
        every_s = EVERY_S if self.every_s is None else self.every_s
        skipped: dict[str, str] = {}
        lines = 0
        for path in paths:
            try:
                for row in stream(model, path, every_s=every_s, **how):
                    print(dumps(row.to_json()) if json else printable(row), flush=True)
                    lines += 1
            except UnreadableImage as error:
                skipped[str(path)] = error.reason
                if json:
                    row = Prediction(str(path), unreadable=error.reason)
                    print(dumps(row.to_json()), flush=True)
        report_skipped(skipped)
        if not lines:
            raise ValueError("none of the videos could be read")


Videos = Annotated[VideoFlags, arg(name="")]  # the flags have the names of its fields
ONE_CLIP = VideoFlags()


# How does a command predict for any number of images? By flags that two commands have.


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
    # With --out: images of a part of the output, which is the unit of what is lost by a stop;
    # by default 8,192.
    part_images: int | None = None

    def write(
        self,
        write: "Callable[..., Summary]",
        model: "Model",
        images: Sequence[str],
        out: Path,
        top: int,
        batch: int,
        device: str,
        tta: Literal["none", "flip"] = "none",
    ) -> "Summary":
        """What `write`, of `deploy.offline.by_name`, did with the images, after printing it."""
        from fullstride.data.prediction_store import check_store
        from fullstride.deploy.offline import (
            OfflineSettings,
            check_takes_images,
            open_images,
            this_device,
            this_share,
        )
        from fullstride.measure.environment import choose_device
        from fullstride.report.console_lines import offline_lines

        check_takes_images(model, out)
        check_store(out)
        rank, ranks = this_share(self.rank, self.ranks)
        place = this_device(choose_device(device))
        parts: dict[str, Any] = {}
        if self.part_images is not None:
            parts["part_images"] = self.part_images
        how: dict[str, Any] = dict(batch=batch, device=place, tta=tta, workers=self.workers)
        settings = OfflineSettings(**how, rank=rank, ranks=ranks, **parts)
        data = open_images(images)
        report_ignored(data.ignored)
        with Bar() as bar:
            summary = write(model, data, out, top, settings, bar.watch)
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
    top: int = 3,
    json: bool = False,
    batch: int = 32,
    device: Device = "auto",
    trust: bool = False,
    tta: Literal["none", "flip"] = "none",
    out: Path | None = None,
    nearest: Path | None = None,
    draw: Path | None = None,
    maps: Path | None = None,
    videos: Videos = ONE_CLIP,
    offline: Offline = OFFLINE,
    loading: Loading = BY_DEFAULT,
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
        top: How many classes to print for each.
        json: Print one line of JSON for each image.
        batch: Images at a time.
        device: Where a run or a bundle computes; an exported file has its own device.
        trust: Open files of the formats pt2 and aoti too, which are programs.
        tta: With flip, the mean of the probabilities of an image and of its mirror image.
        out: A folder for parquet files with a row for each image, or a single .parquet file.
        nearest: What --out wrote for other images, by the same model of the task retrieval: print
            the --top images of it that are nearest to each image.
        draw: A folder for the images with the predictions drawn, as PNG files.
        maps: A folder for the predictions of each pixel as PNG files without losses: classes as
            the indices of a palette, or depths in millimetres as 16 bits.
    """
    from fullstride.deploy.offline import write_predictions
    from fullstride.deploy.predict import open_model
    from fullstride.measure.environment import choose_device

    for flag, value in (("top", top), ("batch", batch)):
        if value < 1:
            raise ValueError(f"--{flag} {value}: use 1 or more")
    if out and nearest:
        raise ValueError("--nearest prints images, and --out writes embeddings: give one of them")
    if out and (draw or maps):
        raise ValueError("--out writes rows, and --draw and --maps pictures: give one of them")
    videos.check(out=out, nearest=nearest, draw=draw, maps=maps)
    model = open_model(run, trust=trust, options=loading)
    if out:
        offline.write(write_predictions, model, images, out, top, batch, device, tta)
        return
    how: dict[str, Any] = dict(top=top, device=choose_device(device), tta=tta)
    if videos.stream:
        videos.print_windows(model, images, how, json)
        return
    how |= dict(batch=batch, views=videos.views, clip_starts=videos.clip_starts)
    print_predictions(model, images, how, json, nearest, draw, maps)


def print_predictions(
    model: Any,
    images: tuple[str, ...],
    how: dict[str, Any],
    json: bool,
    nearest: Path | None,
    draw: Path | None,
    maps: Path | None,
) -> None:
    from fullstride.data.readers.folder import IMAGES, VIDEOS
    from fullstride.deploy.nearest import nearest_images
    from fullstride.deploy.predict import drawings, find_images, map_files, predict

    folders = [drawings(model, draw)] if draw else []
    folders += [map_files(model, maps)] if maps else []
    kind = VIDEOS if model.preprocessing.frames else IMAGES
    paths, ignored = find_images(images, kind=kind)
    report_ignored(ignored)
    skipped: dict[str, str] = {}
    rows = predict(model, paths, **how)
    for row in nearest_images(rows, nearest, model, how["top"]) if nearest else rows:
        if row.unreadable:
            skipped[row.path] = row.unreadable
        else:
            for folder in folders:
                folder.write(row)
        if json:
            print(dumps(row.to_json()))
        elif not row.unreadable:
            print(printable(f"{row.path}: {', '.join(map(str, row.guesses)) or 'nothing'}"))
    report_skipped(skipped)
    if len(skipped) == len(paths):
        raise ValueError(f"none of the {kind.name} could be read")


def export(
    runs: Runs,
    out: Path,
    format: str = "",
    precision: Literal["fp32", "bf16", "fp16", "int8"] | None = None,
    with_preprocessing: bool = False,
    with_resize: bool = False,
    any_size: bool = False,
    backend: Literal["onnx", "openvino", "tensorrt"] = "onnx",
    budget_ms: float | None = None,
    images_per_s: float | None = None,
    batch: int = 1,
    times: Path | None = None,
    data: str = "",
    calibration: str = "",
    max_drop: float | None = None,
    finetune_epochs: int = 0,
    device: str = "cpu",
    force: bool = False,
    loading: Loading = BY_DEFAULT,
) -> None:
    """Write a trained network as a file for another runtime, after comparing it with PyTorch.

    Example: fullstride export runs/digits --out digits.onnx

    Args:
        runs: A run, a bundle or a name with released weights. Of several, the one with the best
            test score, of equal scores the fastest.
        out: The file or folder to write.
        format: onnx, openvino, aoti, pt2, tensorrt, triton-server (see docs/shipping.md), or auto:
            the fastest format and precision of openvino, onnx, aoti and tensorrt, of those that
            run here. By default onnx for an --out that ends in .onnx, and openvino, the fastest on
            CPUs, for a folder.
        precision: fp32, bf16, fp16 or int8; by default fp32, and any of them for auto.
        with_preprocessing: The file takes uint8 pixels (N, H, W, C) of the network's resolution
            and returns probabilities; else normalised float32 (N, C, H, W) and logits.
        with_resize: The file also resizes images of any size.
        any_size: The sides of images may be any multiples of 32.
        backend: The runtime inside triton-server.
        budget_ms: Only accept what takes at most this time, measured here: the median time of a
            call divided by its images.
        images_per_s: The budget as a rate instead.
        batch: Images of a call of the budget.
        times: A file of `fullstride bench --out` with the times of the runs; by default they are
            measured.
        data: Images to compare on; by default the run's own validation split.
        calibration: Images for the ranges of int8; by default the run's own training images.
        max_drop: Points of top-1 that the file may lose; by default 0 in fp32, 0.2 in bf16 and
            fp16, 0.5 in int8.
        finetune_epochs: Where int8 loses more, fine-tune with simulated int8 for so many epochs
            before layers fall back to float.
        device: Where files of the formats aoti and pt2 compute: cpu or cuda.
        force: Replace an existing --out.
    """
    from fullstride.deploy.export_runs import export_runs
    from fullstride.measure.budget import find_budget
    from fullstride.report.console_tables import export_table

    kind = "pictures" if with_resize else "pixels" if with_preprocessing else "normalised"
    settings: dict[str, Any] = dict(format=format, precision=precision, input_kind=kind)
    settings |= dict(any_size=any_size, backend=backend, device=device)
    settings |= dict(budget=find_budget(budget_ms, images_per_s, batch), loading=loading)
    settings |= dict(data=data, calibration=calibration, max_drop=max_drop, force=force)
    settings["times"] = times
    with Bar() as bar:
        settings |= dict(finetune_epochs=finetune_epochs, progress=bar.print, watch=bar.watch)
        exported = export_runs(runs, out, **settings)
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
    page.write(out, page.render(**content))
    if picture:
        with atomic_write(picture, PLOT) as beside:
            beside.write_bytes(page.picture(content["entries"]))
    print(out.resolve())


# How do images get labels without people? The command that lets a teacher label them.


def pseudo_label(
    teacher: Run,
    images: Images,
    out: Path,
    top: int = 10,
    min_confidence: float = 0.3,
    per_class: int = 0,
    batch: int = 128,
    device: Device = "auto",
    trust: bool = False,
    offline: Offline = OFFLINE,
    loading: Loading = BY_DEFAULT,
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
        batch: Images at a time.
        device: Where a run or a bundle computes; an exported file has its own device.
        trust: Open files of the formats pt2 and aoti too, which are programs.
    """
    from fullstride.deploy.offline import write_pseudo_labels
    from fullstride.deploy.predict import open_model
    from fullstride.report.console_tables import pseudo_label_table
    from fullstride.train.distill import read_pseudo_labels, select

    if top < 1 or per_class < 0 or not 0 <= min_confidence <= 1:
        raise ValueError(
            f"--top {top} --per-class {per_class} --min-confidence {min_confidence:g}: use 1 or "
            "more, 0 or more, and a number from 0 to 1"
        )
    model = open_model(teacher, trust=trust, options=loading)
    if not offline.write(write_pseudo_labels, model, images, out, top, batch, device).missing:
        chosen = select(read_pseudo_labels(out), min_confidence, per_class)
        console().print(pseudo_label_table(chosen))
