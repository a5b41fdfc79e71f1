"""Which recipes have names? `RECIPES`, and those of saved runs, bundles and JSON files."""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from fullstride.nets.efficiency import Efficiency, TrainingForm
from fullstride.storage import looks_like_path
from fullstride.strict_json import read_json
from fullstride.train.recipe import Recipe
from fullstride.train.recipes import modern, papers
from fullstride.train.recipes.defaults import DIGITS, dense, finetune, scratch, video
from fullstride.train.recipes.papers import RESNET_RS_SIZES, resnet_rs, scaling
from fullstride.train.recipes.reading import saved_recipe

# Most classes of a linear probe. With more, the images that it is fitted to would be few of each.
MAX_PROBE_CLASSES = 1_000


@dataclass(frozen=True, kw_only=True)
class Case:
    """What a recipe may depend on. The values here are for commands that have no data."""

    images: int = 1000  # for training
    epochs: float | None = None  # that the user set, in any unit of length
    has_weights: bool = False  # to begin with; else the weights are random
    can_probe: bool = True  # whether each image has one of a few classes
    is_digits: bool = False  # whether the data are the digits of the package
    width: float = 1.0  # multiplier of the network's widths
    resolution: int | None = None  # that the user set, in pixels per side
    of_task: str = ""  # the name of the recipe that a task has for any data


NOMINAL = Case()

# Recipes whose numbers follow the number of images.
BY_IMAGES = {"finetune": finetune, "scratch": scratch, "dense": dense, "video": video}

# Recipes whose numbers follow the case.
BY_CASE: dict[str, Callable[[Case], Recipe]] = {
    "finetune": lambda case: finetune(case.images, case.epochs, probe=case.can_probe),
    "scratch": lambda case: scratch(case.images, case.epochs),
    "dense": lambda case: dense(case.images),
    "video": lambda case: video(case.images, case.has_weights),
    "scaling_350": lambda case: scaling(350, case.width, case.resolution or 224),
}

# All named recipes, for the nominal case where they follow it.
RECIPES = {
    **{name: by_case(NOMINAL) for name, by_case in BY_CASE.items()},
    "digits": DIGITS,
    "tresnet": papers.TRESNET,
    "tresnet_timm": papers.TRESNET_TIMM,
    "tresnet_448": papers.TRESNET_448,
    "tresnet_transfer": papers.TRESNET_TRANSFER,
    "tresnet_finegrained": papers.TRESNET_FINEGRAINED,
    "tresnet_multilabel": papers.TRESNET_MULTILABEL,
    "tresnet_fcos": papers.TRESNET_FCOS,
    "resnet": papers.RESNET,
    "study_cosine": papers.STUDY_COSINE,
    "study_longer": papers.STUDY_LONGER,
    "study_average": papers.STUDY_AVERAGE,
    "study_smoothing": papers.STUDY_SMOOTHING,
    "study_drop_path": papers.STUDY_DROP_PATH,
    "study_rand_augment": papers.STUDY_RAND_AUGMENT,
    "study_dropout": papers.STUDY_DROPOUT,
    "study_decay": papers.STUDY_DECAY,
    "resnet_rs": resnet_rs(50, 160),
    **{f"resnet_rs_{depth}_{side}": resnet_rs(depth, side) for depth, side in RESNET_RS_SIZES},
    "resnet_rs_noisy_student": papers.RESNET_RS_NOISY_STUDENT,
    "resnet_rs_voc": papers.RESNET_RS_VOC,
    "resnet_rs_voc_seg": papers.RESNET_RS_VOC_SEG,
    "resnet_rs_nyu_depth": papers.RESNET_RS_NYU_DEPTH,
    "resnet3d": papers.RESNET3D,
    "resnet3d_dropout": papers.RESNET3D_DROPOUT,
    "resnet3d_smoothing": papers.RESNET3D_SMOOTHING,
    "resnet3d_drop_path": papers.RESNET3D_DROP_PATH,
    "resnet3d_average": papers.RESNET3D_AVERAGE,
    "resnet3d_decay": papers.RESNET3D_DECAY,
    "resnet3d_longer": papers.RESNET3D_LONGER,
    "resnet3d_jitter": papers.RESNET3D_JITTER,
    "resnet3d_rs": papers.RESNET3D_RS,
    "scaling_10": scaling(10),
    "scaling_100": scaling(100),
    "genet": papers.GENET,
    "genet_nas": papers.GENET_NAS,
    "rsb_a1": modern.RSB_A1,
    "rsb_a2": modern.RSB_A2,
    "rsb_a3": modern.RSB_A3,
    "torchvision_600": modern.TORCHVISION_600,
}


def default_recipe(case: Case) -> str:
    """The name of the recipe where none is chosen."""
    if case.of_task:
        return case.of_task
    if case.is_digits:
        return "digits"
    return "finetune" if case.has_weights else "scratch"


def find_recipe(name: str, case: Case = NOMINAL) -> Recipe:
    """The recipe of that name, or a saved one: a JSON file, or the folder of a run or a bundle."""
    if name in BY_CASE:
        return BY_CASE[name](case)
    if name in RECIPES:
        return RECIPES[name]
    path = Path(name)
    if name and path.is_dir():
        files = [path / file for file in ("run.json", "bundle.json") if (path / file).exists()]
        if not files:
            raise ValueError(
                f"no recipe in the folder {name!r}: give that of a run or a bundle, or a JSON file"
            )
        path = files[0]
    if looks_like_path(name) and not path.exists():
        raise ValueError(f"no such file or folder: {name}")
    if not name or not path.is_file():
        close = get_close_matches(name, RECIPES, n=3)
        hint = f"choose from {', '.join(RECIPES)}, or give a file"
        if close:
            hint = f"did you mean {' or '.join(close)}?"
        raise ValueError(f"no recipe named {name!r}: {hint}")
    return saved_recipe(read_json(path), name)


def training_step(
    name: str,
    *,
    resolution: int | None = None,
    precision: str | None = None,
    layout: Literal["nchw", "nhwc"] | None = None,
    efficiency: Efficiency | None = None,
    device: str = "cuda",
) -> dict[str, Any]:
    """How a recipe computes a step, as arguments of `measure.memory.max_batch.plan`.

    Arguments that are not None have precedence over the recipe, which `find_recipe` finds. Without
    a name: bf16, nchw, plain modules and no regularisation. What the recipe leaves to the device is
    that of a GPU with bf16, unless `device` is cpu. Raises ValueError for a recipe that
    chooses its efficiency when training starts.
    """
    if not name:
        form = TrainingForm(efficiency=efficiency or "plain")
        step = dict(precision=precision or "bf16", layout=layout or "nchw")
        return dict(step, resolution=resolution, form=form)
    recipe = find_recipe(name)
    if efficiency:
        recipe = recipe.with_efficiency(efficiency)
    if recipe.efficiency == "auto":
        raise ValueError(f"the efficiency of recipe {name} is auto: set --efficiency")
    precisions = {"tf32": "fp32", "auto": "fp32" if device == "cpu" else "bf16"}
    form = TrainingForm(
        efficiency=recipe.efficiency,
        int8=recipe.int8_maps,
        padded=recipe.pad_channels,
        drop_path=recipe.drop_path,
        drop_path_by=recipe.drop_path_by,
        dropout=recipe.dropout,
    )
    return dict(
        resolution=recipe.resolution if resolution is None else resolution,
        precision=precision or precisions.get(recipe.precision, recipe.precision),
        layout=layout or ("nchw" if recipe.channels_last is False else "nhwc"),
        form=form,
    )
