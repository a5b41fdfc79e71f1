"""What is a trained network good for? Commands that predict, export and report."""

from dataclasses import asdict
from itertools import islice
from json import dumps
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from fullstride.commands.flags import Device
from fullstride.terminal import report_skipped


def predict(
    run: Positional[str],
    images: Positional[tuple[Path, ...]],
    top: int = 3,
    json: bool = False,
    device: Device = "auto",
) -> None:
    """Say what is in pictures.

    Args:
        run: A run, a bundle, a file of weights, or a name with released weights.
        images: Picture files.
        top: How many classes to name for each.
        json: One line of JSON for each picture.
        device: Where to compute.
    """
    from fullstride.deploy import predict as predicting
    from fullstride.measure.environment import choose_device
    from fullstride.nets import zoo

    if not images:
        raise ValueError("no pictures: name one or more files after the run")
    if top < 1:
        raise ValueError(f"--top {top}: use 1 or more")
    skipped = {}
    for answer in predicting.predict(zoo.load(run), images, top=top, device=choose_device(device)):
        if answer.unreadable:
            skipped[answer.path] = answer.unreadable
        if json:
            print(dumps(asdict(answer)))
        elif answer.guesses:
            print(f"{answer.path}: " + ", ".join(f"{g.label} {100 * g.probability:.1f} %" for g in answer.guesses))
    report_skipped(skipped)
    if len(skipped) == len(images):
        raise ValueError("none of the pictures could be read")


def export(
    runs: Positional[tuple[str, ...]],
    out: Path,
    format: Literal["onnx"] = "onnx",
    budget_ms: float | None = None,
    data: str = "",
) -> None:
    """Write a trained network as a file for other engines, after comparing its answers with PyTorch's.

    Args:
        runs: A run, a bundle or a name with released weights. Of several, the most accurate one is taken.
        out: The file to write.
        format: onnx: float32 images (N, C, H, W) in, logits out, any batch.
        budget_ms: Take only a network that answers one image within this median time, measured here.
        data: Images to compare on; the run's own where not given.
    """
    from fullstride.deploy.choose import most_accurate
    from fullstride.deploy.export import export_onnx
    from fullstride.nets import zoo
    from fullstride.train.run import fitting_data

    if not runs:
        raise ValueError("nothing to export: name a run, a bundle or a network with released weights")
    best, bundle, ms = most_accurate({run: zoo.load(run) for run in runs}, budget_ms)
    if ms is not None:
        print(f"{best}: {ms:.3f} ms an image here, the most accurate of {len(runs)} within {budget_ms:g} ms")
    images = fitting_data(best, bundle.classes, data).minival
    pictures = [picture for _, picture in islice(images.readable(), 64)]
    if not pictures:
        raise ValueError("none of the images to compare on could be read: give others by --data")
    check = export_onnx(bundle, out, pictures)
    print(
        f"{out}: logits within {check.relative_difference:.1e} of PyTorch's, same class on "
        f"{check.same_top1} of {check.images} images"
    )


def report(
    runs: Positional[tuple[Path, ...]],
    out: Path = Path("report.html"),
    bench: Path | None = None,
    picture: Path | None = None,
) -> None:
    """Write one self-contained HTML page about runs: accuracy against latency, learning curves, predicted images.

    Args:
        runs: Finished runs on the same data.
        out: The page.
        bench: What `fullstride bench --out` wrote, for times; its other networks stand beside as untrained.
        picture: The plot of accuracy against latency alone, as a PNG file.
    """
    from fullstride.nets.disk import replacing
    from fullstride.report import page
    from fullstride.report.gather import gather

    if not runs:
        raise ValueError("nothing to report: name one or more run folders")
    found = gather(runs, bench)
    page.write(out, page.render(**found))
    if picture:
        with replacing(picture) as beside:
            beside.write_bytes(page.picture(found["entries"]))
    print(out.resolve())
