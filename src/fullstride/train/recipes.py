"""How is a network trained? Recipes: frozen data, the named ones with their source and claim."""

from dataclasses import dataclass, replace
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train. The comment beside a field is its help on the command line."""

    epochs: int  # passes over the training images
    batch: int  # images per step
    lr: float  # learning rate at that batch, at its highest

    optimizer: Literal["sgd", "rmsprop", "adamw"] = "sgd"
    momentum: float = 0.9  # of sgd and rmsprop
    nesterov: bool = True  # of sgd
    weight_decay: float = 4e-5  # per step, times the learning rate
    decoupled: bool = False  # sgd: shrink the weights directly instead of through gradient and momentum
    decay_on: Literal["weights", "all_but_norms", "all"] = "weights"  # weights: no biases and no batch norms
    clip_norm: float = 0.0  # longest gradient, over all parameters; 0: any

    schedule: Literal["cosine", "one_cycle", "steps", "exponential"] = "cosine"
    warmup_epochs: float = 5.0  # the learning rate first rises from zero; one_cycle has a rise of its own
    milestones: tuple[float, ...] = (1 / 3, 2 / 3, 8 / 9)  # steps: shares of training after which lr takes the factor
    factor: float = 0.1  # steps and exponential: what the learning rate is multiplied by
    factor_epochs: float = 2.4  # exponential: epochs from one factor to the next

    label_smoothing: float = 0.1  # probability taken from the true class and spread over all
    mixup: float = 0.0  # parameter of the Beta distribution of the share; 0: off
    cutmix: float = 0.0  # the same; with both set, each batch gets one of the two
    drop_path: float = 0.0  # probability to leave out the last block's branch; earlier ones less
    drop_path_by: Literal["block", "stage"] = "block"  # how that probability grows; stage: as ResNet-RS's code
    dropout: float = 0.0  # probability to leave out a number that the classifier sees
    ema_decay: float = 0.9999  # per step, of the average of weights and batch-norm statistics; 0: no average
    teacher: str = ""  # a run, bundle, file or name whose probabilities are learned from too
    teacher_share: float = 0.5  # of the loss

    resolution: int | None = None  # pixels a side; the network's own where not given
    crop: float | None = None  # when scoring, kept side / shorter side of a picture; the network's own where not given
    fit: Literal["crop", "squish"] | None = (
        None  # when scoring, cut or bend to a square; the network's own if not given
    )
    scale: tuple[float, float] = (0.08, 1.0)  # random resized crop: share of the area; above 1 it lies on black
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # random resized crop: width / height
    turn: float = 0.0  # degrees, at most, by which a picture is turned to either side
    flip: float = 0.5  # probability of a left-right flip; no effect where mirrored images change class
    rand_layers: int = 0  # RandAugment: operations on each picture
    rand_magnitude: float = 10.0  # RandAugment: their strength, 0 to 30
    rand_increasing: bool = False  # RandAugment: every operation stronger with the magnitude
    rand_std: float = 0.0  # RandAugment: standard deviation of the magnitude
    rand_probability: float = 1.0  # RandAugment: of each operation
    auto_augment: bool = False  # AutoAugment's policy for ImageNet
    cutout: float = 0.0  # side of a blank square / side of the picture
    erase: float = 0.0  # probability that a part becomes noise, pixel by pixel

    engine: Literal["pillow", "opencv"] = "pillow"  # of training pictures; opencv is faster, its pixels differ a little
    precision: Literal["float32", "tf32", "bf16", "fp16"] = "float32"  # of activations; weights stay float32
    channels_last: bool = False  # memory layout of images and activations
    compiled: bool = False  # by torch.compile
    accumulate: int = 1  # parts that a step's batch is cut into, one after the other, to save memory
    seed: int = 0  # of the weights, the order and every random draw

    def __post_init__(self) -> None:
        for name in ("epochs", "batch", "accumulate"):
            if getattr(self, name) < 1:
                raise ValueError(f"recipe.{name} {getattr(self, name)}: use 1 or more")
        for name in ("lr", "factor", "factor_epochs"):
            if getattr(self, name) <= 0:
                raise ValueError(f"recipe.{name} {getattr(self, name)}: use a number above 0")
        for name in ("momentum", "label_smoothing", "ema_decay", "drop_path", "dropout"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"recipe.{name} {getattr(self, name)}: use a number from 0 up to but without 1")
        for name in ("weight_decay", "seed", "clip_norm", "mixup", "cutmix"):
            if getattr(self, name) < 0:
                raise ValueError(f"recipe.{name} {getattr(self, name)}: use 0 or more")
        if not 0 <= self.teacher_share <= 1:
            raise ValueError(f"recipe.teacher_share {self.teacher_share}: use a share from 0 to 1")
        if list(self.milestones) != sorted(self.milestones) or not all(0 < m < 1 for m in self.milestones):
            raise ValueError(f"recipe.milestones {self.milestones}: use rising shares of training between 0 and 1")
        if self.batch % self.accumulate:
            raise ValueError(
                f"recipe.batch {self.batch} does not divide into recipe.accumulate {self.accumulate} parts"
            )
        if not 0 <= self.warmup_epochs < self.epochs:
            raise ValueError(
                f"recipe.warmup_epochs {self.warmup_epochs:g} leaves nothing of {self.epochs} epochs: "
                f"raise recipe.epochs or set recipe.warmup_epochs={self.epochs / 10:g}"
            )

    def at_batch(self, batch: int) -> "Recipe":
        """The same recipe for another batch, by the linear scaling rule (arXiv:1706.02677)."""
        return replace(self, batch=batch, lr=self.lr * batch / self.batch)


# For a user's own folder. Ours: small steps and a short average suit a start from released weights; no claim yet.
FINETUNE = Recipe(epochs=20, batch=64, lr=0.02, weight_decay=1e-4, warmup_epochs=1, ema_decay=0.998, scale=(0.25, 1.0))

# For the embedded digits, 8 x 8 pixels shown at 48 x 48, from fresh weights. Ours. Claim: the tiny networks
# reach 98.5 % top-1 on the 500 test digits; `make demo` shows what they reach where it runs.
DIGITS = replace(
    FINETUNE,
    epochs=120,
    lr=0.3,
    weight_decay=1e-3,
    warmup_epochs=5,
    resolution=48,
    crop=1.0,
    scale=(0.6, 1.3),
    turn=15.0,
    flip=0.0,
)

# TResNet, arXiv:2003.13630 section 3.1: 300 epochs, SGD with 1-cycle, AutoAugment, Cutout, label smoothing, decoupled
# weight decay, inputs of 0 to 1 (which the network brings). Claim of the paper: TResNet-M 80.8 % at 224. Its code was
# never released: batch, learning rate, weight decay, the side of the cut and the average are ours.
TRESNET = Recipe(
    epochs=300,
    batch=1024,
    lr=0.8,
    weight_decay=1e-4,
    decoupled=True,
    schedule="one_cycle",
    warmup_epochs=0,
    auto_augment=True,
    cutout=0.5,
    ema_decay=0.9999,
    resolution=224,
)

# The recipe that TResNet's README gives for timm (8 GPUs x 190 images, lr 0.6, cosine, average, rand-m9-mstd0.5-inc1,
# mixup 0.2, erasing 0.4). Claim there: TResNet-M 80.5 %. Ours: weight decay and warm-up; RandAugment draws from
# TensorFlow's 16 operations, timm's from 15, without cutout.
TRESNET_TIMM = Recipe(
    epochs=300,
    batch=1520,
    lr=0.6,
    weight_decay=2e-5,
    mixup=0.2,
    erase=0.4,
    rand_layers=2,
    rand_magnitude=9,
    rand_increasing=True,
    rand_std=0.5,
    rand_probability=0.5,
    resolution=224,
)

# Fine-tuning at 448 (arXiv:2003.13630): 10 epochs; pictures bent to the square when scored, as in the authors' code.
# Claim of the paper: TResNet-M 83.2 %. All other numbers are ours.
TRESNET_448 = replace(TRESNET, epochs=10, batch=256, lr=0.02, resolution=448, fit="squish", crop=1.0)

# Transfer to smaller sets (arXiv:2003.13630 section 4): 80 epochs, 1-cycle. All other numbers are ours.
TRESNET_TRANSFER = replace(TRESNET, epochs=80, batch=128, lr=0.05, auto_augment=False, cutout=0.0, ema_decay=0.999)

# The plain baseline of ResNet-RS's study, arXiv:2103.07579 Table 1: 90 epochs, stepwise, weight decay 1e-4.
# Learning rate and batch from its TPU code (0.1 x batch / 256), decay on everything but batch norms as there.
RESNET = Recipe(
    epochs=90,
    batch=4096,
    lr=1.6,
    weight_decay=1e-4,
    decay_on="all_but_norms",
    schedule="steps",
    label_smoothing=0.0,
    ema_decay=0.0,
    resolution=256,
)

# The steps of that table, each on top of the one before. The last two of the paper, squeeze-and-excitation
# and ResNet-D, change the network and not the recipe.
STUDY_COSINE = replace(RESNET, schedule="cosine")
STUDY_LONGER = replace(STUDY_COSINE, epochs=350)
STUDY_AVERAGE = replace(STUDY_LONGER, ema_decay=0.9999)
STUDY_SMOOTHING = replace(STUDY_AVERAGE, label_smoothing=0.1)
STUDY_DROP_PATH = replace(STUDY_SMOOTHING, drop_path=0.1, drop_path_by="stage")
STUDY_RAND_AUGMENT = replace(STUDY_DROP_PATH, rand_layers=2, rand_magnitude=15)
STUDY_DROPOUT = replace(STUDY_RAND_AUGMENT, dropout=0.25)
STUDY_DECAY = replace(STUDY_DROPOUT, weight_decay=4e-5)


def resnet_rs(depth: int, resolution: int) -> Recipe:
    """ResNet-RS's recipe for one size, arXiv:2103.07579: regularisation grows with the network.

    As in the configuration files of the TPU code; the cosine schedule is the paper's.
    """
    return replace(
        STUDY_DECAY,
        resolution=resolution,
        rand_magnitude=10 if resolution == 160 else 15,
        drop_path=0.1 if depth >= 200 else 0.0,
        dropout=0.4 if resolution == 320 else 0.25,
    )


# The sizes of the paper's Table 7.
RESNET_RS_SIZES = (
    (50, 160), (101, 160), (101, 192), (152, 192), (152, 224), (152, 256),
    (200, 256), (270, 256), (350, 256), (350, 320), (420, 320),
)  # fmt: skip

# GENet, arXiv:2006.14090 section 5: 480 epochs, SGD with Nesterov, 0.1 per 256 images, cosine, label smoothing, mixup,
# erasing, AutoAugment, and a ResNet-152 as teacher, its loss and the labels' 1:1. Claim of the paper: 75.7, 80.0 and
# 81.3 %. Ours: the parameter of mixup, the probability of erasing, the batch and the average.
GENET = Recipe(
    epochs=480,
    batch=1024,
    lr=0.4,
    mixup=0.2,
    erase=0.2,
    auto_augment=True,
    teacher="resnet152",
    teacher_share=0.5,
)

# Training of candidates in GENet's search: 120 epochs, and no teacher is mentioned.
GENET_NAS = replace(GENET, epochs=120, teacher="")

RECIPES = {
    "finetune": FINETUNE,
    "digits": DIGITS,
    "tresnet": TRESNET,
    "tresnet_timm": TRESNET_TIMM,
    "tresnet_448": TRESNET_448,
    "tresnet_transfer": TRESNET_TRANSFER,
    "resnet": RESNET,
    "study_cosine": STUDY_COSINE,
    "study_longer": STUDY_LONGER,
    "study_average": STUDY_AVERAGE,
    "study_smoothing": STUDY_SMOOTHING,
    "study_drop_path": STUDY_DROP_PATH,
    "study_rand_augment": STUDY_RAND_AUGMENT,
    "study_dropout": STUDY_DROPOUT,
    "study_decay": STUDY_DECAY,
    "resnet_rs": resnet_rs(50, 160),
    **{f"resnet_rs_{depth}_{side}": resnet_rs(depth, side) for depth, side in RESNET_RS_SIZES},
    "genet": GENET,
    "genet_nas": GENET_NAS,
}
