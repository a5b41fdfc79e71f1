"""What can a user ask for? One thin command per verb, which imports what it needs, so that `--help` is quick."""

from fullstride.commands.capacity import capacity
from fullstride.commands.estimating import calibrate, choose, estimate
from fullstride.commands.figures import figures
from fullstride.commands.measuring import bench, cost, zoo
from fullstride.commands.shipping import export, predict, report
from fullstride.commands.studying import bench_blocks, rank
from fullstride.commands.training import bench_data, pack, train, validate

COMMANDS = {
    "zoo": zoo,
    "cost": cost,
    "capacity": capacity,
    "pack": pack,
    "train": train,
    "validate": validate,
    "predict": predict,
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
