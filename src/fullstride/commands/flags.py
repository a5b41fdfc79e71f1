"""Which arguments do several commands share, and which old names are still read?"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import Positional, arg

from fullstride.console import Bar, print_error, print_parts, report_ignored, report_skipped
from fullstride.nets.load_options import LoadOptions
from fullstride.train.recipes.reading import with_current_flags

if TYPE_CHECKING:
    from fullstride.data.dataset import DataSet
    from fullstride.deploy.offline.engine import Summary
    from fullstride.deploy.offline.outputs import Model as TrainedModel

Data = Annotated[Positional[str], arg(metavar="DATA")]
Model = Annotated[Positional[str], arg(metavar="MODEL")]
Models = Annotated[Positional[tuple[str, ...]], arg(metavar="MODEL ...")]
Run = Annotated[Positional[str], arg(metavar="RUN")]
Images = Annotated[Positional[tuple[str, ...]], arg(metavar="IMAGE ...")]
Runs = Annotated[Positional[tuple[str, ...]], arg(metavar="RUN ...")]
Device = Annotated[str, arg(help="cpu, cuda, cuda:1, or auto: cuda where there is one.")]
Profile = Annotated[
    str,
    arg(name="device", help="A profile such as v100-fp16, or a file that `calibrate` wrote."),
]
StepRecipe = Annotated[
    str,
    arg(
        name="recipe",
        metavar="NAME",
        help="Count the step of this recipe: its regularisation, precision, layout and efficiency. "
        "A name, or a run, a bundle or a JSON file; finetune and scratch are for 1,000 images.",
    ),
]
Efficiency = Annotated[
    Literal["plain", "fused", "plain_compiled", "fused_compiled"],
    arg(
        help="Modules of a training step, as in a recipe: PyTorch's or fused ones, eager or "
        "compiled with recomputation."
    ),
]
Layout = Literal["nchw", "nhwc"]
Loading = Annotated[LoadOptions, arg(name="")]  # the flags have the names of its fields


@dataclass(frozen=True, kw_only=True)
class SplitFlags:
    """How the splits of the images are taken, as for `train`."""

    # As for `train`: share of the training images that networks are compared on.
    minival: float | None = None
    # As for `train`: share of the images for the final score.
    test: float | None = None
    # As for `train`: what images have in common that must be in one split.
    group: str = ""
    # As for `train`: leave copies of an image in several splits.
    keep_duplicates: bool = False

    def open(self, data: str) -> "DataSet":
        """The images, with a note on what was ignored."""
        from fullstride.data.dataset import open_data

        images = open_data(data, **asdict(self))
        report_ignored(images.ignored, images.notes)
        return images


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
    part_images: int = 8192

    def write(
        self,
        write: "Callable[..., Summary]",
        model: "TrainedModel",
        images: Sequence[str],
        out: Path,
        top: int,
        batch: int,
        device: str,
        tta: Literal["none", "flip"] = "none",
    ) -> "Summary":
        """What `write`, of `deploy.offline.by_name`, did with the images, after printing it."""
        from fullstride.data.prediction_store import check_store
        from fullstride.deploy.offline.by_name import open_images, this_device, this_share
        from fullstride.deploy.offline.outputs import OfflineSettings
        from fullstride.measure.environment import choose_device
        from fullstride.report.console_lines import offline_lines

        check_store(out)
        rank, ranks = this_share(self.rank, self.ranks)
        place = this_device(choose_device(device))
        shared: dict[str, Any] = dict(workers=self.workers, rank=rank, ranks=ranks)
        shared |= dict(part_images=self.part_images)
        settings = OfflineSettings(batch=batch, device=place, tta=tta, **shared)
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

Splits = Annotated[SplitFlags, arg(name="")]  # the flags have the names of its fields
SPLITS = SplitFlags()

# Flags that had another name in version 0.1, and are still read: old name -> name.
RENAMED = {"--engines": "--runtimes", "--mark-every": "--checkpoint-every-steps"}


def with_current_names(words: Sequence[str]) -> list[str]:
    """The words of a command line with the current names of flags, and a warning for each old one.

    Old names of a recipe's fields are those of `recipe.RENAMED`.
    """
    current = []
    for word in words:
        flag, equals, value = word.partition("=")
        new = RENAMED.get(flag.replace("_", "-"))
        if new:
            print_error(f"{flag} is deprecated, use {new}")
        current.append(f"{new}{equals}{value}" if new else word)
    return with_current_flags(current)


def refuse_flags(values: Mapping[str, Any], reason: str) -> None:
    """Raises ValueError, with `reason`, for the flags that were given a value."""
    names = [f"--{name.replace('_', '-')}" for name, value in values.items() if value]
    if names:
        raise ValueError(f"{', '.join(names)} {reason}")
