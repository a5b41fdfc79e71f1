"""Gathers the content of a report from files of models and of a benchmark."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from fullstride.data.dataset import DataSet, Images
from fullstride.data.readers.decode import OversizedImage
from fullstride.data.transforms.crop import test_view
from fullstride.deploy.comparison import batches, evaluate, readable, score_model
from fullstride.deploy.exported import ExportedModel, Model
from fullstride.deploy.predict import inputs, open_model
from fullstride.io.console import count_of, printable
from fullstride.measure import protocols
from fullstride.measure.environment import Environment
from fullstride.measure.tracer import cost
from fullstride.nets import zoo
from fullstride.nets.bundle import Bundle
from fullstride.nets.efficiency import short_precision
from fullstride.nets.preprocessing import Preprocessing
from fullstride.report.console_tables import busy_note
from fullstride.report.page import Content, Entry, Prediction, data_title, most_accurate
from fullstride.tasks import common_metric, find_task
from fullstride.tasks.task import Metric, Score
from fullstride.train.run_folder import BUNDLE, RUN_CONFIG, final_scores, read_config, read_log
from fullstride.train.scoring import matching_data

SHOWN = 24  # pictures with their predicted class

Times = Mapping[str, protocols.Measurement]  # by protocol


def gather(
    words: Sequence[str], bench: Path | None = None, *, data: str = "", trust: bool = False
) -> Content:
    """Gather the content of a page on runs, bundles and exported files.

    `bench` is a file of `fullstride bench --out`; its other networks become entries without
    accuracy. The images are `data`, or by default the first run's. Runs have their own scores,
    other models are scored on the same test images. `trust` opens files that are programs. Raises
    ValueError for an unfinished run, and for models of other images.
    """
    models = {str(Path(word)): opened(word, trust) for word in words}
    images = common_images(models, data)
    metric = common_metric(models.values())
    rows = protocols.read_measurements(bench) if bench else []
    times = protocols.by_network(rows)
    entries = {
        word: entry(word, model, times.get(protocols.location(word), {}), metric, images)
        for word, model in models.items()
    }
    own = {*map(protocols.location, models)}
    left_out = [name for name in times if name not in own and zoo.has_own_spec(name)]
    best = most_accurate([*entries.values()])
    model = next(model for word, model in models.items() if entries[word] is best)
    others = [name for name in times if name not in {*own, *left_out}]
    entries |= {name: untrained(name, times[name], metric) for name in others}
    predictions, score, by_class, baseline = [], None, (), ""
    if find_task(model.task).single_label:
        predictions, score = examples(model, images)
    else:
        evaluation = evaluate(model, getattr(images, images.score_split))
        rows_of_classes = evaluation.score.by_class(model.classes)
        by_class = [replace(row, name=printable(row.name)) for row in rows_of_classes]
        baseline = find_task(model.task).baseline_note(evaluation.scores)
    shown = best.name if predictions else ""
    return Content(
        title=printable(f"fullstride on {data_title(images)}"),
        entries=[*entries.values()],
        predictions=predictions,
        confusion=score.confusion() if score else None,
        calibration=score.calibration() if score else None,
        by_class=by_class,
        classes=tuple(map(printable, images.classes)),
        environment=asdict(rows[0].environment if rows else Environment.here()),
        notes=[*map(printable, notes(images, rows, left_out, shown, baseline))],
    )


def is_run(word: str) -> bool:
    return (Path(word) / RUN_CONFIG).exists()


def opened(word: str, trust: bool) -> Model:
    if is_run(word) and not (Path(word) / BUNDLE).is_dir():
        raise ValueError(f"{word} is not a finished run: train it to its end first")
    return open_model(word, trust=trust)


def common_images(models: Mapping[str, Model], where: str) -> DataSet:
    """Open the data set `where`, by default the first run's, which all runs must share."""
    runs = {word: model for word, model in models.items() if is_run(word)}
    if not runs and not where:
        raise ValueError(
            f"{', '.join(models)} are no runs and do not name their images: name a run too, or "
            "images by --data"
        )
    word, model = next(iter((runs or models).items()))
    data = matching_data(word, cast(Bundle, model), where)  # both have a task and classes
    for other in runs:
        config = read_config(Path(other), "give other runs")
        if config.fingerprint != data.fingerprint:
            raise ValueError(
                f"{other} was trained on {config.data}, {word} on {data.name}: report them apart"
            )
    if not len(getattr(data, data.score_split)):
        raise ValueError(
            f"{word} was trained on all images of {data.name} and has no score: give images that "
            "it was not trained on by --data"
        )
    for other, model in models.items():
        if tuple(model.classes) != tuple(data.classes):
            raise ValueError(f"{other} has other classes than {data.name}: report them apart")
    return data


