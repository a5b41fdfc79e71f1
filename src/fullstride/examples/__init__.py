"""Example data for each task: digits on photographs, with exact boxes, masks and depths.

    python -m fullstride.examples SCENES --count 1000 --side 96 --kind digits --one-class
    fullstride train SCENES --task detect ...

The pixels are real: handwritten digits of the package, whose test was written by other people, and
photographs of scikit-image and scikit-learn (extra `examples`). The test has other digits and other
photographs than the training; the digits of "val" are those of validation. The kind "motion" has
clips for the task video.
"""

from fullstride.examples.files import COUNTS, write_motion, write_scenes
from fullstride.examples.scenes import Clip, Look, Scene, split_clip, split_scene

__all__ = ["COUNTS", "Clip", "Look", "Scene", "split_clip", "split_scene"]
__all__ += ["write_motion", "write_scenes"]
