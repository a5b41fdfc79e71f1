"""Which network does training begin with? A new one, or one with the weights of another run."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import nn

from fullstride.console import print_note
from fullstride.data.dataset import DataSet
from fullstride.nets import fused_form, zoo
from fullstride.nets.backbone import Backbone, Spec
from fullstride.nets.bundle import Bundle, copy_weights, reorder_outputs
from fullstride.nets.class_names import permutation
from fullstride.nets.load_options import LoadOptions, WeightsKind
from fullstride.nets.preprocessing import Preprocessing
from fullstride.nets.timm_wrapper import TimmNetwork
from fullstride.nets.weights.text import first_ten
from fullstride.tasks import build_head
from fullstride.tasks.task import Task
from fullstride.train.recipe import Recipe


def network_to_train(
    model: str,
    task: Task,
    data: DataSet,
    recipe: Recipe,
    start: Bundle | None,
    width: float = 1.0,
    depth: float = 1.0,
) -> tuple[Spec, Backbone, Preprocessing]:
    """The spec of `initial_network` as it is saved, the network as it trains, and the pixels.

    The network has the regularisation of the recipe and, where it says so, padded channels.
    """
    net, pre = initial_network(model, task, data, recipe, start, width, depth)
    net.regularise(drop_path=recipe.drop_path, by=recipe.drop_path_by, dropout=recipe.dropout)
    return net.spec, fused_form.padded(net, model) if recipe.pad_channels else net, pre


def initial_weights(
    model: str, weights: str, weights_kind: WeightsKind = "averaged"
) -> Bundle | None:
    """The bundle whose weights training of `model` begins with; None for random ones.

    A network of clips may begin with those of one of images, so a file may be of any network.
    """
    if not weights:
        return None
    options = LoadOptions(weights_kind=weights_kind)
    name = None if zoo.spec(model).frames else model
    return zoo.load(model if weights == "hub" else weights, name, build_head, options)


def initial_network(
    model: str,
    task: Task,
    data: DataSet,
    recipe: Recipe,
    start: Bundle | None = None,
    width: float = 1.0,
    depth: float = 1.0,
) -> tuple[Backbone, Preprocessing]:
    """The network before training, with random weights or those of `start`, and its preprocessing.

    A classifier for the same classes in another order is put in the order of the data. The
    resolution is that of the recipe, or else that of `start` or the network's own.
    `width` and `depth` multiply those of `model`. Gray images are read as RGB, with three equal
    channels, where the weights of `start` take RGB.
    """
    check_input(model, task)
    resolution = recipe.resolution or (start and start.preprocessing.resolution)
    frames = (recipe.frames or (start and start.preprocessing.frames)) if task.takes_clips else 0
    channels = max(data.channels, start.preprocessing.channels) if start else data.channels
    torch.manual_seed(recipe.seed)
    net = zoo.create(
        model,
        classes=len(data.classes),
        in_channels=channels,
        width=width,
        depth=depth,
        resolution=resolution,
        frames=frames or None,
    )
    if isinstance(net, TimmNetwork):  # before there is a folder, which the next try would resume
        net.check_size(net.spec.resolution, net.spec.resolution)
    net.task_head = task.with_options(recipe).head(net)
    if net.task_head is not None and recipe.pad_channels:
        raise ValueError(
            f"recipe.pad_channels: the head of the task {task.name} cannot be padded: leave it out"
        )
    own = pre = zoo.family_preprocessing(net.spec)
    if start is None and isinstance(net, TimmNetwork):
        zero_classifiers(net)
    if start:
        outputs = permutation(start.classes, data.classes) if task.single_label else None
        left = copy_weights(start.net, net)
        new = [name for name in left if name.startswith(net.classifiers)]
        other = [name for name in left if name not in new and not name.startswith("task_head.")]
        if is_inflated(start.net.spec, net.spec, left):
            what = f"; new: {first_ten(other)}" if other else ""
            print_note(f"{start.name}, of images, begins the middle frames of all kernels{what}")
        elif other:
            raise ValueError(
                f"{start.name} does not begin {model} with {channels} input channels: "
                f"{other[0]} differs and {len(other) - 1} more; give weights of the same network"
            )
        if outputs:
            reorder_outputs(net, outputs)
        elif new:
            zero_classifiers(net)
        pre = start.preprocessing
    return net, replace(
        pre,
        resolution=net.spec.resolution,
        crop=pre.crop if recipe.crop is None else recipe.crop,
        fit=recipe.fit or task.view_fit or pre.fit,
        draft=recipe.draft is not False,
        frames=net.spec.frames,
        frame_stride=recipe.frame_stride or (pre if pre.frames else own).frame_stride,
    )


@torch.no_grad()
def zero_classifiers(net: Backbone) -> None:
    """Let a new classifier begin with weights and biases of 0, so that the first loss is ln K.

    timm draws those of EfficientNet-like networks from +-1 / sqrt(K), a deviation of 0.41 for two
    classes: the first loss is 2.7 in place of 0.69, and the first steps undo it through the whole
    network. Zeros are of arXiv:1912.11370, section 3.3; no gradient reaches the layers below before
    the classifier has changed.
    """
    for path in net.classifiers:
        for layer in net.get_submodule(path).modules():
            if isinstance(layer, nn.Linear | nn.Conv2d):
                for parameter in layer.parameters():
                    parameter.zero_()


def is_inflated(images: Spec, clips: Spec, left: Sequence[str]) -> bool:
    """Whether weights of images began all blocks of a network of clips, but for those in `left`."""
    has_blocks = not any(".branch.conv" in name or ".project." in name for name in left)
    same_channels = images.in_channels == clips.in_channels
    return clips.frames > 0 == images.frames and same_channels and has_blocks


def check_input(model: str, task: Task) -> None:
    """Raises ValueError for a network of images and a task of clips, and the other way round."""
    takes_clips = zoo.spec(model).frames > 0
    if takes_clips and not task.takes_clips:
        raise ValueError(
            f"{model} takes clips, and the task {task.name} has images: use --task video, or a "
            "network of images"
        )
    if task.takes_clips and not takes_clips:
        raise ValueError(
            f"{model} takes images, and the task {task.name} has clips: use a network of clips, "
            "such as resnet3d_rs_50"
        )
