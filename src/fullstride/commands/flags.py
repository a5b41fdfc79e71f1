"""Defines flags that several commands share."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from tyro.conf import Positional, arg

from fullstride.io.console import report_ignored
from fullstride.io.records import refuse_flags
from fullstride.nets.preprocessing import BY_DEFAULT, WHITE, LoadOptions

if TYPE_CHECKING:
    from fullstride.data.dataset import DataSet
    from fullstride.deploy.exported import ExportedModel
    from fullstride.latency.profiles import Profile as LatencyProfile
    from fullstride.nets.bundle import Bundle
    from fullstride.targets.target import Target
    from fullstride.tasks.task import Task

Data = Annotated[Positional[str], arg(metavar="DATA")]
Model = Annotated[Positional[str], arg(metavar="MODEL")]
Models = Annotated[Positional[tuple[str, ...]], arg(metavar="MODEL ...")]
Run = Annotated[Positional[str], arg(metavar="RUN")]
Images = Annotated[Positional[tuple[str, ...]], arg(metavar="IMAGE ...")]
Runs = Annotated[Positional[tuple[str, ...]], arg(metavar="RUN ...")]
Device = Annotated[str, arg(help="cpu, cuda, cuda:1, or auto: cuda if available.")]
Layout = Literal["nchw", "nhwc"]


@dataclass(frozen=True, kw_only=True)
class OpenFlags:
    """How a model is opened, and where it computes."""

    # Where a run or a bundle computes: cpu, cuda, cuda:1, or auto: cuda if available; an exported
    # file has its own device.
    device: str = "auto"
    # Also open files of the formats pt2 and aoti, which are programs.
    trust: bool = False
    loading: Annotated[LoadOptions, arg(name="")] = BY_DEFAULT

    def open(self, word: str) -> "Bundle | ExportedModel":
        from fullstride.deploy.predict import open_model

        return open_model(word, trust=self.trust, options=self.loading)


@dataclass(frozen=True, kw_only=True)
class ProfileFlags:
    """The device that the network must run on, for which times are estimated."""

    # A profile such as v100-fp16, or a file written by `measure calibrate`. `choose` also takes
    # here or another machine and measures there: see docs/guides/targets.md.
    target: str = ""
    # Instead of a target: a JSON file of its data sheet, as docs/guides/latency.md describes.
    device_sheet: str = ""
    # A CSV file of times measured on the device, which correct the profile: columns model,
    # img_size, batch, and ms_per_image or images_per_s. Three networks are enough.
    measured: Path | None = None

    def find_target(self) -> "Target | None":
        """Connect to the machine to measure networks on; None for a profile."""
        from fullstride.measure.budget import HERE, is_elsewhere

        if self.target != HERE and not is_elsewhere(self.target):
            return None
        from fullstride.targets.target import connect

        own = {"device_sheet": self.device_sheet, "measured": self.measured}
        refuse_flags(own, f"with --target {self.target}: leave it out")
        return connect(self.target)

    def load(self) -> "LatencyProfile":
        from fullstride.latency.devices import correct, load_profile, profile_names

        if bool(self.target) == bool(self.device_sheet):
            raise ValueError(
                "name one device: --target with one of "
                f"{', '.join(profile_names())} or a file, or --device-sheet with a file"
            )
        profile = load_profile(self.target or self.device_sheet)
        return correct(profile, self.measured) if self.measured else profile


@dataclass(frozen=True, kw_only=True)
class JpegFlags:
    """Whether and how packed images become JPEGs."""

    # Store upright JPEGs with at most this many pixels on the longer side; 400 suits training at
    # 224.
    long_side: int | None = None
    # Quality of these JPEGs, 1 to 100.
    quality: int = 90
    # Colour behind transparent pixels in these JPEGs, such as black or #rrggbb.
    background: str = WHITE


@dataclass(frozen=True, kw_only=True)
class SplitFlags:
    """How the images are split."""

    # Share of the training images for validation, if the data have no validation split; by default
    # it depends on their number. 0: no validation, not even val/; `train` then saves the last
    # epoch.
    val: float | None = None
    # Share of the images for the test, if the data have no test; by default a tenth. 0: no test,
    # not even test/, whose images are then for training.
    test: float | None = None
    # The groups whose images must stay in one split, such as patients: a column of a table, a level
    # of folders below the class (1, 2, ... or parent), or a pattern for names such as
    # '(patient[0-9]+)'.
    group: str = ""
    # Allow the same image in several splits; by default copies are in one.
    keep_duplicates: bool = False

    def open(
        self, data: str, task: "Task | None" = None, *, prints_notes: bool = True
    ) -> "DataSet":
        """Open the images for a task, by default classification, and print what was ignored.

        Without a task, raises ValueError for data of another task than classification.
        """
        from fullstride.data.dataset import SplitRule
        from fullstride.data.targets import check_purpose
        from fullstride.tasks import find_task

        if task is None:
            check_purpose(data)
        rule = SplitRule(self.val, self.test, self.group, self.keep_duplicates)
        images = (task or find_task()).open_data(data, rule)
        report_ignored(images.ignored, images.notes if prints_notes else ())
        return images
