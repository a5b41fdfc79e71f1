"""Which commands are there? One function per verb: parse, call, print.

They import what they need when they are called, so that `--help` is quick.
"""

from fullstride.commands.capacity import capacity
from fullstride.commands.estimating import calibrate, choose, estimate
from fullstride.commands.fitting import fit
from fullstride.commands.measuring import bench, cost, zoo
from fullstride.commands.scaling import analyse_scale, scale
from fullstride.commands.searching import search
from fullstride.commands.shipping import export, predict, pseudo_label, report
from fullstride.commands.studying import bench_blocks, figures, rank
from fullstride.commands.training import bench_data, pack, train, validate

COMMANDS = {
    "fit": fit,
    "search": search,
    "scale": scale,
    "analyse-scale": analyse_scale,
    "zoo": zoo,
    "cost": cost,
    "capacity": capacity,
    "pack": pack,
    "train": train,
    "validate": validate,
    "predict": predict,
    "pseudo-label": pseudo_label,
    "bench": bench,
    "bench-data": bench_data,
    "estimate": estimate,
    "calibrate": calibrate,
    "choose": choose,
    "bench-blocks": bench_blocks,
    "rank": rank,
    "figures": figures,
    "export": export,
    "report": report,
}
