"""The recipes of the papers, with their sources and the accuracy that they claim."""

from dataclasses import replace
from typing import Literal

from fullstride.train.recipes.recipe import Recipe

# TResNet, arXiv:2003.13630 section 3.1: 300 epochs, SGD with 1-cycle, AutoAugment, Cutout, label
# smoothing, decoupled weight decay. Claim: TResNet-M 80.8 % at 224. 1-cycle moves the momentum from
# 0.95 to 0.85 and back, as its paper does (arXiv:1803.09820). The training code was not released:
# batch, learning rate, weight decay, the side of Cutout and the average are ours.
TRESNET = Recipe(
    epochs=300,
    batch_size=1024,
    lr=0.8,
    momentum=0.95,
    weight_decay=1e-4,
    decoupled_weight_decay=True,
    schedule="one_cycle",
    warmup_epochs=0,
    auto_augment=True,
    cutout=0.5,
    ema_decay=0.9999,
    resolution=224,
)

# The recipe for timm in TResNet's README: 8 GPUs x 190 images, lr 0.6, cosine, average,
# rand-m9-mstd0.5-inc1, mixup 0.2, random erasing 0.4. Claim: TResNet-M 80.5 %. The decay of the
# average and the random interpolation are the defaults of timm's train.py. Weight decay and warmup
# are ours.
TRESNET_TIMM = Recipe(
    epochs=300,
    batch_size=1520,
    lr=0.6,
    weight_decay=2e-5,
    mixup=0.2,
    random_erasing_prob=0.4,
    ema_decay=0.9998,
    random_kernel=True,
    rand_form="timm",
    rand_layers=2,
    rand_magnitude=9,
    rand_increasing=True,
    rand_std=0.5,
    rand_probability=0.5,
    resolution=224,
)

# Fine-tuning at 448 pixels (arXiv:2003.13630): 10 epochs; images are squished to a square for
# evaluation, as in the authors' code. Claim: TResNet-M 83.2 %. All other numbers are ours.
TRESNET_448 = replace(
    TRESNET, epochs=10, batch_size=256, lr=0.02, resolution=448, fit="squish", crop=1.0
)

# Transfer to smaller data sets (arXiv:2003.13630 section 4, Table 7): 80 epochs, 1-cycle; CIFAR is
# resized to 224 pixels. Claims, from ImageNet's weights: CIFAR-10 99.0 %, CIFAR-100 91.5 %. Batch,
# learning rate, the average and the augmentation are not stated and are ours.
TRESNET_TRANSFER = replace(
    TRESNET, epochs=80, batch_size=128, lr=0.05, auto_augment=False, cutout=0.0, ema_decay=0.999
)

# Transfer to Stanford Cars and Oxford Flowers, in the same section: weighted triplet loss with soft
# margin beside cross-entropy, 368 pixels. Claims: 96.0 % and 99.1 %. Images are squished to a
# square, by the authors' reply in issue 42 of their repository. The weight of the loss, the images
# per class and the layer of the embedding are not stated: ours, and the pooled features.
TRESNET_FINEGRAINED = replace(
    TRESNET_TRANSFER, triplet=1.0, per_class=4, resolution=368, fit="squish", crop=1.0
)

# Several labels on MS-COCO (arXiv:2003.13630 section 4.2): 448 pixels, and a focal loss with an
# exponent for either side. The paper gives no values; all are from the authors' later script
# (arXiv:2009.14119, github.com/Alibaba-MIIL/ASL): exponents 0 and 4, shift 0.05, no gradient
# through the powers; Adam with 1-cycle to 1e-4 for batches of 128 over 80 epochs, stopped after 40;
# average 0.9997, cutout 0.5, RandAugment, and whole images squished to a square, here a crop of the
# whole area with any ratio. Their Adam adds the weight decay 1e-4 to gradients, ours is decoupled;
# the form and the strength of RandAugment are ours.
TRESNET_MULTILABEL = Recipe(
    epochs=80,
    batch_size=128,
    lr=1e-4,
    optimizer="adamw",
    weight_decay=1e-4,
    schedule="one_cycle",
    warmup_epochs=0,
    loss="focal",
    focal_gamma=0.0,
    task_options={
        "focal_gamma_negative": 4.0,
        "focal_shift": 0.05,
        "focal_weight_gradient": False,
    },
    label_smoothing=0.0,
    ema_decay=0.9997,
    scale=(1.0, 1.0),
    ratio=(0.01, 100.0),
    hflip_prob=0.0,
    cutout=0.5,
    rand_layers=2,
    rand_magnitude=9,
    resolution=448,
    fit="squish",
    crop=1.0,
)