def entry(word: str, model: Model, times: Times, metric: Metric, images: DataSet) -> Entry:
    pre = model.preprocessing
    for measurement in times.values():
        if measurement.protocol.resolution != pre.resolution:
            raise ValueError(
                f"{word} is for {pre.resolution} pixels a side and was timed at "
                f"{measurement.protocol.resolution}: measure it without --resolution"
            )
    split = images.score_split
    if isinstance(model, Bundle) and is_run(word) and split in model.scores:
        scores = final_scores(Path(word), split, metric)
    else:
        scores = scored(word, model, getattr(images, split))
    about = model.metadata if isinstance(model, ExportedModel) else model
    network = Entry(
        name=printable(model.name if isinstance(model, Bundle) else Path(word).name),
        data=printable(about.source.removeprefix("trained on ").partition(", beginning")[0]),
        metric=metric,
        resolution=pre.resolution,
        scores=scores,
        split=split,
        log=read_log(Path(word), metric) if is_run(word) else (),
    )
    if isinstance(model, Bundle):
        return with_times(with_cost(network, model.net, pre.channels), times)
    note = printable(f"{model.metadata.name} in {model.metadata.precision}, {model.runtime}")
    return with_times(replace(network, note=note), times)


def scored(word: str, model: Model, images: Images) -> dict[str, Any]:
    """Score a model on `images`; return scores like a run's."""
    try:
        return score_model(model, images).evaluation.scores
    except ValueError as error:
        raise ValueError(f"{word}: {error}") from None


def page_picture(images: Images, index: int, pre: Preprocessing) -> np.ndarray:
    """An image for a page; for an image too large to decode whole, the network's view."""
    try:
        return np.asarray(images.over(pre.background).picture(index))
    except OversizedImage:
        return test_view(images.source(index), pre).squeeze()


def untrained(name: str, times: Times, metric: Metric) -> Entry:
    """A network that was only measured, on the same input as the runs."""
    net = zoo.create(name)
    resolution = next(iter(times.values())).protocol.resolution
    network = Entry(name=name, data="", metric=metric, resolution=resolution)
    return with_times(with_cost(network, net, net.spec.in_channels), times)


def with_cost(network: Entry, net: nn.Module, channels: int) -> Entry:
    total = cost(net, network.resolution, channels)
    return replace(network, params=total.params, macs=total.macs)


def with_times(network: Entry, times: Times) -> Entry:
    if online := times.get("online"):
        network = replace(network, ms_p50=online.ms_p50, ms_p99=online.ms_p99)
    if rate := times.get("throughput"):
        network = replace(network, images_per_s=rate.images_per_s, batch=rate.protocol.batch)
    return network


