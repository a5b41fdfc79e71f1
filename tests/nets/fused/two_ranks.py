"""Two processes share the statistics of a batch, half each, for a test that reads the results."""

import sys
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from fullstride.nets.families import SPECS
from fullstride.nets.fused.network import to_fused
from fullstride.nets.network import Network


def main(out: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    found = {}
    for name in ("tresnet_tiny", "resnet_rs_tiny", "genet_tiny"):
        torch.manual_seed(0)
        net = Network(replace(SPECS[name], classes=7)).double()
        for norm in net.modules():
            if isinstance(norm, nn.BatchNorm2d):
                nn.init.uniform_(norm.weight, 0.5, 1.5)
        x = torch.rand(6, 3, 32, 32, dtype=torch.float64)
        share = (
            x[:4] if dist.get_rank() == 0 else x[4:]
        )  # uneven: statistics are of values, not of processes
        lean = DistributedDataParallel(to_fused(net, dist.group.WORLD))
        y = lean(share)
        (y.sin().sum() * 2).backward()  # DDP halves the sum
        gradients = [p.grad for p in net.parameters()]
        found[name] = (y.detach(), gradients, list(net.buffers()))
    torch.save(found, f"{out}.{dist.get_rank()}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
