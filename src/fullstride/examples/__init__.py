"""Example data for each task: digits on photographs, with exact boxes, masks and depths.

    python -m fullstride.examples SCENES --count 1000 --side 96 --kind digits --one-class
    fullstride train SCENES --task detect ...

The pixels are real: the package's handwritten digits and photographs of scikit-image and
scikit-learn (extra `examples`). The test has other photographs than training, and digits by other
writers; "val" has the validation digits. The kind "motion" has clips for the task video.
"""

from fullstride.examples.files import COUNTS, write_motion, write_scenes
from fullstride.examples.scenes import Clip, Look, Scene, split_clip, split_scene

__all__ = ["COUNTS", "Clip", "Look", "Scene", "split_clip", "split_scene"]
__all__ += ["write_motion", "write_scenes"]
