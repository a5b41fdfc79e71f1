"""Initialises weights by the rule of each paper, or of its code."""

from torch import nn

from fullstride.nets.blocks import Block

CONVOLUTIONS = (nn.Conv2d, nn.Conv3d)
NORMS = (nn.BatchNorm2d, nn.BatchNorm3d)


def tresnet(net: nn.Module) -> None:
    """Convolutions N(0, 2 / fan_out), classifier N(0, 0.01^2), last gain of every block zero.

    Biases (of squeeze-and-excitation and of the classifier) have PyTorch's uniform default.
    Source: the code of TResNet, Alibaba-MIIL/TResNet@aea5f0f.
    """
    for layer in net.modules():
        if isinstance(layer, CONVOLUTIONS):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0, 0.01)
    zero_last_gains(net)


def resnet_rs(net: nn.Module) -> None:
    """Convolutions truncated normal with variance 1 / fan_in, classifier N(0, 0.01^2).

    Biases and the last gain of every block are zero.

    Source: the TPU code of ResNet-RS, tensorflow/tpu@7dc921f.
    """
    for layer in net.modules():
        if isinstance(layer, CONVOLUTIONS):
            fan_in = layer.weight[0].numel()
            # TensorFlow truncates at two standard deviations and corrects the variance for it.
            std = fan_in**-0.5 / 0.87962566103423978
            nn.init.trunc_normal_(layer.weight, 0, std, -2 * std, 2 * std)
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, 0, 0.01)
        if isinstance(layer, (*CONVOLUTIONS, nn.Linear)) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
    zero_last_gains(net)


def genet(net: nn.Module) -> None:
    """Convolutions and classifier N(0, 3.26^2 * 2 / (fan_in + fan_out)), biases zero.

    The paper (arXiv:2006.14090) names MSRA-PReLU, for which its repository has no code; the number
    is from the same authors' ZenNAS, idstcv/ZenNAS@d1d617e. All gains are one.
    """
    for layer in net.modules():
        if isinstance(layer, (*CONVOLUTIONS, nn.Linear)):
            nn.init.xavier_normal_(layer.weight, gain=3.26033)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)


def resnet(net: nn.Module) -> None:
    """Convolutions N(0, 2 / fan_out), classifier with PyTorch's uniform default.

    Source: arXiv:1502.01852, with fan_out as in the authors' and in torchvision's code.
    """
    for layer in net.modules():
        if isinstance(layer, CONVOLUTIONS):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")


def zero_last_gains(net: nn.Module) -> None:
    """Set the last gain of every branch to zero, so that every block starts as its shortcut."""
    for block in net.modules():
        if isinstance(block, Block):
            norms = [m for m in block.branch.modules() if isinstance(m, NORMS)]
            nn.init.zeros_(norms[-1].weight)
