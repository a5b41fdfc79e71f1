"""How does a command predict for videos? By flags for several views and for a sliding window."""

from collections.abc import Sequence
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from tyro.conf import arg

from fullstride.commands.flags import refuse_flags
from fullstride.console import printable, report_ignored, report_skipped

if TYPE_CHECKING:
    from fullstride.deploy.exported import ExportedModel
    from fullstride.nets.bundle import Bundle

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
        from fullstride.data.readers.file_kinds import VIDEOS
        from fullstride.deploy.open_model import find_images
        from fullstride.deploy.predict import Prediction
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
