"""What do the papers' figures look like, with our own times? A command that draws them."""

from collections import Counter
from pathlib import Path
from typing import Literal

Key = Literal["tresnet-4", "tresnet-5", "resnet-rs-4", "genet-2", "genet-3", "genet-5"]


def figures(
    device: tuple[str, ...] = ("v100-fp16", "rtx3090"),
    bench: tuple[Path, ...] = (),
    only: tuple[Key, ...] = (),
    out: Path = Path("figures"),
) -> None:
    """Draw the papers' figures: published numbers, what was measured, and estimates of the rest, each marked as such.

    Args:
        device: Profiles, or their files: a figure takes the first that knows its times. Few know training steps.
        bench: Files of `bench --out`, results.json of `bench --suite papers`, blocks.json of `bench-blocks --out`.
        only: Some of them; all where not given.
        out: A folder for a PNG of each, and for figures.html with all.
    """
    from fullstride.latency import load_profile
    from fullstride.papers import figure_page, figures
    from fullstride.papers.measured import read_bench
    from fullstride.report.page import write
    from fullstride.storage import atomic_write

    profiles = [load_profile(name) for name in device]
    measured = read_bench(bench, figures.networks())
    if out.exists() and not out.is_dir():
        raise ValueError(f"{out} is a file: give a folder with --out")
    drawn = []
    for key in only or figures.KEYS:
        if key == figures.BLOCKS:
            rows, how, place = figures.blocks(profiles, measured)
            drawn.append(figure_page.blocks(rows, how, place))
            told = f"{len(rows)} {how}"
        else:
            plan = figures.PLANS[key]
            dots = list(figures.dots(plan, profiles, measured))
            drawn.append(figure_page.scatter(plan, dots))
            told = ", ".join(
                f"{count} {how}" for how, count in Counter(dot.how for dot in dots).items()
            )
        path = out / f"{key}.png"
        with atomic_write(path) as beside:
            beside.write_bytes(figure_page.png(drawn[-1]))
        print(f"{path}: {told}", flush=True)
    path = out / "figures.html"
    write(path, figure_page.page(drawn))
    print(path)
