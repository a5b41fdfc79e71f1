"""Defines the hyperparameters of a training, with their checks, help and JSON."""

import inspect
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from tyro.conf import Fixed, Suppress, arg

from fullstride.data.transforms.settings import Augmentation, check_augmentation
from fullstride.io.records import (
    BelowOne,
    Bounds,
    Count,
    NonNegative,
    Positive,
    PositiveInt,
    Probability,
    from_json,
)
from fullstride.nets.efficiency import short_precision
from fullstride.nets.preprocessing import Fit, check_colour

MAX_NUMBER = 1e12  # larger numbers are typing errors, and some would cause endless loops


def check_size(recipe: Any) -> None:
    """Raise ValueError for a number beyond `MAX_NUMBER`, infinity or NaN."""
    options = {f"task_options.{name}": value for name, value in recipe.task_options.items()}
    for name, value in {**vars(recipe), **options}.items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int | float) and not -MAX_NUMBER <= number <= MAX_NUMBER:
                raise ValueError(
                    f"recipe.{name} {str(value)[:20]}: use numbers up to {MAX_NUMBER:g}"
                )


def check_steps(recipe: Any) -> None:
    """Raise ValueError for contradictory batches or lengths of training."""
    if recipe.grad_accum_steps and recipe.batch_size % recipe.grad_accum_steps:
        raise ValueError(
            f"recipe.batch_size {recipe.batch_size} is not divisible by recipe.grad_accum_steps "
            f"{recipe.grad_accum_steps}: change one of them"
        )
    if recipe.triplet and (recipe.per_class < 2 or recipe.mixup or recipe.cutmix):
        raise ValueError(
            f"recipe.triplet {recipe.triplet:g} compares unmixed images of one class: set "
            "recipe.per_class to 2 or more, and recipe.mixup and recipe.cutmix to 0"
        )
    if list(recipe.milestones) != sorted(recipe.milestones):
        raise ValueError(f"recipe.milestones {recipe.milestones}: use increasing fractions")
    if 0 < recipe.early_stop_patience < recipe.score_every_epochs:
        raise ValueError(
            f"recipe.early_stop_patience {recipe.early_stop_patience} ends before there is a "
            f"second score, after recipe.score_every_epochs {recipe.score_every_epochs}: use as "
            "many epochs or more, or 0"
        )
    if recipe.soup == 1:
        raise ValueError("recipe.soup 1 has nothing to average: use 2 epochs or more, or 0")
    if recipe.steps and recipe.images:
        raise ValueError(
            f"recipe.steps {recipe.steps} and recipe.images {recipe.images} both set the length of "
            "training: use one of them"
        )


def check_balance(recipe: Any) -> None:
    """Raise ValueError for losses and ways to balance classes that exclude each other."""
    if recipe.loss == "bce" and recipe.teacher:
        raise ValueError(
            "recipe.loss bce trains a probability for each class alone, and recipe.teacher one "
            "distribution over all: use cross_entropy or focal, or no teacher"
        )
    if recipe.balanced_sampling and recipe.class_weights != "none":
        raise ValueError(
            f"recipe.balanced_sampling {recipe.balanced_sampling:g} and recipe.class_weights "
            f"{recipe.class_weights} would balance the classes twice: use one of them"
        )
    for name, off in (("balanced_sampling", 0), ("repeated_augmentation", 1)):
        value = getattr(recipe, name)
        if value != off and recipe.per_class:
            raise ValueError(
                f"recipe.{name} {value:g} and recipe.per_class {recipe.per_class} both choose the "
                "images of a batch: use one of them"
            )


def check_unlabelled(recipe: Any) -> None:
    """Raise ValueError for fields that exclude images without labels."""
    if not recipe.unlabelled:
        return
    excluded = {
        "loss": ("bce", "is not linear in the targets: use cross_entropy or focal"),
        "teacher": (recipe.teacher or None, "would teach labelled images too: leave it out"),
        "triplet": (recipe.triplet or None, "needs the class of each image: set it to 0"),
        "grow_from": (recipe.grow_from, "grows with the epochs of labelled images: leave it out"),
    }
    for name, (value, why) in excluded.items():
        if value is not None and getattr(recipe, name) == value:
            raise ValueError(f"recipe.unlabelled with recipe.{name} {value}, which {why}")


