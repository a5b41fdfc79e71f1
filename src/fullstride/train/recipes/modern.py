"""What are the recipes of recent public work? Each with its sources, and the accuracy it claims."""

from dataclasses import replace

from fullstride.train.recipe import Recipe

# ResNet strikes back, arXiv:2110.00476 Table 2: three procedures for ResNet-50. Common to them:
# batches of 2048, LAMB, cosine after 5 epochs of warmup, binary cross-entropy with every mixed
# class as a target, mixup or CutMix with alpha 1 in each batch, rand-m7-mstd0.5-inc1 in timm's
# form, evaluation at 224 with a crop of 0.95, and no average. From the authors' arguments of timm's
# train.py: targets are those above 0.2, the loss is the mean over classes, and biases and norms do
# not decay; the random interpolation of the crop is its default. Warmup begins at 0 and not at
# 1e-4, and the cosine ends at 0 and not at 1e-6.

# The shorter of the two at 224 pixels. Claim: ResNet-50 79.8 %.
RSB_A2 = Recipe(
    epochs=300,
    batch=2048,
    lr=5e-3,
    optimizer="lamb",
    weight_decay=0.02,
    loss="bce",
    bce_reduction="mean",
    bce_threshold=0.2,
    label_smoothing=0.0,
    mixup=0.1,
    cutmix=1.0,
    drop_path=0.05,
    ema_decay=0.0,
    repeated_augmentation=3,
    rand_form="timm",
    rand_layers=2,
    rand_magnitude=7,
    rand_std=0.5,
    rand_increasing=True,
    rand_probability=0.5,
    random_kernel=True,
    resolution=224,
    crop=0.95,
)

# The longest, with label smoothing, more mixup and less weight decay. Claim: ResNet-50 80.4 %.
RSB_A1 = replace(RSB_A2, epochs=600, weight_decay=0.01, label_smoothing=0.1, mixup=0.2)

# The shortest: 160 pixels in training, no stochastic depth, no repeated augmentation, magnitude 6.
# Claim: ResNet-50 78.1 %.
RSB_A3 = replace(
    RSB_A2,
    epochs=100,
    lr=8e-3,
    drop_path=0.0,
    repeated_augmentation=1,
    rand_magnitude=6,
    train_resolution_ratio=160 / 224,
)

# torchvision's arguments: the decay of the average for one epoch of batches of one image, and the
# steps from one update to the next.
TORCHVISION_DECAY, TORCHVISION_STEPS = 0.99998, 32


def average_decay_per_step(decay: float, every: int, batch: int, epochs: float) -> float:
    """torchvision's decay of the average, as the equal one of an average that changes every step.

    Its train.py scales 1 - `decay` by batch x `every` / `epochs`, and updates every `every` steps.
    """
    return (1 - min(1.0, (1 - decay) * batch * every / epochs)) ** (1 / every)


# torchvision's second weights of ResNet-50 (pytorch.org/blog/
# how-to-train-state-of-the-art-models-using-torchvision-latest-primitives, and the arguments in
# pytorch/vision, references/classification): SGD without Nesterov momentum, 0.5 for batches of
# 1024, cosine after 5 epochs of warmup, weight decay 2e-5 but for norms, label smoothing, mixup or
# CutMix in each batch, TrivialAugment, random erasing with zeros of the normalised input, training
# at 176 pixels with 4 views of an image in an epoch, and evaluation at 224 of 232. The average
# starts after the warmup there, and here its decay warms up. Claim: ResNet-50 80.9 %.
TORCHVISION_600 = Recipe(
    epochs=600,
    batch=1024,
    lr=0.5,
    nesterov=False,
    weight_decay=2e-5,
    decay_on="all_but_norms",
    label_smoothing=0.1,
    mixup=0.2,
    cutmix=1.0,
    ema_decay=average_decay_per_step(TORCHVISION_DECAY, TORCHVISION_STEPS, 1024, 600),
    repeated_augmentation=4,
    trivial_augment=True,
    random_erasing_prob=0.1,
    random_erasing_fill="mean",
    resolution=224,
    train_resolution_ratio=176 / 224,
    crop=224 / 232,
)
