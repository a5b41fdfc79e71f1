"""What does a teacher say of the same images? Another network's probabilities, to be learned from."""

from typing import cast

import torch
from torch import Tensor, nn

from fullstride.nets.bundle import Bundle
from fullstride.nets.preprocessing import Preprocessing


class Teacher(nn.Module):
    """A trained network that sees what the student sees: (N, C, H, W) as the student's input -> (N, K) probabilities.

    Images are brought from the student's mean and deviation to the teacher's own.
    """

    def __init__(self, bundle: Bundle, student: Preprocessing):
        super().__init__()
        self.net = bundle.net.eval().requires_grad_(False)
        own, pre = bundle.preprocessing, student

        def per_channel(values: tuple[float, ...]) -> Tensor:
            return torch.tensor(values).view(-1, 1, 1)

        scale = per_channel(pre.std) / per_channel(own.std)
        shift = (per_channel(pre.mean) - per_channel(own.mean)) / per_channel(own.std)
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", shift, persistent=False)

    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x * cast(Tensor, self.scale) + cast(Tensor, self.shift)).float().softmax(1)


def fitting_teacher(bundle: Bundle, name: str, classes: tuple[str, ...], student: Preprocessing) -> Teacher:
    """Raises ValueError, in one line, for a teacher of other classes or other image channels.

    Weights from elsewhere may call the same classes otherwise, so names decide only where they are the same ones
    in another order.
    """
    theirs = bundle.classes
    if len(theirs) != len(classes) or (theirs != classes and set(theirs) == set(classes)):
        shown = [f"{len(names)} ({', '.join(names[:3])}, ...)" for names in (theirs, classes)]
        raise ValueError(f"the teacher {name} knows the classes {shown[0]}, the images have {shown[1]}: take another")
    if bundle.preprocessing.channels != student.channels:
        raise ValueError(
            f"the teacher {name} takes {bundle.preprocessing.channels} image channels, the student "
            f"{student.channels}: take another"
        )
    return Teacher(bundle, student)