# Detection on MS-COCO by FCOS with ATSS (arXiv:2003.13630 section 4.2, Table 10): 70 epochs, SGD
# with momentum 0.9, weight decay 1e-4, batches of 24, learning rate 0.01 after a warmup, times 0.1
# from epoch 40 and again from epoch 60. Claim: 44.0 AP of TResNet-M, 42.8 of ResNet-50. The
# augmentation is cited from a reference that our text lacks, by its place in the alphabet SSD
# (arXiv:1512.02325). Not stated are image size (ours), length of the warmup (500 steps, as usual),
# weight of the box loss (ATSS's, arXiv:1912.02424), which items of ATSS were used, and whether
# batch norms were frozen.
TRESNET_FCOS = Recipe(
    epochs=70,
    batch_size=24,
    lr=0.01,
    nesterov=False,
    weight_decay=1e-4,
    schedule="steps",
    milestones=(40 / 70, 60 / 70),
    warmup_epochs=0.1,
    label_smoothing=0.0,
    ema_decay=0.0,
    task_options={"box_augmentation": "ssd"},
    resolution=800,
)

# The baseline of ResNet-RS's additive study, arXiv:2103.07579 Table 1: 90 epochs, step schedule,
# weight decay 1e-4. Learning rate (0.1 x batch / 256), batch, and decay of all parameters but those
# of batch norms are from its TPU code.
RESNET = Recipe(
    epochs=90,
    batch_size=4096,
    lr=1.6,
    weight_decay=1e-4,
    decay_on="all_but_norms",
    schedule="steps",
    label_smoothing=0.0,
    ema_decay=0.0,
    resolution=256,
)

# The rows of that table, each on top of the previous one. The last two of the paper,
# squeeze-and-excitation and ResNet-D, change the network and not the recipe. RandAugment is what
# the TPU code computes, see data/transforms/policies.py.
STUDY_COSINE = replace(RESNET, schedule="cosine")
STUDY_LONGER = replace(STUDY_COSINE, epochs=350)
STUDY_AVERAGE = replace(STUDY_LONGER, ema_decay=0.9999)
STUDY_SMOOTHING = replace(STUDY_AVERAGE, label_smoothing=0.1)
STUDY_DROP_PATH = replace(STUDY_SMOOTHING, drop_path=0.1, drop_path_by="stage")
STUDY_RAND_AUGMENT = replace(STUDY_DROP_PATH, rand_form="tpu", rand_layers=2, rand_magnitude=15)
STUDY_DROPOUT = replace(STUDY_RAND_AUGMENT, dropout=0.25)
STUDY_DECAY = replace(STUDY_DROPOUT, weight_decay=4e-5)


def resnet_rs(depth: int, resolution: int) -> Recipe:
    """ResNet-RS's recipe for one size (arXiv:2103.07579): more regularization for larger networks.

    The numbers are from the configuration files of its TPU code, the schedule is the paper's.
    Running statistics are the last batch's (momentum 0 there), which the average smooths.
    """
    return replace(
        STUDY_DECAY,
        bn_momentum=1.0,
        resolution=resolution,
        rand_magnitude=10 if resolution == 160 else 15,
        drop_path=0.1 if depth >= 200 else 0.0,
        dropout=0.4 if resolution == 320 else 0.25,
    )


# Depth and resolution of the networks in the paper's Table 7.
RESNET_RS_SIZES = (
    (50, 160), (101, 160), (101, 192), (152, 192), (152, 224), (152, 256),
    (200, 256), (270, 256), (350, 256), (350, 320), (420, 320),
)  # fmt: skip


