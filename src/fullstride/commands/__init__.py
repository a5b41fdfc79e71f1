"""Holds the table of commands; each is a function that parses, calls and prints.

They import modules when called, so that `--help` is quick.
"""

from collections.abc import Iterable
from pathlib import Path

from fullstride.commands.estimating import calibrate, choose, estimate
from fullstride.commands.fitting import analyse_scale, fit, scale, search
from fullstride.commands.measuring import bench, capacity, cost, target, zoo
from fullstride.commands.shipping import export, predict, pseudo_label, report
from fullstride.commands.studying import bench_blocks, figures, rank
from fullstride.commands.training import bench_data, pack, train, validate
from fullstride.tables import FORMATS, TASKS

# Everyday commands are one word; a name of two words is a command of a group.
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
    "measure target": target,
}
GROUPS = {
    "study": "Studies of many trainings or networks: LLR-NAS, scaling, and the papers' own.",
    "data": "Prepare data: pack, label, and measure how fast they load.",
    "measure": "What networks cost: operations, memory, and time on devices that are elsewhere.",
}

# Flags that `--help` describes beside required flags, by parameter and field; `--help-all`
# describes all. Other commands have few flags.
USUAL = {
    "fit": "task budget_ms minutes hours target formats weights licence resolutions recipe_name "
    "dry_run",
    "train": "recipe_name epochs batch_size lr resolution weights device task val",
    "validate": "data split device per_class tta out resolution",
    "predict": "top json call_batch device tta out draw nearest",
    "export": "out push format precision with_preprocessing with_resize any_size budget_ms target "
    "data max_drop force",
    "bench": "protocol call_batch resolution device target precision layout compiled rounds out "
    "suite",
    "choose": "target budget_ms images_per_s call_batch source times_from out json task",
    "study search": "master budget_ms images_per_s target preset recipe_name epochs executor "
    "dry_run",
    "study scale": "models widths depths resolutions budget_ms hours target recipe_name "
    "executor dry_run",
    "study blocks": "kinds width ratio resolution call_batch device target precision out",
    "data label": "top min_confidence per_class call_batch device workers",
    "data bench": "recipe_name epochs batch_size resolution workers seconds device out",
    "measure estimate": "target call_batch resolution train json task",
    "measure calibrate": "device target out name runtimes batches precision minutes",
}


def choices(names: Iterable[str]) -> str:
    return f"{{{','.join(names)}}}"


PROFILES = sorted(path.stem for path in Path(__file__).parents[1].glob("latency/*/*.json"))
TARGET, HERE_OR_TARGET = f"{choices(PROFILES)}|FILE", f"{choices(['here', *PROFILES])}|FILE"
ELSEWHERE = "ssh://HOST|COMMAND"
# The values of text flags in the help, by parameter or field, or by command and name.
VALUES = {
    "device": "cpu|cuda|cuda:N|auto",
    "study search format": choices(["module", *FORMATS]),
    "formats": f"{choices(FORMATS)} ...",
    "precision": choices(["fp32", "bf16", "fp16"]),
    "protocol": choices(["online", "throughput", "tresnet", "genet", "resnet_rs"]),
    "source": f"{choices(['ours', 'timm'])} ...",
    "target": TARGET,
    **{f"{name} target": f"{HERE_OR_TARGET}|{ELSEWHERE}" for name in ("fit", "choose")},
    **{f"{name} target": f"here|{ELSEWHERE}" for name in ("bench", "export", "measure calibrate")},
    "study search target": HERE_OR_TARGET,
    "study scale target": HERE_OR_TARGET,
    "study figures target": f"{TARGET} ...",
    "task": choices(TASKS),
    "weights": "hub|PATH|hf:USER/NAME",
    "push": "USER/NAME",
    "fit weights": "hub|none|FOLDER|hf:USER/NAME",
}
