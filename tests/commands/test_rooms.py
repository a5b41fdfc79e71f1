"""The rooms stand on their own: plain layers need little."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
COUNT = """
import sys
import fullstride.nets.layers
ours = [m for name, m in sys.modules.items() if name.partition(".")[0] == "fullstride"]
print(sum(len(open(m.__file__).readlines()) for m in ours))
"""


def test_reading_a_plain_convolution_imports_at_most_350_lines():
    words = [sys.executable, "-c", COUNT]
    assert int(subprocess.run(words, check=True, capture_output=True).stdout) <= 350