# Semi-supervised ResNet-RS (arXiv:2103.07579 Table 4): Noisy Student with 130 million
# pseudo-labelled images of JFT beside ImageNet; all hyperparameters of the supervised recipe are
# kept. Claim: ResNet-RS-152 at 224 pixels 86.2 %, from the labels of EfficientNet-L2 (88.4 %). The
# ratio is not stated: 3 is from Noisy Student's scripts for EfficientNet-B1 to B7 (1 for B0), like
# the threshold .3 and the 130,000 images per class (arXiv:1911.04252). --recipe.unlabelled names
# the images without labels.
RESNET_RS_NOISY_STUDENT = replace(
    resnet_rs(152, 224),
    unlabelled_ratio=3.0,
    unlabelled_min_confidence=0.3,
    unlabelled_per_class=130_000,
)

# Segmentation on PASCAL VOC 2012 (arXiv:2103.07579 Table 5 and appendix F): 512 pixels, scale
# jitter [0.5, 2], batches of 64, cosine schedule, weight decay 1e-4; the head of arXiv:2006.06882
# with 256 channels, on ImageNet's weights. Steps and learning rate were searched there and are not
# stated: ours, like warmup and the lack of an average.
RESNET_RS_VOC_SEG = replace(
    RESNET,
    epochs=120,
    steps=20_000,
    batch_size=64,
    lr=0.08,
    schedule="cosine",
    warmup_epochs=2,
    task_options={"jitter": (0.5, 2.0)},
    resolution=512,
)

# Detection on PASCAL VOC 2007 and 2012 (the same table): 896 pixels, scale jitter [0.5, 2], batches
# of 32, cosine schedule, weight decay 1e-4; Faster R-CNN over P3 to P7, whose box head has four
# convolutions and one fully connected layer. 5,000 to 20,000 steps and learning rates of 0.005 to
# 0.32 were searched there, and the best are not stated; the limit of the gradients is ours.
RESNET_RS_VOC = replace(
    RESNET_RS_VOC_SEG,
    batch_size=32,
    lr=0.04,
    resolution=896,
    clip_norm=10.0,
).with_task_options({"detector": "faster_rcnn"})

# Depth on NYUv2 (the same table): 640 pixels, scale jitter [0.5, 2], batches of 64, 10,000 to
# 40,000 steps. The loss, the limit of depths, the learning rate and the steps are not stated: ours,
# with the sensor's limit.
RESNET_RS_NYU_DEPTH = replace(RESNET_RS_VOC_SEG, lr=0.04, resolution=640).with_task_options(
    {"max_depth": 10.0}
)

# The baseline of the additive study of clips, arXiv:2103.07579 Table 6: 3D ResNet-50 on
# Kinetics-400, clips of 32 frames, every second one of a video. Batch, learning rate
# (0.2 x batch / 256), cosine schedule, warmup (1,050 steps) and the ratios of crops are from the
# last row's file in tensorflow/models, k400_resnet3drs_50_tpu.yaml. Epochs, weight decay, and the
# area of crops before scale jitter are not stated: ours. The same parameters decay as in the study
# of images.
RESNET3D = replace(
    RESNET,
    epochs=200,
    batch_size=1024,
    lr=0.8,
    schedule="cosine",
    scale=(0.49, 1.0),
    ratio=(0.5, 2.0),
    resolution=224,
)

# The rows of that table, each on top of the previous one; the numbers are from the same file, and
# the order was not compared with the paper. The last two rows change the network, not the recipe:
# squeeze-and-excitation (resnet3d_se_50) and ResNet-D (resnet3d_rs_50).
RESNET3D_DROPOUT = replace(RESNET3D, dropout=0.5)
RESNET3D_SMOOTHING = replace(RESNET3D_DROPOUT, label_smoothing=0.1)
RESNET3D_DROP_PATH = replace(RESNET3D_SMOOTHING, drop_path=0.1, drop_path_by="stage")
RESNET3D_AVERAGE = replace(RESNET3D_DROP_PATH, ema_decay=0.9999)
RESNET3D_DECAY = replace(RESNET3D_AVERAGE, weight_decay=4e-5)
RESNET3D_LONGER = replace(RESNET3D_DECAY, epochs=350)
RESNET3D_JITTER = replace(RESNET3D_LONGER, scale=(0.08, 1.0))

