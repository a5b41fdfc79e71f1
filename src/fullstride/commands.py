"""What can a user ask for? One thin command per verb, which imports what it needs, so that `--help` is quick."""

from dataclasses import asdict, replace
from functools import partial
from itertools import islice
from json import dumps, loads
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import Positional, arg

from fullstride.terminal import Bar, console, report_skipped
from fullstride.train.recipes import Recipe

Device = Annotated[str, arg(help="cpu, cuda, cuda:1, or auto: cuda where there is one.")]


def zoo() -> None:
    """List the networks: parameters, multiply-adds, published accuracy, and where weights are."""
    from fullstride.measure.cost import cost
    from fullstride.measure.tables import published
    from fullstride.nets.families import SPECS
    from fullstride.nets.network import Network
    from fullstride.nets.zoo import HUB

    line = "{:18} {:>9} {:>8} {:>6}  {:28} {}".format
    scored = published()
    print(line("network", "params M", "MACs G", "pixels", "published top-1 % (pixels)", "weights"))
    for name, spec in SPECS.items():
        price = cost(partial(Network, spec), spec.resolution)
        scores = ", ".join(f"{p.top1:g} ({p.resolution})" for p in scored if p.name == name)
        weights = f"hub: timm/{HUB[name]}" if name in HUB else ""
        size = f"{price.params / 1e6:.2f}", f"{price.macs / 1e9:.3f}", spec.resolution
        print(line(name, *size, scores, weights), flush=True)
    print("Any network of timm goes by timm/NAME wherever these go.")


def cost(model: Positional[str], resolution: int | None = None, layers: bool = False) -> None:
    """Print parameters, multiply-adds (MACs; FLOPs are twice this) and activations of a network.

    Args:
        model: A name that `fullstride zoo` lists, or timm/NAME.
        resolution: Pixels a side; the network's own where not given.
        layers: One line for each convolution and linear layer.
    """
    from fullstride.measure import cost as measuring
    from fullstride.nets import zoo

    spec = zoo.spec(model)
    side = spec.resolution if resolution is None else resolution

    def build():
        return zoo.create(model)

    if layers:
        for row in measuring.layer_costs(build, side):
            print(f"{row.name:48} {row.shape_in!s:>18} -> {row.shape_out!s:18} {row.params:>12,} {row.macs:>16,}")
    price = measuring.cost(build, side)
    print(f"{model} at {side} x {side} pixels, from {spec.source}")
    print(f"{price.params:,} parameters, {price.macs:,} MACs, {price.activations:,} activations")


def train(
    data: Positional[str],
    model: str,
    out: Path,
    recipe: Recipe,
    weights: str = "",
    device: Device = "auto",
    workers: int = 0,
    mark_every: int = 0,
) -> None:
    """Train a network on images and leave a run folder: log, checkpoint, and at the end a bundle with scores.

    Stopped at any time, the same command goes on from the last checkpoint. On several GPUs:
    `torchrun --nproc-per-node N -m fullstride train ...`, no other flag. `--recipe NAME` chooses a
    named recipe (digits for the digits, else finetune), `--recipe.FIELD` changes a field of it.

    Args:
        data: A folder with one subfolder of images per class, a .csv table, .tar shards, or digits.
        model: A name that `fullstride zoo` lists, or timm/NAME.
        out: The run folder.
        recipe: How to train.
        weights: Where to begin: a run, a bundle, a file of released weights, or hub. Fresh weights if not given.
        device: Where to train.
        workers: Processes that decode images beside this one; 0 decodes in this one.
        mark_every: Steps from one checkpoint to the next within an epoch; 0 writes one after each epoch only.
    """
    from fullstride.data.images import open_data
    from fullstride.measure.environment import choose_device
    from fullstride.nets.bundle import read_json
    from fullstride.train import run
    from fullstride.train.ranks import joined

    images = open_data(data)
    skipped: dict[str, str] = {}
    with joined(choose_device(device)) as (ranks, place), Bar(shown=ranks.first) as bar:
        rows = run.train(
            out,
            model,
            images,
            recipe,
            weights=weights,
            device=place,
            workers=workers,
            mark_every=mark_every,
            ranks=ranks,
            watch=bar.watch,
        )
        for row in rows:
            skipped |= row["skipped"]
            bar.say(
                f"epoch {row['epoch']:>3}/{recipe.epochs}  loss {row['loss']:.4f}  "
                f"minival top-1 {row['minival_top1']:.2f} %  {row['images_per_s']:,.0f} images/s"
            )
    if not ranks.first:
        return
    report_skipped(skipped)
    scores = read_json(out / run.BUNDLE / "bundle.json")["scores"]
    print(
        f"test top-1 {scores['test']['top1']:.2f} % on {scores['test']['images']} images; bundle in {out / run.BUNDLE}"
    )


