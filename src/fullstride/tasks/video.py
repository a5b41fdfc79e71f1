"""The task of classifying videos, by networks of clips."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from fullstride.data.dataset import DEFAULT_RULE, DataSet, SplitRule
from fullstride.data.targets import open_clips
from fullstride.data.transforms.clips import ClipTestView, ClipTrainView, Starts, ViewsOfVideo
from fullstride.data.transforms.crop import Augmentation, Decoder, Sides
from fullstride.io.records import PositiveInt
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.classify import Classify
from fullstride.tasks.task import Count


@dataclass(frozen=True)
class VideoOptions:
    """The options of the classification of videos."""

    frames: Count = 0  # frames of a clip; 0: as the weights, or the network's own number
    # frames of the video from one frame of a clip to the next; 0: as the weights, or 2
    frame_stride: Count = 0
    # scale jitter, in place of random resized crops: least and most pixels of the shorter side,
    # which is drawn for each clip before a random square is cropped
    short_side: tuple[PositiveInt, PositiveInt] | None = None


@dataclass(frozen=True)
class Video(VideoOptions, Classify):
    """Classification of clips: a random clip of a video in training, its middle clip in scores.

    Losses, scores and predictions are as in `Classify`.
    """

    name: ClassVar[str] = "video"
    options: ClassVar[type] = VideoOptions
    takes_clips: ClassVar[bool] = True
    default_recipe: ClassVar[str] = "video"
    variants: ClassVar[tuple[Mapping[str, Any], ...]] = ({"frames": 8}, {"frames": 16})
    scoring_batch: ClassVar[int] = 8

    @property
    def clip(self) -> tuple[int, int]:
        return self.frames, self.frame_stride

    def open_data(self, where: str, rule: SplitRule = DEFAULT_RULE) -> DataSet:
        return open_clips(where, rule)

    def train_view(
        self, pre: Preprocessing, augmentation: Augmentation, decoder: Decoder, sides: Sides
    ) -> ClipTrainView:
        if decoder != "pillow":
            raise ValueError(f"recipe.decoder {decoder} is for images: use pillow for videos")
        if sides:
            raise ValueError(
                "recipe.grow_from and recipe.train_resolution_ratio are for images: leave them out "
                "for videos"
            )
        return ClipTrainView(pre, augmentation, self.short_side)

    def test_view(self, pre: Preprocessing) -> ClipTestView:
        return ClipTestView(pre)


def views_of(text: str, pre: Preprocessing, starts: Starts = "inclusive") -> ViewsOfVideo | None:
    """The views of a video that `text` names, such as "10x3"; see `clip_starts` for `starts`.

    None for the one view of an empty text. Raises ValueError in one line.
    """
    if not text:
        if starts != "inclusive":
            raise ValueError(f"--clip-starts {starts} is for --views: add it")
        return None
    numbers = re.fullmatch(r"([0-9]{1,4})x([13])", text)
    if not numbers:
        raise ValueError(f"--views {text}: use CLIPSxCROPS with 1 or 3 crops, such as 10x3")
    if not pre.frames:
        raise ValueError(f"--views {text}: the network takes images, not clips: leave it out")
    return ViewsOfVideo(pre, int(numbers[1]), 3 if numbers[2] == "3" else 1, starts)