# The file itself. Claim: 78.2 % of resnet3d_rs_50 by the mean over 30 views at 256 pixels. Running
# statistics are the last batch's (momentum 0 there), which the average smooths.
RESNET3D_RS = replace(RESNET3D_JITTER, bn_momentum=1.0)

# Rate of dropout by multiplier of the width: Table 12 of arXiv:2103.07579.
DROPOUT_BY_WIDTH = ((0.25, 0.0), (0.5, 0.1), (1.0, 0.25), (1.5, 0.6), (2.0, 0.75))


def scaling(epochs: Literal[10, 100, 350], width: float = 1.0, resolution: int = 224) -> Recipe:
    """ResNet-RS's scaling study (arXiv:2103.07579 section 6, appendix E) in one of three regimes.

    At 10 and 100 epochs: weight decay 4e-5, neither label smoothing nor RandAugment; one epoch of
    warmup for 10, and the average for 100, are ours. At 350 epochs: label smoothing 0.1 and, by
    width and resolution, RandAugment of 2 layers with magnitude 10, 15 or 20, stochastic depth and
    dropout. A width between two widths of Table 12 has the dropout of the larger; between 160 and
    224 pixels the magnitude is 10.
    """
    if epochs == 10:
        return replace(
            STUDY_COSINE, epochs=10, warmup_epochs=1, weight_decay=4e-5, resolution=resolution
        )
    if epochs == 100:
        return replace(STUDY_AVERAGE, epochs=100, weight_decay=4e-5, resolution=resolution)
    is_small = width <= 0.5 or resolution < 224
    return replace(
        STUDY_DECAY,
        resolution=resolution,
        dropout=next((rate for most, rate in DROPOUT_BY_WIDTH if width <= most), 0.75),
        rand_magnitude=10 if is_small else 15 if resolution <= 320 else 20,
        drop_path=0.2 if width > 0.25 and resolution >= 224 else 0.0,
    )


# GENet, arXiv:2006.14090 section 5: 480 epochs, SGD with Nesterov momentum, lr 0.1 per 256 images,
# cosine, label smoothing, mixup, random erasing, AutoAugment, and distillation from a ResNet-152
# with a weight of one half. Claims: 75.7, 80.0 and 81.3 %. Alpha of mixup, the probability of
# random erasing, the batch and the average are ours.
GENET = Recipe(
    epochs=480,
    batch_size=1024,
    lr=0.4,
    mixup=0.2,
    random_erasing_prob=0.2,
    auto_augment=True,
    teacher="resnet152",
    teacher_share=0.5,
)

# Training of the candidates in GENet's search: 120 epochs. The paper ties label smoothing, mixup,
# random erasing and AutoAugment to the final 480 epochs, and names no teacher.
GENET_NAS = replace(
    GENET,
    epochs=120,
    label_smoothing=0.0,
    mixup=0.0,
    random_erasing_prob=0.0,
    auto_augment=False,
    teacher="",
)

# Recent public work.

# ResNet strikes back, arXiv:2110.00476 Table 2: three procedures for ResNet-50. Common to them:
# batches of 2048, LAMB, cosine after 5 epochs of warmup, binary cross-entropy with every mixed
# class as a target, mixup or CutMix with alpha 1 in each batch, rand-m7-mstd0.5-inc1 in timm's
# form, evaluation at 224 with a crop of 0.95, and no average. From the authors' arguments of timm's
# train.py: targets above 0.2 count, the loss is the mean over classes, and biases and norms do
# not decay; the random interpolation of the crop is its default. Warmup begins at 0 and not at
# 1e-4, and the cosine ends at 0 and not at 1e-6.

# The shorter of the two at 224 pixels. Claim: ResNet-50 79.8 %.
RSB_A2 = Recipe(
    epochs=300,
    batch_size=2048,
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
# steps between updates.
TORCHVISION_DECAY, TORCHVISION_STEPS = 0.99998, 32


def average_decay_per_step(decay: float, every: int, batch: int, epochs: float) -> float:
    """torchvision's decay of the average, converted to an update in every step.

    torchvision's train.py scales 1 - `decay` by batch x `every` / `epochs`, and updates every
    `every` steps.
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
    batch_size=1024,
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
