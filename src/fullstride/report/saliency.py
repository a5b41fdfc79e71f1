"""Shows which part of a picture decided a network's class."""

from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from fullstride.deploy.predict import inputs
from fullstride.nets.bundle import Bundle

HEAT = (213, 94, 0)  # vermilion of Okabe and Ito, also seen by the colour-blind
STRONGEST = 0.8  # share of the heat's colour where the map is 1


def grad_cam(net: nn.Module, x: Tensor, class_n: Sequence[int]) -> np.ndarray:
    """The parts of each image that speak for a class, (N, C, H, W) -> (N, h, w) in 0..1.

    Each channel of the network's last map is weighted by the mean gradient of the class's logit,
    and negative values of the sum become 0. An image without positive values has zeros.

    Source: Grad-CAM, arXiv:1610.02391.
    """
    maps: list[Tensor] = []

    def keep_map(module: nn.Module, arguments: object, output: object) -> None:
        if isinstance(output, Tensor) and output.dim() == 4 and output.shape[-1] > 1:
            maps[:] = [output]

    hooks = [module.register_forward_hook(keep_map) for module in net.modules()]
    try:
        with torch.enable_grad():
            logits_nk = net.eval()(x.clone().requires_grad_())
    finally:
        for hook in hooks:
            hook.remove()
    chosen = logits_nk[torch.arange(len(x)), torch.as_tensor(class_n)].sum()
    (gradient,) = torch.autograd.grad(chosen, maps)
    cam = (maps[0] * gradient.mean((2, 3), keepdim=True)).sum(1).relu().detach()
    return (cam / cam.amax((1, 2), keepdim=True).clamp_min(1e-12)).float().numpy()


def heated(view: np.ndarray, heat: np.ndarray) -> np.ndarray:
    """Colour a grey picture, uint8 (H, W, C), where the map (h, w) is high: uint8 (H, W, 3)."""
    h, w, _ = view.shape
    share = np.asarray(Image.fromarray(heat).resize((w, h), Image.Resampling.BILINEAR))
    share = STRONGEST * share.clip(0, 1)[:, :, None]
    grey = view.mean(2, keepdims=True)
    return (grey + share * (np.array(HEAT) - grey)).round().astype(np.uint8)


def explained(
    bundle: Bundle, views: Sequence[np.ndarray], class_n: Sequence[int]
) -> list[np.ndarray]:
    """Draw `grad_cam` of a class over each of `views`, uint8 (H, W, C) inputs of a bundle."""
    pictures = []
    for x in inputs("normalised", bundle.preprocessing, views):
        start = len(pictures)
        part = slice(start, start + len(x))
        heat = grad_cam(bundle.net, torch.from_numpy(x), class_n[part])
        pictures += map(heated, views[part], heat)
    return pictures