MAX_EPOCHS = 100_000  # more are a typing error

# The fraction of a short training that its warmup takes, instead of all of it.
SHORT_WARMUP_SHARE = 0.1

# Shorter epochs share a validation score, but a training has at least MIN_SCORES: 42 of the 429
# epochs of 2 steps for 60 images are scored.
STEPS_PER_SCORE, MIN_SCORES = 50, 40

# Short flags of fields, also for the parser: flag -> field.
SHORT_FLAGS = {
    "--epochs": "epochs",
    "--batch-size": "batch_size",
    "--lr": "lr",
    "--resolution": "resolution",
    "--score": "score",
    "--background": "background",
}

OpenUnitInterval = Annotated[float, Bounds(gt=0, lt=1)]

# Fields that the device decides by default -> that default.
LEFT_TO_THE_DEVICE = {"precision": "auto", "channels_last": None}


def short_flag(field: str) -> Any:
    """The short flag of a field, for the parser of command lines."""
    return arg(aliases=[flag for flag, name in SHORT_FLAGS.items() if name == field])


@dataclass(frozen=True, kw_only=True)
class Hyperparameters:
    """The hyperparameters of steps, loss and images."""

    # passes over the training images; the last one may be partial
    epochs: Annotated[float, Bounds(gt=0, le=MAX_EPOCHS), short_flag("epochs")]
    # images per optimizer step, over all processes
    batch_size: Annotated[PositiveInt, short_flag("batch_size")]
    lr: Annotated[Positive, short_flag("lr")]  # peak learning rate for this batch size

    steps: PositiveInt | None = None  # length of training in optimizer steps, instead of epochs
    images: PositiveInt | None = None  # length of training in images, instead of epochs
    # epochs without a better validation score before training stops with the best weights; 0: off
    early_stop_patience: Count = 0
    # number of best epochs whose average weights are tried at the end, and used if their validation
    # score is better; 0: off
    soup: Count = 0
    # epochs between validation scores, checkpoints and printed lines; 0: 1, or more if epochs are
    # many and short
    score_every_epochs: Count = 0
    # measure batch statistics of the final weights on training images without augmentation, and
    # use them if they improve the validation score
    precise_bn: bool = False
    # with released weights: fit a linear classifier to their features first (a linear probe).
    # Training begins with it if frozen_statistics is set, and ends with it unless training improves
    # the validation score
    linear_probe: bool = False
    # share of the probe's weights in the final weights, if training began with it; a clearly better
    # validation score of the probe or of the trained weights goes before it
    probe_share: BelowOne = 0.0
    # validation score to compare epochs and runs by: top1, top5, balanced_accuracy, macro_f1, loss
    # or ece for classification; by default the task's own
    score: Annotated[str, short_flag("score")] = ""
    # fit a temperature on the validation split at the end, so that probabilities match frequencies;
    # the order of the classes stays. With several labels: choose a threshold for each
    calibrate: bool = True

    # sgd, rmsprop in TensorFlow's form (as for EfficientNet), adamw, lamb for large batches, or
    # muon: orthogonalised momentum for weights of layers, adamw for all other parameters
    optimizer: Literal["sgd", "rmsprop", "adamw", "lamb", "muon"] = "sgd"
    # for sgd, rmsprop and muon; in one_cycle it is 0.1 lower at the highest learning rate
    momentum: BelowOne = 0.9
    nesterov: bool = True  # Nesterov momentum for sgd and muon
    weight_decay: NonNegative = 4e-5  # per step, multiplied by the learning rate
    # for sgd: decay the weights directly, not through the gradient (as in AdamW)
    decoupled_weight_decay: bool = False
    # parameters that decay; weights: no biases and no normalization layers
    decay_on: Literal["weights", "all_but_norms", "all"] = "weights"
    clip_norm: NonNegative = 0.0  # maximum norm of the gradient of all parameters; 0: no clipping

    # rate of a block / rate of the next block, from the classifier back to the stem
    layer_decay: Annotated[float, Bounds(gt=0, le=1)] = 1.0
    head_lr_scale: Positive = 1.0  # rate of the classifier / lr
    # stages from the input that never train, the first with the stem; -1: all but the classifier
    freeze_stages: Annotated[int, Bounds(ge=-1)] = 0
    # layers that never train, by the paths of modules or parameters, such as stem stages.0
    frozen: tuple[str, ...] = ()
    freeze_epochs: NonNegative = 0.0  # epochs at the start that train only the classifier

    # learning rate schedule
    schedule: Literal["cosine", "one_cycle", "steps", "exponential"] = "cosine"
    # linear warmup from 0, or a tenth of a training that is not longer; one_cycle has its own
    warmup_epochs: NonNegative = 5.0
    # for steps: fractions of training at which the learning rate is multiplied by factor
    milestones: tuple[OpenUnitInterval, ...] = (1 / 3, 2 / 3, 8 / 9)
    # multiplier of the learning rate; None: 0.1 for steps, 0.97 for exponential
    factor: Positive | None = None
    factor_epochs: Positive = 2.4  # for exponential: epochs between multiplications

    # bce: a binary cross-entropy per class (arXiv:2110.00476); focal: cross-entropy with a lower
    # weight for easy images (arXiv:1708.02002)
    loss: Literal["cross_entropy", "bce", "focal"] = "cross_entropy"
    # for bce: reduction over classes; timm uses mean, with gradients divided by their number
    bce_reduction: Literal["sum", "mean"] = "sum"
    # for bce: targets above this, after smoothing and mixing, become 1 and all others 0; 0: off
    bce_threshold: BelowOne = 0.0
    focal_gamma: NonNegative = 2.0  # for focal: exponent of (1 - probability of the class)
    # weight of an image in the loss: 1 / images of its class, or the square root of that
    class_weights: Literal["none", "balanced", "sqrt"] = "none"
    # how often a class is drawn: 0: as often as it occurs, 1: equally often, in between:
    # proportional to its images to the power of 1 - this
    balanced_sampling: Probability = 0.0
    label_smoothing: BelowOne = 0.1  # probability moved from the true class to all classes
    mixup: NonNegative = 0.0  # alpha of mixup's Beta distribution; 0: off
    cutmix: NonNegative = 0.0  # alpha of CutMix; with mixup set too, each batch gets one of them
    drop_path: BelowOne = 0.0  # stochastic depth: drop probability of the last block
    # stochastic depth grows linearly by block, or by stage as in the ResNet-RS code
    drop_path_by: Literal["block", "stage"] = "block"
    dropout: BelowOne = 0.0  # drop probability before the classifier
    # decay per step of the exponential moving average of weights and batch statistics; 0: off
    ema_decay: BelowOne = 0.9999
    # weight of a batch in the running statistics of batch norm; in the first steps 1 / (step + 1),
    # so that initial values have no weight. None: the network's own, from the first step
    bn_momentum: Annotated[float, Bounds(gt=0, le=1)] | None = None
    # train all weights, but normalise by the initial running statistics and keep them: batch
    # statistics of few images vary, and overfit in long trainings
    frozen_statistics: bool = False
    teacher: str = ""  # network for knowledge distillation: a run, bundle, file or name
    teacher_share: Probability = 0.5  # weight of the distillation loss; the task has the rest
    # additional images without labels: a folder written by `fullstride data label`
    unlabelled: str = ""
    # images without labels / images with labels in a batch, and the weight of their loss
    unlabelled_ratio: Positive = 1.0
    # lowest probability of the teacher's best class for an image without labels to be used
    unlabelled_min_confidence: Probability = 0.3
    # images without labels per class, the most confident; a class with fewer repeats them. 0: all
    # once
    unlabelled_per_class: Count = 0
    triplet: NonNegative = 0.0  # weight of an added soft-margin triplet loss; 0: off
    triplet_form: Literal["weighted", "batch_hard"] = "weighted"  # of all pairs, or the hardest
    per_class: Count = 0  # images per class in a batch, for the triplet loss; 0: any
    # task options by name, such as {"head_width": 32} for detect, which `--task.head-width` sets
    task_options: Annotated[Mapping[str, Any], Fixed, Suppress] = field(
        default_factory=dict, hash=False
    )

    # pixels per side; None: the network's default
    resolution: Annotated[PositiveInt | None, short_flag("resolution")] = None
    # pixels per side in training / in evaluation, in multiples of 8 (arXiv:1906.06423)
    train_resolution_ratio: Annotated[float, Bounds(gt=0, le=4)] = 1.0
    # progressive resizing: pixels per side in the first epoch, growing linearly to resolution
    grow_from: PositiveInt | None = None
    grow_share: Probability = 0.8  # fraction of training in which the resolution grows
    # views of each image per epoch, with as many times fewer different images; 1: off
    repeated_augmentation: PositiveInt = 1
    distinct_views: Count = 0  # augmented views per image, repeated in turn; 0: new every epoch
    # for evaluation: center crop / shorter side; None: the network's default
    crop: Positive | None = None
    # for evaluation: crop, squish or pad to a square; None: the task's default or the network's
    fit: Fit | None = None


