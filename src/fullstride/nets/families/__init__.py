"""Which networks are known by name? One file per family; `SPECS` holds them all."""

from fullstride.nets.families import genet, resnet, resnet_rs, tresnet

SPECS = {**tresnet.SPECS, **resnet_rs.SPECS, **genet.SPECS, **resnet.SPECS}
