"""Writes scenes: python -m fullstride.examples FOLDER --count N --side S [--kind KIND]."""

import argparse
import sys
from pathlib import Path

from fullstride.examples.files import COUNTS, write_motion, write_scenes
from fullstride.examples.scenes import FRAMES, KINDS
from fullstride.io.console import printable
from fullstride.io.records import refuse_flags


def main() -> None:
    """Write the data set; exit with 2 for wrong input, 1 for a failing machine."""
    parser = argparse.ArgumentParser(prog="python -m fullstride.examples", description=WHAT)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--count", type=int, default=COUNTS["train"], help="scenes for training")
    parser.add_argument("--side", type=int, default=96, help="pixels a side")
    parser.add_argument("--seed", type=int, default=0)
    kinds = (*KINDS, MOTION)
    what = "floor: with depths; motion: clips of digits that move, by direction"
    parser.add_argument("--kind", choices=kinds, default=KINDS[0], help=what)
    parser.add_argument("--frames", type=int, help=f"frames of a clip (default: {FRAMES})")
    parser.add_argument("--as-videos", action="store_true", help="clips are .mp4 files")
    parser.add_argument("--one-class", action="store_true", help="all digits are of class digit")
    words = parser.parse_args()
    counts = {  # each split has a scene, unless `count` is below 1, which is refused
        split: max(min(words.count, 1), round(count * words.count / COUNTS["train"]))
        for split, count in COUNTS.items()
    }
    shared = words.folder, counts, words.side, words.seed
    try:
        if words.kind == MOTION:
            refuse_flags({"one_class": words.one_class}, f"with --kind {MOTION}: leave it out")
            frames = FRAMES if words.frames is None else words.frames
            write_motion(*shared, frames, as_videos=words.as_videos)
        else:
            of_clips = {"frames": words.frames is not None, "as_videos": words.as_videos}
            refuse_flags(of_clips, f"without --kind {MOTION}: add it")
            write_scenes(*shared, words.kind, one_class=words.one_class)
    except (ValueError, OSError) as error:
        print(printable(str(error)), file=sys.stderr)
        raise SystemExit(2 if isinstance(error, ValueError) else 1) from None
    total = ", ".join(f"{count:,} {split}" for split, count in counts.items())
    print(printable(f"{words.folder}: scenes of the kind {words.kind}: {total}"))


WHAT = "Write example data for the tasks multilabel, detect, segment, depth and video."
MOTION = "motion"

if __name__ == "__main__":
    main()
