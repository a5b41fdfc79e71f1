"""How is a network trained? Recipes: frozen data, the named ones with their source and claim."""

from dataclasses import dataclass, replace


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How to train. The comment beside a field is its help on the command line."""

    epochs: int  # passes over the training images
    batch: int  # images per step
    lr: float  # learning rate at that batch, at its highest
    momentum: float = 0.9  # of SGD, with Nesterov's step
    weight_decay: float = 4e-5  # added to the gradient; not for biases and batch norms
    warmup_epochs: float = 5.0  # the learning rate rises from zero, then falls by half a cosine
    label_smoothing: float = 0.1  # probability taken from the true class and spread over all
    ema_decay: float = 0.9999  # per step, of the average of weights and batch-norm statistics; 0: no average
    resolution: int | None = None  # pixels a side; the network's own where not given
    crop: float | None = (
        None  # at evaluation: side of the square that stays / shorter side; the network's own if not given
    )
    scale: tuple[float, float] = (0.08, 1.0)  # random resized crop: share of the area; above 1 it lies on black
    ratio: tuple[float, float] = (3 / 4, 4 / 3)  # random resized crop: width / height
    turn: float = 0.0  # degrees, at most, by which a picture is turned to either side
    flip: float = 0.5  # probability of a left-right flip; no effect where mirrored images change class
    seed: int = 0  # of the weights, the order and the crops

    def __post_init__(self) -> None:
        for name in ("epochs", "batch"):
            if getattr(self, name) < 1:
                raise ValueError(f"recipe.{name} {getattr(self, name)}: use 1 or more")
        if self.lr <= 0:
            raise ValueError(f"recipe.lr {self.lr}: use a number above 0")
        for name in ("momentum", "label_smoothing", "ema_decay"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"recipe.{name} {getattr(self, name)}: use a number from 0 up to but without 1")
        if self.weight_decay < 0 or self.seed < 0:
            raise ValueError(f"recipe.weight_decay {self.weight_decay}, recipe.seed {self.seed}: use 0 or more")
        if not 0 <= self.warmup_epochs < self.epochs:
            raise ValueError(
                f"recipe.warmup_epochs {self.warmup_epochs:g} leaves nothing of {self.epochs} epochs: "
                f"raise recipe.epochs or set recipe.warmup_epochs={self.epochs / 10:g}"
            )


# For a user's own folder. Ours: small steps and a short average suit a start from released weights; no claim yet.
FINETUNE = Recipe(epochs=20, batch=64, lr=0.02, weight_decay=1e-4, warmup_epochs=1, ema_decay=0.998, scale=(0.25, 1.0))

# For the embedded digits, 8 x 8 pixels shown at 32 x 32, from fresh weights. Ours. Claim: the tiny networks
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

RECIPES = {"finetune": FINETUNE, "digits": DIGITS}
