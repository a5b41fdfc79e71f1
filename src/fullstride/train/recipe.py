"""What says how a network is trained? A recipe: frozen data, from a name, from JSON, or changed field by field."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from difflib import get_close_matches
from typing import Any, Literal, get_args, get_origin, get_type_hints

LARGEST, LONGEST = (
    1e12,
    100_000,
)  # any number, and epochs: beyond them is a slip, and some would take for ever


# Fields that had another name in version 0.1. Saved recipes and flags with the old name are read.
RENAMED = {
    "views": "distinct_views",
    "turn": "rotation_degrees",
    "flip": "hflip_prob",
    "erase": "random_erasing_prob",
    "accumulate": "grad_accum_steps",
    "decoupled": "decoupled_weight_decay",
    "patience": "early_stop_patience",
    "padded": "pad_channels",
    "engine": "decoder",
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train. The comment beside a field is its help on the command line."""

    epochs: float  # passes over the training images; the last one may be a part of one
    batch: int  # images per step
    lr: float  # learning rate at that batch, at its highest

    steps: int | None = None  # how long to train, in place of epochs
    images: int | None = None  # how many images to show, in place of epochs
    early_stop_patience: int = 0  # epochs without a better minival after which training stops, with the best weights; 0: never

    optimizer: Literal["sgd", "rmsprop", "adamw"] = (
        "sgd"  # rmsprop: in TensorFlow's form, as EfficientNet
    )
    momentum: float = 0.9  # of sgd and rmsprop
    nesterov: bool = True  # of sgd
    weight_decay: float = 4e-5  # per step, times the learning rate
    decoupled_weight_decay: bool = (
        False  # sgd: shrink the weights directly instead of through gradient and momentum
    )
    decay_on: Literal["weights", "all_but_norms", "all"] = (
        "weights"  # weights: no biases and no batch norms
    )
    clip_norm: float = 0.0  # longest gradient, over all parameters; 0: any

    schedule: Literal["cosine", "one_cycle", "steps", "exponential"] = (
        "cosine"  # of the learning rate
    )
    warmup_epochs: float = (
        5.0  # the learning rate first rises from zero; one_cycle has a rise of its own
    )
    milestones: tuple[float, ...] = (
        1 / 3,
        2 / 3,
        8 / 9,
    )  # steps: shares of training after which lr takes the factor
    factor: float = 0.1  # steps and exponential: what the learning rate is multiplied by
    factor_epochs: float = 2.4  # exponential: epochs from one factor to the next

    label_smoothing: float = 0.1  # probability taken from the true class and spread over all
    mixup: float = 0.0  # parameter of the Beta distribution of the share; 0: off
    cutmix: float = 0.0  # the same; with both set, each batch gets one of the two
    drop_path: float = 0.0  # probability to leave out the last block's branch; earlier ones less
    drop_path_by: Literal["block", "stage"] = (
        "block"  # how that probability grows; stage: as ResNet-RS's code
    )
    dropout: float = 0.0  # probability to leave out a number that the classifier sees
    ema_decay: float = (
        0.9999  # per step, of the average of weights and batch-norm statistics; 0: no average
    )
    teacher: str = ""  # a run, bundle, file or name whose probabilities are learned from too
    teacher_share: float = 0.5  # of the loss
    triplet: float = 0.0  # weight of the triplet loss with soft margin, beside the other; 0: off
    per_class: int = (
        0  # images of each class in a batch, as the triplet loss needs; 0: as they come
    )

    resolution: int | None = None  # pixels a side; the network's own where not given
    grow_from: int | None = (
        None  # pixels a side in the first epoch, rising evenly to the resolution
    )
    grow_share: float = 0.8  # of training, until the resolution is reached
    distinct_views: int = (
        0  # different views of each image, after which they come again; 0: a new one in every epoch
    )
    crop: float | None = (
        None  # when scoring, kept side / shorter side of a picture; the network's own where not given
    )
    fit: Literal["crop", "squish"] | None = (
        None  # when scoring, cut or bend to a square; None: as the network wants
    )
    scale: tuple[float, float] = (
        0.08,
        1.0,
    )  # random resized crop: share of the area; above 1 it lies on black
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # random resized crop: width / height
    rotation_degrees: float = 0.0  # degrees, at most, by which a picture is turned to either side
    hflip_prob: float = (
        0.5  # probability of a left-right flip; no effect where mirrored images change class
    )
    rand_layers: int = 0  # RandAugment: operations on each picture
    rand_magnitude: float = 10.0  # RandAugment: their strength, 0 to 30
    rand_increasing: bool = False  # RandAugment: every operation stronger with the magnitude
    rand_std: float = 0.0  # RandAugment: standard deviation of the magnitude
    rand_probability: float = 1.0  # RandAugment: of each operation
    auto_augment: bool = False  # AutoAugment's policy for ImageNet
    cutout: float = 0.0  # side of a blank square / side of the picture
    random_erasing_prob: float = 0.0  # probability that a part becomes noise, pixel by pixel

    decoder: Literal["pillow", "opencv"] = (
        "pillow"  # of training pictures; opencv is faster, its pixels differ a little
    )
    precision: Literal["float32", "tf32", "bf16", "fp16"] = (
        "float32"  # of activations; weights stay float32
    )
    channels_last: bool = False  # memory layout of images and activations
    efficiency: Literal["plain", "lean", "compiled", "auto"] = (
        "plain"  # of steps; auto: the fastest here
    )
    int8_maps: bool = (
        False  # lean and compiled: what only batch norms need is kept in a byte a value
    )
    pad_channels: bool = False  # learn with channels of zeros up to multiples of 8: the same numbers, whole tiles on a GPU
    grad_accum_steps: int = (
        1  # parts that a step's batch is cut into, one after the other, to save memory
    )
    deterministic: bool = False  # the same bits from run to run on a GPU too, at some cost of time
    seed: int = 0  # of the weights, the order and every random draw

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, int | float) and not -LARGEST <= number <= LARGEST:
                    raise ValueError(
                        f"recipe.{field.name} {str(value)[:20]}: use numbers up to {LARGEST:g}"
                    )
        for name in ("batch", "grad_accum_steps", "steps", "images", "grow_from"):
            if (value := getattr(self, name)) is not None and value < 1:
                raise ValueError(f"recipe.{name} {value}: use 1 or more")
        for name in ("epochs", "lr", "factor", "factor_epochs"):
            if getattr(self, name) <= 0:
                raise ValueError(f"recipe.{name} {getattr(self, name)}: use a number above 0")
        for name in ("momentum", "label_smoothing", "ema_decay", "drop_path", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(
                    f"recipe.{name} {getattr(self, name)}: use a number from 0 up to but without 1"
                )
        for name in (
            "weight_decay",
            "seed",
            "clip_norm",
            "mixup",
            "cutmix",
            "early_stop_patience",
            "triplet",
            "per_class",
            "distinct_views",
        ):
            if getattr(self, name) < 0:
                raise ValueError(f"recipe.{name} {getattr(self, name)}: use 0 or more")
        for name in ("teacher_share", "grow_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"recipe.{name} {getattr(self, name)}: use a share from 0 to 1")
        if list(self.milestones) != sorted(self.milestones) or not all(
            0 < m < 1 for m in self.milestones
        ):
            raise ValueError(
                f"recipe.milestones {self.milestones}: use rising shares of training between 0 and 1"
            )
        if self.batch % self.grad_accum_steps:
            raise ValueError(
                f"recipe.batch {self.batch} does not divide into recipe.grad_accum_steps {self.grad_accum_steps} parts"
            )
        if self.triplet and (self.per_class < 2 or self.mixup or self.cutmix):
            raise ValueError(
                f"recipe.triplet {self.triplet:g} compares whole images of the same class within a batch: set "
                "recipe.per_class to 2 or more, and recipe.mixup and recipe.cutmix to 0"
            )
        if self.int8_maps and self.efficiency == "plain":
            raise ValueError(
                "recipe.int8_maps is of lean training: set recipe.efficiency to lean, compiled or auto, or leave it out"
            )
        if self.steps and self.images:
            raise ValueError(
                f"recipe.steps {self.steps} and recipe.images {self.images} both say how long: keep one"
            )
        if self.epochs > LONGEST:
            raise ValueError(f"recipe.epochs {self.epochs:g}: use up to {LONGEST:,}")
        # Where steps or images are given, `in_epochs` looks again; 1-cycle has a rise of its own.
        open_end = self.steps or self.images or self.schedule == "one_cycle"
        if self.warmup_epochs < 0 or not (open_end or self.warmup_epochs < self.epochs):
            raise ValueError(
                f"recipe.warmup_epochs {self.warmup_epochs:g} leaves nothing of {self.epochs:g} epochs: "
                f"train longer or set recipe.warmup_epochs={self.epochs / 10:.2g}"
            )

    def at_batch(self, batch: int) -> "Recipe":
        """The same recipe for another batch, by the linear scaling rule (arXiv:1706.02677)."""
        return replace(self, batch=batch, lr=self.lr * batch / self.batch)

    def with_efficiency(self, efficiency: str) -> "Recipe":
        """The same recipe, which said auto. Plain training keeps no codes."""
        return replace(
            self, efficiency=efficiency, int8_maps=self.int8_maps and efficiency != "plain"
        )

    def in_epochs(self, steps_per_epoch: int, images_per_step: int | None = None) -> "Recipe":
        """The same recipe with its length in epochs that are whole steps, also where it says steps or images.

        `images_per_step` is for sets smaller than a batch.
        """
        steps = (
            math.ceil(self.images / (images_per_step or self.batch)) if self.images else self.steps
        )
        steps = steps or max(1, round(self.epochs * steps_per_epoch))
        return replace(self, epochs=steps / steps_per_epoch, steps=None, images=None)

    def resolutions(self, resolution: int) -> tuple[int, ...]:
        """Pixels a side in each epoch until `resolution` is reached, in eights, so that maps halve evenly."""
        if self.grow_from is None:
            return ()
        if self.grow_from >= resolution:
            raise ValueError(
                f"recipe.grow_from {self.grow_from}: use less than the resolution {resolution}"
            )
        growing = math.ceil(self.grow_share * self.epochs)
        return tuple(
            max(
                8, 8 * round((self.grow_from + (resolution - self.grow_from) * epoch / growing) / 8)
            )
            for epoch in range(growing)
        )


def saved_recipe(data: Any, where: str) -> Recipe:
    """A recipe from JSON: its fields alone, or what a run or a bundle has in `recipe`. `where` is for the error."""
    found = data.get("recipe", data) if isinstance(data, dict) else None
    if not isinstance(found, dict):
        raise ValueError(f"{where} holds no recipe: give the JSON of one, or of a run or a bundle")
    found = with_current_names(found)
    hints = get_type_hints(Recipe)
    for name, value in found.items():
        if name not in hints:
            close = get_close_matches(name, hints, n=1)
            hint = f"did you mean {close[0]!r}?" if close else "remove it"
            raise ValueError(f"{where} has a field {name!r}, which recipes lack: {hint}")
        if not fits(value, hints[name]):
            kind = Recipe.__annotations__[name]
            raise ValueError(
                f"{where}: recipe.{name} {value!r} is not of the kind {getattr(kind, '__name__', kind)}"
            )
    values: dict[str, Any] = {
        k: tuple(value) if isinstance(value, list) else value for k, value in found.items()
    }
    try:
        return Recipe(**values)
    except TypeError:
        missing = [name for name in ("epochs", "batch", "lr") if name not in found]
        raise ValueError(
            f"{where} lacks {', '.join(missing)}: a recipe needs these three"
        ) from None


def with_current_names(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a saved recipe under the names that they have in this version."""
    return {RENAMED.get(name, name): value for name, value in recipe.items()}


def with_current_flags(words: Sequence[str]) -> list[str]:
    """Command-line words with `--recipe.OLD` replaced by `--recipe.NEW`, with a warning for each."""
    current = []
    for word in words:
        flag, equals, value = word.partition("=")
        prefix, _, name = flag.partition(".")
        negated, name = name.startswith("no-"), name.removeprefix("no-")
        if prefix == "--recipe" and name.replace("-", "_") in RENAMED:
            new = RENAMED[name.replace("-", "_")].replace("_", "-")
            new_flag = f"--recipe.{'no-' if negated else ''}{new}"
            print(f"fullstride: {flag} is deprecated, use {new_flag}", file=sys.stderr)
            word = new_flag + equals + value
        current.append(word)
    return current


def fits(value: Any, hint: Any) -> bool:
    """Whether a value read from JSON is of the kind that a field has."""
    kinds = get_args(hint)
    if get_origin(hint) is Literal:
        return value in kinds
    if get_origin(hint) is tuple:
        many = Ellipsis in kinds
        return (
            isinstance(value, list)
            and (many or len(value) == len(kinds))
            and all(fits(v, kinds[0]) for v in value)
        )
    if kinds:  # this or None
        return any(fits(value, kind) for kind in kinds)
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    return type(value) is hint
