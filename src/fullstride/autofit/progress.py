"""What does a user see of a fit? A few lines for each stage, and a table of what fits."""

from collections.abc import Iterator, Sequence
from typing import Any

from fullstride.autofit.budget_table import fastest_of
from fullstride.autofit.candidates import Candidate
from fullstride.autofit.data_report import report_lines
from fullstride.autofit.fit import Event
