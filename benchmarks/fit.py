"""Does `fullstride fit` keep its promise, and what is lost against training every candidate?

    python benchmarks/fit.py digits --out benchmarks/fit_digits.json --work FOLDER
    python benchmarks/fit.py fashion --data FOLDER --out benchmarks/fit_fashion.json --work FOLDER
    python benchmarks/fit.py elpv --data FOLDER --out benchmarks/fit_elpv.json --work FOLDER

Every candidate is trained to the end by the same recipe and exported in every form, and the files
are scored on the test images: the reference. Then six budgets, from the fastest candidate to the
slowest, are each given to a fit of its own. Its file is measured again in a fresh process, and its
test accuracy is compared with that of the best file of the reference within the budget (regret),
with a random choice of candidate, the largest that fits, and the default network alone. The cost is
the seconds of the fit's plan and training, as a share of training all candidates.

WORK keeps all runs, so that a stopped benchmark goes on. FOLDER has the data as for defaults.py.
"""

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fullstride.autofit.fit import INPUT, fit_data
from fullstride.autofit.settings import FitSettings
from fullstride.data.dataset import DataSet, open_data
from fullstride.measure.environment import Environment
from fullstride.nets import zoo
from fullstride.outputs import json_output
from fullstride.train.recipes.choice import RecipeChoice
from fullstride.writing import atomic_write
