"""What is a number over all processes that train together? Its mean, for the loss of each."""

import torch
import torch.distributed as dist
from torch import Tensor


@torch.no_grad()
def mean_over_processes(value: Tensor) -> Tensor:
    """The mean over the processes of a tensor that each has, in its shape and without gradients.

    A sum of losses / the mean of their numbers is what each process minimises: gradients are
    averaged, and are then those of the mean over all. All processes must call it.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return value.detach()
    total = value.detach().clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()
