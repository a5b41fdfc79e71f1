"""Exports the most accurate of several runs, and finds the images to compare its file on."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fullstride import tasks
from fullstride.data.dataset import DataSet, Images
from fullstride.data.loader import Batches, View
from fullstride.deploy import export as exporting
from fullstride.deploy.choose_form import earlier_times, fastest, most_accurate
from fullstride.deploy.comparison import ComparisonImages, LazyImages, readable
from fullstride.deploy.export import ExportResult, Finetune, Progress, export
from fullstride.deploy.exported import one_input
from fullstride.deploy.int8 import INT8_FINETUNE, finetune_int8
from fullstride.deploy.predict import inputs, logits
from fullstride.deploy.settings import ShipSettings
from fullstride.io.records import refuse_flags
from fullstride.measure.budget import HERE
from fullstride.measure.environment import choose_device
from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import BY_DEFAULT, LoadOptions
from fullstride.tasks import find_task
from fullstride.train import loop
from fullstride.train.scoring import matching_data

MAX_COMPARISON_IMAGES, MAX_COMPARISON_CLIPS = 500, 100
MAX_CALIBRATION_IMAGES, MAX_CALIBRATION_CLIPS = 256, 64
MAX_OUTPUTS = 2**27  # output values of the comparison images in memory: 512 MiB


def comparison_images(run: str, bundle: Bundle, data: str = "") -> ComparisonImages:
    """`images_to_compare` of the data set `data`, by default the run's training data."""
    pre = bundle.preprocessing
    black = np.zeros((1, *one_input(pre, "normalised")), np.float32)
    most = max(1, MAX_OUTPUTS // logits(bundle, [black]).size)
    most = min(most, MAX_COMPARISON_CLIPS if pre.frames else MAX_COMPARISON_IMAGES)
    images = matching_data(run, bundle, data).over(pre.background)
    return images_to_compare(images, bundle, most)


def images_to_compare(
    data: DataSet, bundle: Bundle, most: int = MAX_COMPARISON_IMAGES
) -> ComparisonImages:
    """At most `most` images of the validation split, with their targets in the view of `bundle`.

    Without a validation split they are training images, which suffice to compare outputs. Videos
    become clips.
    """
    val = data.val or data.train
    images = evenly_spaced(val, most, view_of_clips(bundle))
    labels = [val.targets[index] for index in images.indices]
    if not find_task(bundle.task).single_label:
        samples = readable(bundle, val.subset(images.indices))
        targets = {images.indices[sample.number]: sample.target for sample in samples}
        images, labels = replace(images, indices=[*targets]), [*targets.values()]
    if not images:
        raise ValueError("none of the images to compare on could be read: give others by --data")
    return ComparisonImages(images, labels)


def calibration_images(run: str, bundle: Bundle, data: str = "") -> LazyImages:
    """`images_for_ranges` of the data set `data`, by default the run's training data."""
    pre = bundle.preprocessing
    most = MAX_CALIBRATION_CLIPS if pre.frames else MAX_CALIBRATION_IMAGES
    images = matching_data(run, bundle, data).over(pre.background)
    return images_for_ranges(images, most, view_of_clips(bundle))


def view_of_clips(bundle: Bundle) -> View | None:
    """The view of clips in evaluation; None for a network of images."""
    pre = bundle.preprocessing
    return find_task(bundle.task).test_view(pre) if pre.frames else None


def images_for_ranges(
    data: DataSet, most: int = MAX_CALIBRATION_IMAGES, view: View | None = None
) -> LazyImages:
    """At most `most` training images, for the ranges of int8."""
    images = evenly_spaced(data.train, most, view)
    if not images:
        raise ValueError(
            "none of the images for int8's ranges could be read: give others by --calibration"
        )
    return images


def evenly_spaced(images: Images, count: int, view: View | None = None) -> LazyImages:
    """At most `count` readable images, evenly spaced over a set that may be sorted by class."""
    count = min(count, len(images))
    spaced = LazyImages(images, [number * len(images) // count for number in range(count)], view)
    return replace(spaced, indices=[*spaced.readable()])


def int8_finetuning(
    run: str,
    bundle: Bundle,
    data: str = "",
    *,
    epochs: int,
    calibration: LazyImages,
    progress: Progress = lambda line: None,
    watch: Callable[[Batches], loop.BatchSource] = lambda batches: batches,
) -> Finetune | None:
    """A function that fine-tunes the network with simulated int8; None for 0 epochs.

    `progress` is called with one line when it begins; `watch` may wrap the batches.
    """
    if epochs < 0:
        raise ValueError(f"--finetune-epochs {epochs}: use 0 or more")
    if not epochs:
        return None
    data_set = matching_data(run, bundle, data)

    def finetune(net: nn.Module) -> nn.Module:
        progress(f"int8 loses too much: fine-tuning with simulated int8, epochs: {epochs}")
        batches = inputs("normalised", bundle.preprocessing, calibration)
        images = torch.cat([torch.from_numpy(x) for x in batches])
        recipe = replace(INT8_FINETUNE, epochs=epochs)
        task = find_task(bundle.task)
        return finetune_int8(
            net, bundle.preprocessing, data_set, images, task=task, recipe=recipe, watch=watch
        )

    return finetune


FORMAT_OF_SUFFIX = {"": "openvino", ".onnx": "onnx", ".pte": "executorch", ".tflite": "litert"}
FORMAT_OF_SUFFIX |= {".mlpackage": "coreml"}


def choose_run(
    runs: Sequence[str],
    settings: ShipSettings,
    *,
    loading: LoadOptions = BY_DEFAULT,
    progress: Progress = lambda line: None,
) -> tuple[str, Bundle]:
    """Choose the most accurate of `runs` within the budget, which for auto limits only the file.

    `progress` is called with lines about times. Raises ValueError, in one line.
    """
    if not runs:
        raise ValueError(
            "nothing to export: name a run, a bundle or a network with released weights"
        )
    budget = settings.budget
    bundles = {run: tasks.load(run, options=loading) for run in runs}
    batch = budget.batch if budget else 1
    ms = earlier_times(settings.bench, bundles, batch) if settings.bench else None
    limit = None if settings.format == "auto" else budget
    return most_accurate(bundles, limit, progress, ms)


def export_runs(
    runs: Sequence[str],
    out: Path,
    settings: ShipSettings,
    *,
    loading: LoadOptions = BY_DEFAULT,
    progress: Progress = lambda line: None,
    watch: Callable[[Batches], loop.BatchSource] = lambda batches: batches,
) -> tuple[Bundle, ExportResult]:
    """Export the run of `choose_run` by the settings.

    `progress` is called with progress lines; `watch` may wrap training batches. Raises ValueError,
    in one line, if the export is not possible.
    """
    budget, precision = settings.budget, settings.precision
    options = replace(settings.options, format=settings.format or format_by_suffix(out))
    auto = options.format == "auto"
    if settings.target != HERE and not (auto and len(runs) == 1):
        raise ValueError(
            f"--target {settings.target} measures the files of one run: name one run, and say "
            "--format auto"
        )
    if auto:
        has_backend = options.backend != "onnx"
        refuse_flags({"backend": has_backend}, "is for --format triton-server: leave it out")
    else:  # before slow work
        exporting.check_free(
            out, exporting.find_format(options.format, precision or "fp32"), options.force
        )
    int8 = precision == "int8" or (auto and precision is None)
    for flag in ("calibration", "finetune_epochs"):
        if (value := getattr(settings, flag)) and not int8:
            name = flag.replace("_", "-")
            raise ValueError(f"--{name} {value} is for --precision int8: leave it out")
    run, bundle = choose_run(runs, settings, loading=loading, progress=progress)
    if options.device != "cpu":
        options = replace(options, device=str(choose_device(options.device)))
    images = comparison_images(run, bundle, settings.data)
    calibration, finetune = (), None
    if int8:
        data = settings.calibration or settings.data
        calibration, epochs = calibration_images(run, bundle, data), settings.finetune_epochs
        finetune = int8_finetuning(
            run,
            bundle,
            data,
            epochs=epochs,
            calibration=calibration,
            progress=progress,
            watch=watch,
        )
    write = partial(fastest, budget=budget) if auto else export
    return bundle, write(
        bundle, out, images, options, calibration=calibration, finetune=finetune, progress=progress
    )


def format_by_suffix(out: Path) -> str:
    """The format for this suffix; openvino, the fastest on CPUs, for a folder."""
    if out.suffix not in FORMAT_OF_SUFFIX:
        raise ValueError(f"--out {out} does not say which format: say it by --format")
    return FORMAT_OF_SUFFIX[out.suffix]
