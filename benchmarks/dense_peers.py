"""How good are the detectors and segmenters of others, on the same batches for as many steps?

Each is over the same backbone, a ResNet of timm with 0.37 M parameters, and trained from the same
kind of random weights by the recipe's optimizer, learning rates and weight average. Loss,
assignment and post-processing are their own, with the thresholds of the task.
"""

from collections import OrderedDict
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torchvision.models.detection import FCOS, FasterRCNN
from torchvision.models.detection.anchor_utils import AnchorGenerator
from torchvision.models.detection.faster_rcnn import FastRCNNPredictor, TwoMLPHead
from torchvision.ops import FeaturePyramidNetwork, MultiScaleRoIAlign
from torchvision.ops.feature_pyramid_network import LastLevelP6P7

from fullstride.data.dataset import DataSet
from fullstride.nets.preprocessing import Preprocessing
from fullstride.tasks.task import Task
from fullstride.train.averages import Average
from fullstride.train.batches import BatchOptions, recipe_in_epochs, training_batches
from fullstride.train.optimizer import build_optimizer, lr_at
from fullstride.train.recipes.recipe import Recipe

BACKBONE = "test_resnet"
DETECTIONS, MIN_SCORE, NMS = 100, 0.05, 0.6
FULL_CLASSIFIER = 256  # channels of Faster R-CNN's head, which has 1,024 over 256 of the pyramid


class BackbonePyramid(nn.Module):
    """Images -> P3 to P7 by name."""

    def __init__(self, width: int):
        super().__init__()
        self.net = timm.create_model(BACKBONE, features_only=True, out_indices=(2, 3, 4))
        channels = self.net.feature_info.channels()
        self.levels = FeaturePyramidNetwork(channels, width, LastLevelP6P7(width, width))
        self.out_channels = width

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return self.levels(OrderedDict((str(i), each) for i, each in enumerate(self.net(x))))


class Detector(nn.Module):
    """A detector of torchvision with the loss and the outputs of the task detect."""

    def __init__(self, detector: nn.Module, first_label: int):
        super().__init__()
        self.detector, self.first_label = detector, first_label

    def loss(self, x: Tensor, targets: list[dict[str, Tensor]]) -> Tensor:
        boxes = [
            {"boxes": each["boxes"], "labels": each["labels"] + self.first_label}
            for each in targets
        ]
        return torch.stack([*self.detector(list(x), boxes).values()]).sum()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.new_zeros(len(x), DETECTIONS, 6)
        rows[..., 5] = -1
        for row, each in zip(rows, self.detector(list(x)), strict=True):
            count = len(each["boxes"])
            row[:count, :4], row[:count, 4] = each["boxes"], each["scores"]
            row[:count, 5] = each["labels"] - self.first_label
        return rows


def as_is(side: int) -> dict[str, Any]:
    """Torchvision's own preprocessing switched off: images come normalised, of one size."""
    return dict(min_size=side, max_size=side, image_mean=[0.0] * 3, image_std=[1.0] * 3)


def torchvision_fcos(classes: int, width: int, side: int) -> nn.Module:
    limits = dict(score_thresh=MIN_SCORE, nms_thresh=NMS, detections_per_img=DETECTIONS)
    return Detector(FCOS(BackbonePyramid(width), classes, **limits, **as_is(side)), 0)


def torchvision_faster_rcnn(classes: int, width: int, side: int) -> nn.Module:
    anchors = AnchorGenerator(tuple((2**i,) for i in range(5, 10)), ((0.5, 1.0, 2.0),) * 5)
    rcnn = FasterRCNN(
        BackbonePyramid(width),
        rpn_anchor_generator=anchors,
        box_roi_pool=MultiScaleRoIAlign(["0", "1", "2"], 7, 2),
        box_head=TwoMLPHead(49 * width, FULL_CLASSIFIER),
        box_predictor=FastRCNNPredictor(FULL_CLASSIFIER, classes + 1),
        box_score_thresh=MIN_SCORE,
        box_detections_per_img=DETECTIONS,
        **as_is(side),
    )
    return Detector(rcnn, 1)


class Segmenter(nn.Module):
    """The FPN of segmentation_models_pytorch with the loss of the task."""

    def __init__(self, classes: int, width: int, task: Task, finish: Callable[[Tensor], Tensor]):
        super().__init__()
        import segmentation_models_pytorch as smp

        widths = dict(decoder_pyramid_channels=width, decoder_segmentation_channels=width)
        self.net = smp.FPN(f"tu-{BACKBONE}", encoder_weights=None, classes=classes, **widths)
        self.task, self.finish = task, finish

    def loss(self, x: Tensor, targets: Tensor) -> Tensor:
        return self.task.loss(self.net(x), targets)

    def forward(self, x: Tensor) -> Tensor:
        return self.finish(self.net(x))


def peers(task: Task, classes: int, width: int, side: int) -> Mapping[str, Callable[[], Any]]:
    """The networks of others for a task, by the names of their rows."""
    if task.name == "detect":
        return {
            "torchvision FCOS": lambda: torchvision_fcos(classes, width, side),
            "torchvision Faster R-CNN": lambda: torchvision_faster_rcnn(classes, width, side),
        }
    if not find_spec("segmentation_models_pytorch"):
        print("segmentation_models_pytorch is not installed, and has no row")
        return {}
    finish = torch.exp if task.name == "depth" else nn.Identity()
    return {"segmentation_models_pytorch FPN": lambda: Segmenter(classes, width, task, finish)}


def train_peer(
    build: Callable[[], Any], data: DataSet, task: Task, pre: Preprocessing, recipe: Recipe
) -> nn.Module:
    """The averaged network after the recipe's steps, in evaluation mode."""
    torch.manual_seed(recipe.seed)
    net, batches = build().train(), training_batches(data, task, BatchOptions(pre), recipe)
    recipe = recipe_in_epochs(data, recipe)
    optimizer, average = build_optimizer(net, recipe), Average(net, recipe.ema_decay)
    steps = round(recipe.epochs * len(batches))
    for step in range(steps):
        epoch, index = divmod(step, len(batches))
        if not index:
            source = batches.epoch(epoch)
        x, targets, _ = next(source)
        for group in optimizer.param_groups:
            group["lr"] = lr_at((step + 1) / len(batches), recipe)
        optimizer.zero_grad()
        net.loss(x, targets).backward()
        if recipe.clip_norm:
            nn.utils.clip_grad_norm_(net.parameters(), recipe.clip_norm)
        optimizer.step()
        average.update(step)
    return average.net.eval()