@dataclass(frozen=True, kw_only=True)
class Recipe(Augmentation, Hyperparameters):
    """The hyperparameters of a training run. The comment on a field is its command-line help.

    Examples:
        >>> import fullstride
        >>> fullstride.Recipe(epochs=10, batch_size=32, lr=0.1).at_batch(64)
        Recipe(epochs=10, batch_size=64, lr=0.2)
    """

    # JPEG decoder and transforms; opencv is faster and its pixels differ slightly
    decoder: Literal["pillow", "opencv"] = "pillow"
    # decode large JPEGs at 1/2, 1/4 or 1/8 of their size, also in evaluation; None: True, except
    # for resuming a run that began without
    draft: bool | None = None
    # colour behind transparent pixels, such as black or #rrggbb; None: the weights' own, or white
    background: Annotated[str | None, short_flag("background")] = None
    # type of activations, weights are fp32; fp32 is exact, tf32 is fp32 with fast GPU products
    # rounded to 10 bits; auto: bf16 on a GPU with bf16, tf32 on other GPUs, fp32 on a CPU
    precision: Literal["auto", "fp32", "tf32", "bf16", "fp16"] = "auto"
    # memory format of images and activations; None: True, except for 16 bits on a CPU
    channels_last: bool | None = None
    # how a training step is computed: plain (eager), or compiled with recomputation, which takes
    # about half of the memory on a GPU; auto: the faster one on this device
    efficiency: Literal["plain", "plain_compiled", "auto"] = "plain"
    # pad channels with zeros to multiples of 8, for tensor cores; the function is unchanged.
    # The rate of muon follows the padded shapes
    pad_channels: bool = False
    # forward and backward passes per optimizer step; 0: the fewest that fit into memory
    grad_accum_steps: Count = 1
    # batch-norm statistics over the images of all processes, not of each process
    sync_bn: bool = False
    deterministic: bool = False  # use deterministic algorithms on a GPU, which are slower
    seed: Count = 0  # for initialization, shuffling and all other random numbers

    def __post_init__(self) -> None:
        set_options = {  # JSON has lists in place of tuples
            name: tuple(value) if isinstance(value, list) else value
            for name, value in self.task_options.items()
        }
        object.__setattr__(self, "task_options", set_options)
        object.__setattr__(self, "precision", short_precision(self.precision))
        check_size(self)
        check_augmentation(self, "recipe.")
        check_steps(self)
        check_balance(self)
        check_unlabelled(self)
        if self.background is not None:
            check_colour("recipe.background", self.background)

    def __repr__(self) -> str:
        """The fields that differ from their defaults, and the task's options."""
        values = [
            f"{field.name}={getattr(self, field.name)!r}"
            for field in fields(self)
            if field.name != "task_options" and getattr(self, field.name) != field.default
        ]
        options = f",\n  task_options={self.task_options!r}" if self.task_options else ""
        return f"Recipe({', '.join(values)}{options})"

    def with_task_options(self, options: Mapping[str, Any]) -> "Recipe":
        """The recipe with additional or changed options of the task."""
        return replace(self, task_options={**self.task_options, **options})

    @property
    def measures_statistics(self) -> bool:
        """Whether precise batch statistics are measured at the end."""
        return self.precise_bn and not self.frozen_statistics

    @property
    def unlabelled_batch(self) -> int:
        """Images without labels in a batch, beside `batch_size` images with labels."""
        return max(1, round(self.unlabelled_ratio * self.batch_size)) if self.unlabelled else 0

    def at_batch(self, batch: int) -> "Recipe":
        """The recipe for another batch size, with its learning rate."""
        return replace(self, batch_size=batch, lr=self.lr_for(batch))

    def lr_for(self, batch: int, optimizer: str = "") -> float:
        """The peak learning rate for another batch size, and optionally another `optimizer`.

        It is proportional to the batch for sgd (arXiv:1706.02677), and to the root of the batch for
        optimizers that divide by the size of gradients (arXiv:2205.10287).
        """
        ratio = batch / self.batch_size
        return self.lr * (ratio if (optimizer or self.optimizer) == "sgd" else math.sqrt(ratio))

    def in_epochs(self, steps_per_epoch: int, images_per_step: int | None = None) -> "Recipe":
        """The recipe with its length in epochs, rounded to whole steps.

        A warmup that is not shorter than training becomes `SHORT_WARMUP_SHARE` of training.
        `images_per_step` is less than `batch_size` if there are fewer images.
        """
        steps = self.steps
        if self.images:
            steps = math.ceil(self.images / (images_per_step or self.batch_size))
        steps = steps or max(1, round(self.epochs * steps_per_epoch))
        epochs, warmup = steps / steps_per_epoch, self.warmup_epochs
        if warmup >= epochs and self.schedule != "one_cycle":
            warmup = SHORT_WARMUP_SHARE * epochs
        return replace(self, epochs=epochs, warmup_epochs=warmup, steps=None, images=None)

    def scored_every(self, epochs: float, steps_per_epoch: int) -> int:
        """Epochs between validations; 1 if the recipe compares epochs."""
        if self.score_every_epochs:
            return self.score_every_epochs
        if self.early_stop_patience or self.soup:
            return 1
        return max(1, min(STEPS_PER_SCORE // steps_per_epoch, int(epochs / MIN_SCORES)))

    def resolutions(self, resolution: int) -> tuple[int, ...]:
        """Pixels per side of each epoch below `resolution`, in multiples of 8.

        A `train_resolution_ratio` applies to all epochs. Raises ValueError if `grow_from` is not
        below the resolution of training.
        """
        side, epochs = resolution, math.ceil(self.epochs)
        if self.train_resolution_ratio != 1:
            side = in_eights(self.train_resolution_ratio * resolution)
        last = (side,) * epochs if side != resolution else ()
        if self.grow_from is None:
            return last
        if self.grow_from >= side:
            raise ValueError(
                f"recipe.grow_from {self.grow_from}: use less than the resolution {side}"
            )
        growing = math.ceil(self.grow_share * self.epochs)
        added = side - self.grow_from
        grown = (self.grow_from + added * epoch / growing for epoch in range(growing))
        return *map(in_eights, grown), *last[growing:]


def in_eights(side: float) -> int:
    return max(8, 8 * round(side / 8))


def field_help(kind: type = Recipe) -> dict[str, str]:
    """The help of each field: the comment beside or above the field, and the bounds of its type."""
    text: dict[str, str] = {}
    for base in (each for each in reversed(kind.__mro__) if is_dataclass(each)):
        comment = ""
        for line in inspect.getsource(base).splitlines():
            if line.startswith("    def "):
                break
            if match := re.match(r"    (\w+): .*?(?:  # (.*))?$", line):
                text[match[1]], comment = match[2] or comment.strip(), ""
            elif line.startswith("    # "):
                comment += line[5:]
    for name, hint in get_type_hints(kind, include_extras=True).items():
        if limits := bounds_of(hint):
            text[name] += f" ({limits[0]})"
    return text


def bounds_of(hint: Any) -> list[Bounds]:
    if get_origin(hint) is Annotated:
        return [part for part in get_args(hint) if isinstance(part, Bounds)]
    return [bounds for part in get_args(hint) for bounds in bounds_of(part)]


def saved_recipe(data: Any, where: str) -> Recipe:
    """Read a recipe from parsed JSON: its fields, or the `recipe` of a run or a bundle.

    Raises ValueError, in one line that begins with `where`, for anything but a recipe.
    """
    recipe = data.get("recipe", data) if isinstance(data, dict) else None
    if not isinstance(recipe, dict):
        raise ValueError(
            f"{where} has no recipe: give the JSON file of a recipe, or of a run or a bundle"
        )
    return from_json(Recipe, recipe, where)