def pack(
    data: Positional[str],
    out: Positional[Path],
    long_side: int | None = None,
    quality: int = 90,
    shard_mib: int = 256,
) -> None:
    """Write a data set as tar shards: a few large files in place of many small ones.

    The parts stay as they are. Pictures go in as the files that they are unless --long-side is given.

    Args:
        data: A folder with one subfolder of images per class, a .csv table, .tar shards, or digits.
        out: The new folder; train on it as on any other.
        long_side: Store upright JPEGs whose longer side has at most so many pixels; 400 suits training at 224.
        quality: Of these JPEGs, 1 to 100.
        shard_mib: How large a shard is.
    """
    from fullstride.data import pack as packing
    from fullstride.data.images import open_data

    done, told = None, 0
    for done in packing.pack(open_data(data), out, packing.Form(long_side, quality), shard_mib=shard_mib):
        if done.shards > told:
            print(f"{done.images:,} images in {done.shards:,} shards", flush=True)
            told = done.shards
    assert done
    report_skipped(done.skipped)
    print(f"{done.bytes_in / 2**20:,.1f} MiB of images became {done.bytes_out / 2**20:,.1f} MiB in {out}")


def validate(
    run: Positional[str], data: str = "", split: Literal["test", "minival", "train"] = "test", device: Device = "auto"
) -> None:
    """Score a trained network on images that it was not trained on.

    Args:
        run: A run, a bundle, a file of weights, or a name with released weights.
        data: A folder of images, a table, shards or digits; the run's own where not given.
        split: Which part of the images.
        device: Where to compute.
    """
    from fullstride.measure.environment import choose_device
    from fullstride.nets import zoo
    from fullstride.train.run import fitting_data, judge

    bundle = zoo.load(run)
    images = fitting_data(run, bundle.classes, data)
    place = choose_device(device)
    scores, skipped = judge(bundle.net.to(place), getattr(images, split), bundle.preprocessing, place)
    report_skipped(skipped)
    print(f"{split} top-1 {scores['top1']:.2f} %, loss {scores['loss']:.4f}, on {scores['images']} images")


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


def bench(
    models: Positional[tuple[str, ...]],
    resolution: int | None = None,
    batch: int = 64,
    rounds: int = 20,
    device: Device = "auto",
    out: Path | None = None,
) -> None:
    """Measure latency of one image (p50, p90, p99) and throughput of a batch, the networks in turn.

    Args:
        models: Names that `fullstride zoo` lists, timm/NAME, runs or bundles.
        resolution: Pixels a side, the same for all; the first network's own where not given.
        batch: Images at a time for throughput; latency is always of one image.
        rounds: How often each network has its turn.
        device: Where to measure.
        out: A JSON file for all samples and the environment.
    """
    from rich.table import Table

    from fullstride.measure import bench as benching
    from fullstride.measure.environment import choose_device
    from fullstride.nets.disk import replacing
    from fullstride.nets.zoo import measurable

    if not models:
        raise ValueError("nothing to measure: name one or more networks or runs")
    nets = measurable(models)
    first = next(iter(nets.values())).spec
    asked = dict(resolution=first.resolution if resolution is None else resolution, rounds=rounds)
    protocols = replace(benching.ONLINE, **asked), replace(benching.THROUGHPUT, **asked, batch=batch)
    found = [benching.bench(nets, each, choose_device(device), first.in_channels) for each in protocols]
    table = Table("network", "ms p50", "p90", "p99", f"images/s at {batch}", "spread", box=None, header_style="bold")
    for online, throughput in zip(*found, strict=True):
        times = (f"{ms:.3f}" for ms in (online.ms_p50, online.ms_p90, online.ms_p99))
        table.add_row(online.name, *times, f"{throughput.images_per_s:,.1f}", f"{throughput.spread:.2f}")
    console().print(table)
    here = found[0][0].environment
    side = asked["resolution"]
    print(f"{side} x {side} x {first.in_channels}, float32, {here.device}, {here.threads} threads, torch {here.torch}")
    if out:
        with replacing(out) as beside:
            beside.write_text(dumps([loads(m.to_json()) for part in found for m in part], indent=1))


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


COMMANDS = {
    "zoo": zoo,
    "cost": cost,
    "pack": pack,
    "train": train,
    "validate": validate,
    "predict": predict,
    "bench": bench,
    "export": export,
    "report": report,
}
