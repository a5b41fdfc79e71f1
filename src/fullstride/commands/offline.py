"""How does a command predict for any number of images? By flags that two commands have."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from fullstride.console import Bar, print_parts, report_ignored, report_skipped

if TYPE_CHECKING:
    from fullstride.deploy.offline.engine import Summary
    from fullstride.deploy.offline.outputs import Model


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
        from fullstride.deploy.offline.by_name import open_images, this_device, this_share
        from fullstride.deploy.offline.engine import check_takes_images
        from fullstride.deploy.offline.outputs import OfflineSettings
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
