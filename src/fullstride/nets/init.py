"""What are the weights before training? One function for each way that a paper or its code has it."""

import torch
from torch import nn

from fullstride.nets.blocks import Block


def tresnet(net: nn.Module) -> None:
    """Convolutions normal with variance 2 / fan_out, classifier N(0, 0.01), last gain of every block zero.

    Biases (of squeeze-and-excitation and of the classifier) keep PyTorch's uniform draw.
    Source: the code of TResNet, Alibaba-MIIL/TResNet@aea5f0f.
    """
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0, 0.01)
    zero_last_gains(net)


def resnet_rs(net: nn.Module) -> None:
    """Convolutions truncated normal with variance 1 / fan_in, classifier N(0, 0.01), biases zero, last gains zero.

    Source: the TPU code of ResNet-RS, tensorflow/tpu@7dc921f.
    """
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            fan_in = layer.weight[0].numel()
            # TensorFlow cuts at two standard deviations and divides by what the cut takes from the spread.
            std = fan_in**-0.5 / 0.87962566103423978
            nn.init.trunc_normal_(layer.weight, 0, std, -2 * std, 2 * std)
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0, 0.01)
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
    zero_last_gains(net)


def genet(net: nn.Module) -> None:
    """Normal with variance 3.26^2 * 2 / (fan_in + fan_out) for convolutions and classifier, biases zero.

    The paper (arXiv:2006.14090) names MSRA-PReLU and its repository has no such code; the number is
    from the same authors' ZenNAS, idstcv/ZenNAS@d1d617e. Gains start at one, also the last of a block.
    """
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.xavier_normal_(layer.weight, gain=3.26033)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def resnet(net: nn.Module) -> None:
    """Convolutions normal with variance 2 / fan_out; the classifier keeps PyTorch's uniform draw.

    Source: arXiv:1502.01852, with fan_out as in the authors' and in torchvision's code.
    """
    for layer in net.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def zero_last_gains(net: nn.Module) -> None:
    """Let every block begin as its shortcut: the gain of the branch's last batch norm is zero."""
    for block in net.modules():
        if isinstance(block, Block):
            last = [layer for layer in block.branch.modules() if isinstance(layer, nn.BatchNorm2d)][
                -1
            ]
            with torch.no_grad():
                last.weight.zero_()
