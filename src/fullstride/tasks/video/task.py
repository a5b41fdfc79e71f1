"""Which one of K classes does a video show? Classification by networks of clips."""

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from fullstride.data.clip_data import open_clips
from fullstride.data.dataset import DataSet
from fullstride.data.transforms.clips import ClipTestView, ClipTrainView
from fullstride.data.transforms.crop import Augmentation
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.classify import Classify


@dataclass(frozen=True)
class Video(Classify):
    """Classification of clips: a random one of a video in training, that in its middle in scores.

    Losses, scores and predictions are those of `Classify`.
    """

    short_side: tuple[int, int] | None = None  # scale jitter in training, see `ClipTrainView`

    name: ClassVar[str] = "video"
    takes_clips: ClassVar[bool] = True
    recipe_fields: ClassVar[frozenset[str]] = frozenset({"frames", "frame_stride", "short_side"})
    default_recipe: ClassVar[str] = "video"
    scoring_batch: ClassVar[int] = 8

    def open_data(self, where: str, **how: Any) -> DataSet:
        return open_clips(where, **how)

    def train_view(
        self,
        pre: Preprocessing,
        augmentation: Augmentation,
        decoder: Literal["pillow", "opencv"] = "pillow",
        sides: tuple[int, ...] = (),
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
