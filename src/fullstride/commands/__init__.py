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

# The verbs of every day stand alone; a name of two words is a command of a group.
COMMANDS = {
    "fit": fit,
    "train": train,
    "validate": validate,
    "predict": predict,
    "export": export,
    "bench": bench,
    "choose": choose,
    "report": report,
    "zoo": zoo,
    "study search": search,
    "study scale": scale,
    "study analyse": analyse_scale,
    "study blocks": bench_blocks,
    "study rank": rank,
    "study figures": figures,
    "data pack": pack,
    "data label": pseudo_label,
    "data bench": bench_data,
    "measure cost": cost,
    "measure capacity": capacity,
    "measure estimate": estimate,
    "measure calibrate": calibrate,
}
GROUPS = {
    "study": "Studies of many trainings or networks: LLR-NAS, scaling, and the papers' own.",
    "data": "Prepare data: pack, label, and measure how fast they load.",
    "measure": "What networks cost: operations, memory, and time on devices that are elsewhere.",
}