def examples(model: Model, data: DataSet) -> tuple[list[Prediction], Score]:
    """Predict the scored images; return some with predictions, and the score of all.

    Wrong predictions come first, with Grad-CAM for the network of a bundle, then correct ones from
    the whole set.
    """
    images = getattr(data, data.score_split)
    parts = [*batches(model, readable(model, images))]
    samples = [sample for part, _ in parts for sample in part]
    indices = [sample.number for sample in samples]
    probability_nk = np.concatenate([rows for _, rows in parts])
    task = find_task(model.task)
    labels, predicted = np.array(images.targets)[indices], probability_nk.argmax(1)
    score = task.score()
    score.update(torch.from_numpy(probability_nk).double().log(), torch.from_numpy(labels))
    wrong = np.flatnonzero(predicted != labels)[: SHOWN // 2]
    right = np.flatnonzero(predicted == labels)
    spread = np.linspace(0, len(right) - 1, min(SHOWN - len(wrong), len(right))).astype(int)
    heated = {}
    if isinstance(model, Bundle) and not model.preprocessing.frames:
        views = [np.asarray(samples[i].view) for i in wrong]
        heated = dict(zip(wrong, explained(model, views, predicted[wrong]), strict=True))
    shown = [
        Prediction(
            picture=page_picture(images, indices[i], model.preprocessing),
            truth=printable(data.classes[labels[i]]),
            predicted=printable(model.classes[predicted[i]]),
            probability=float(probability_nk[i, predicted[i]]),
            explained=heated.get(i),
        )
        for i in (*wrong, *right[spread])
    ]
    return shown, score


def notes(
    data: DataSet,
    rows: Sequence[protocols.Measurement],
    left_out: Sequence[str],
    shown: str = "",
    baseline: str = "",
) -> list[str]:
    """Sentences below the page; `shown` is the network with predicted images on it."""
    sizes = (
        f"{len(data.train)} training, {len(data.val)} validation and "
        f"{count_of(len(data.test), 'test image')}"
    )
    use = "Test images were used once, after training."
    if data.score_split != "test":
        use = "Scores are on the images that epochs are chosen by, as there is no test."
    lines = [
        f"{data.name}: {sizes}. {use}",
        "Accuracies are of the weights in the bundles and files: after training, the average after "
        "the last epoch, or after the best one if the recipe stops early, unless a soup or a "
        "linear probe replaced it.",
    ]
    if shown:
        use = f"on {data.score_split} images, wrong ones first."
        lines.insert(1, f"Predicted images are predictions of {shown} {use}")
    if baseline:
        lines.insert(1, f"{baseline}.")
    if missing := data.missing_classes(data.score_split):
        classes = ", ".join(map(printable, missing))
        lines.insert(1, f"No {data.score_split} image is of the classes: {classes}.")
    if rows:
        own = (short_precision(row.precision) for row in rows if not row.runtime)
        precisions = " and ".join(dict.fromkeys(own))
        lines.append(
            "Times are medians of rounds in which all networks alternate on random input of their "
            "own resolution, one image at a time (online) and in batches (throughput), in "
            f"{precisions or 'the precision of each file'}."
        )
    lines += [
        busy_note(row) + "." for row in rows if protocols.spread_of_rounds(row) > protocols.BUSY
    ]
    if left_out:
        lines.append(f"Measured, but not on this page: {', '.join(left_out)}.")
    return lines


# ---- Grad-CAM: the parts of a picture that decided a network's class

HEAT = (213, 94, 0)  # vermilion of Okabe and Ito, also seen by the colour-blind
STRONGEST = 0.8  # share of the heat's colour where the map is 1


def grad_cam(net: nn.Module, x: Tensor, class_n: Sequence[int]) -> np.ndarray:
    """The parts of each image that speak for a class, (N, C, H, W) -> (N, h, w) in 0..1.

    Each channel of the network's last map is weighted by the mean gradient of the class's logit,
    and negative values of the sum become 0. An image without positive values has zeros.

    Source: Grad-CAM, arXiv:1610.02391.
    """
    maps: list[Tensor] = []

    def keep_map(module: nn.Module, arguments: object, output: object) -> None:
        if isinstance(output, Tensor) and output.dim() == 4 and output.shape[-1] > 1:
            maps[:] = [output]

    with ExitStack() as hooks, torch.enable_grad():
        for module in net.modules():
            hooks.enter_context(module.register_forward_hook(keep_map))
        logits_nk = net.eval()(x.clone().requires_grad_())
    chosen = logits_nk[torch.arange(len(x)), torch.as_tensor(class_n)].sum()
    (gradient,) = torch.autograd.grad(chosen, maps)
    cam = (maps[0] * gradient.mean((2, 3), keepdim=True)).sum(1).relu().detach()
    return (cam / cam.amax((1, 2), keepdim=True).clamp_min(1e-12)).float().numpy()


def heated(view: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """Colour a grey picture, uint8 (H, W, C), where the map (h, w) is high: uint8 (H, W, 3)."""
    h, w, _ = view.shape
    share = np.asarray(Image.fromarray(heat).resize((w, h), Image.Resampling.BILINEAR))
    share = STRONGEST * share.clip(0, 1)[:, :, None]
    grey = view.mean(2, keepdims=True)
    return (grey + share * (np.array(HEAT) - grey)).round().astype(np.uint8)


def explained(
    bundle: Bundle, views: Sequence[np.ndarray], class_n: Sequence[int]
) -> list[np.ndarray]:
    """Draw `grad_cam` of a class over each of `views`, uint8 (H, W, C) inputs of a bundle."""
    pictures = []
    for x in inputs("normalised", bundle.preprocessing, views):
        start = len(pictures)
        part = slice(start, start + len(x))
        heat = grad_cam(bundle.net, torch.from_numpy(x), class_n[part])
        pictures += map(heated, views[part], heat)
    return pictures
