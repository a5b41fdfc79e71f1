"""Large pictures need the memory of one at a time, measured as the peak of a child process."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from sklearn.datasets import load_sample_image

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="needs the module resource"),
]
PEAK = "resource.getrusage(resource.RUSAGE_SELF).ru_maxrss"
PREDICT = f"""
import resource, sys
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parents[1])!r})
from bundles import small_bundle
from fullstride.deploy.predict import predict
from PIL import Image
bundle = small_bundle()
list(predict(bundle, Image.new("RGB", (99, 99))))
before = {PEAK}
answers = list(predict(bundle, sys.argv[1:]))
assert all(answer.guesses for answer in answers)
print({PEAK} - before)
"""
TRAIN = f"""
import resource, sys
from pathlib import Path
import numpy as np
from fullstride.data.dataset import decode
from fullstride.data.transforms.crop import Augmentation, train_view
from fullstride.nets.preprocessing import Preprocessing
before = {PEAK}
picture = decode(Path(sys.argv[1]), 3)
for seed in range(5):
    rng = np.random.default_rng(seed)
    train_view(picture, Preprocessing(), Augmentation(scale=(0.5, 4)), rng)
print({PEAK} - before)
"""
VIEWS = f"""
import resource, sys
from pathlib import Path
import numpy as np
from fullstride.data.transforms.crop import Augmentation, test_view, train_view
from fullstride.nets.preprocessing import Preprocessing
before = {PEAK}
pre = Preprocessing(draft=True)
for path in map(Path, sys.argv[1:]):
    for seed in range(3):
        train_view(path, pre, Augmentation(), np.random.default_rng(seed))
    test_view(path, pre)
print({PEAK} - before)
"""


def peak_mib(code: str, *paths: Path) -> float:
    """Growth of the peak memory of a process that runs `code`."""
    words = [sys.executable, "-c", code, *map(str, paths)]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    return int(done.stdout) / (2**10 if sys.platform == "linux" else 2**20)


def test_a_batch_of_photographs_needs_less_memory_than_one_decoded_photograph(tmp_path):
    photo = np.tile(load_sample_image("china.jpg"), (10, 10, 1))[:4000, :6000]
    Image.fromarray(photo).save(tmp_path / "a.jpg", quality=90)  # 69 MiB of pixels
    assert peak_mib(PREDICT, *[tmp_path / "a.jpg"] * 12) < 60


@pytest.mark.parametrize(
    ("mode", "name", "how", "most"),
    [
        ("L", "a.jpg", {}, 40),
        ("L", "a.jpg", {"progressive": True}, 360),  # its coefficients are 346 MiB
        ("RGB", "a.png", {"compress_level": 1}, 720),  # its pixels are 692 MiB
    ],
)
def test_a_photograph_of_181_megapixels_takes_the_memory_that_it_is_allowed(
    tmp_path, mode, name, how, most
):
    """Bytes at the end, so that it does not look like a bomb: it is of one colour."""
    Image.new(mode, (14_000, 12_950)).save(tmp_path / name, **how)
    with (tmp_path / name).open("ab") as file:
        file.write(bytes(2 * 2**20))
    assert peak_mib(VIEWS, tmp_path / name) < most


@pytest.mark.parametrize("mode", ["RGBA", "I;16"])
def test_a_panorama_of_80_megapixels_trains_within_its_pixels_twice(tmp_path, mode):
    values = np.tile(np.arange(250, dtype=np.uint8), (2000, 160))
    picture = {
        "RGBA": lambda: Image.merge("RGBA", [Image.fromarray(values)] * 4),
        "I;16": lambda: Image.fromarray(values.astype(np.uint16) * 257),
    }[mode]()
    picture.save(tmp_path / "a.png", compress_level=1)
    assert peak_mib(TRAIN, tmp_path / "a.png") < 2 * 320 + 330  # 256 MiB for a padded crop
