"""Compiles networks for training with activation recomputation, where that is safe.

torch.compile can recompute cheap activations in the backward pass instead of saving them. It would
draw random masks a second time as well, and the gradients would be wrong without a warning
(observed with torch 2.11 and 2.15). Masks are therefore inputs of a network (`Network.draw`), and a
probe checks the installed torch before it is relied on.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fullstride.nets.network import Network

# Relative, of a gradient. Redrawn masks give 0.07, rounding gives 1e-16 (torch 2.11 to 2.15).
MAX_GRADIENT_ERROR = 1e-5
# Blocks from one saved result to the next. TResNet-M has 11 blocks in a row: two results are
# saved, and the backward pass holds at most three recomputed ones at once.
CHECKPOINT_EVERY = 4


def compile_for_training(net: nn.Module, *, dynamic: bool | None = None) -> Callable[..., Any]:
    """Compile `net` so that its backward pass recomputes all but convolutions and products.

    Random draws must be inputs: a network that draws inside its forward pass is compiled without
    recomputation and warns, and so is any network where `why_not_recompute` has a reason. Global
    settings of PyTorch are unchanged. A `Network` is compiled as one graph, or an error says why
    not.

    Args:
        net: A network in training mode.
        dynamic: As in torch.compile; False makes one graph for each input size.
    """
    reason = why_not_recompute(next(net.parameters()).device)
    if reason:
        warnings.warn(f"compiled without recomputation: {reason}", stacklevel=3)
    options = None if reason else recompute_options()
    is_whole = isinstance(net, Network)
    return torch.compile(net, fullgraph=is_whole, dynamic=dynamic, options=options)


def recompute_options() -> dict[str, Any]:
    """The options of torch.compile that select the recomputing partitioner."""
    return {"custom_partitioner_fn": RecomputePartitioner()}


class RecomputePartitioner(CustomPartitionerFn):
    """Cuts the joint graph into forward and backward pass so that few tensors are saved."""

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **settings: Any
    ) -> tuple[GraphModule, GraphModule]:
        nodes = [node for node in gm.graph.nodes if isinstance(node.target, OpOverload)]
        draws = any(torch.Tag.nondeterministic_seeded in node.target.tags for node in nodes)
        if draws:
            warnings.warn(
                "the network draws random numbers inside the compiled graph: recomputation is off",
                stacklevel=1,
            )
        for node in [*filter(is_expensive, nodes), *checkpoints(gm.graph)]:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        with torch._functorch.config.patch(aggressive_recomputation=not draws):
            return min_cut_rematerialization_partition(gm, joint_inputs, **settings)

    def uuid(self) -> bytes | None:
        return get_hash_for_files((__file__,))


def is_expensive(node: Node) -> bool:
    """Whether a node is no operator of PyTorch: what it costs to compute it twice is not known."""
    assert isinstance(node.target, OpOverload)
    return node.target.namespace not in ("aten", "prims")


def checkpoints(graph: Graph) -> list[Node]:
    """Every `CHECKPOINT_EVERY`-th block result in a row of blocks with identity shortcuts: saved.

    The result of such a block is cheap to recompute from the result before. Without checkpoints,
    the backward pass would recompute the last result from all others and hold them in memory.
    """
    previous = residual_blocks(graph)
    position: dict[Node, int] = {}  # in its row, from 0
    for node in graph.nodes:
        if node in previous:
            before = previous[node]
            position[node] = 0 if before is None else position[before] + 1
    return [node for node, number in position.items() if number and number % CHECKPOINT_EVERY == 0]


def residual_blocks(graph: Graph) -> dict[Node, Node | None]:
    """The end relu(branch + shortcut) of each residual block -> the end of its identity shortcut.

    The value is None where the shortcut is no earlier block.
    """
    ends: dict[Node, Node | None] = {}
    for node in graph.nodes:
        total = without_casts(node.args[0]) if node.target is torch.ops.aten.relu.default else None
        if total and total.target is torch.ops.aten.add.Tensor:
            terms = [term for term in total.args if isinstance(term, Node)]
            # A batch norm adds its bias, which is smaller.
            if all(term.meta["val"].shape == node.meta["val"].shape for term in terms):
                shortcuts = [term for term in map(without_casts, terms) if term in ends]
                ends[node] = shortcuts[0] if shortcuts else None
    return ends


def without_casts(node: Node) -> Node:
    while node.target is torch.ops.prims.convert_element_type.default:
        node = node.args[0]  # pyright: ignore[reportAssignmentType]
    return node


class Probe(nn.Module):
    """A block with stochastic depth and dropout; the result is linear in the last weight."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 4, 3, padding=1, bias=False)

    def draw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        path = torch.empty_like(x[:, :1, :1, :1]).bernoulli_(0.5)
        return path, torch.empty_like(x).bernoulli_(0.5)

    def forward(
        self, x: Tensor, weights: Tensor, masks: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Draws masks if none are given."""
        path, dropout = self.draw(x) if masks is None else masks
        return (self.last((x + self.branch(x).relu() * path).relu() * dropout) * weights).sum()


@cache
def why_not_recompute(device: torch.device) -> str:
    """The reason not to compile with recomputation on `device`; "" if there is none.

    Compiles a probe and checks its gradient, which takes seconds, once in a process.
    """
    try:
        error = gradient_error(
            lambda probe: torch.compile(probe, fullgraph=True, options=recompute_options()), device
        )
    except RuntimeError as failure:
        message = str(failure).partition("\n")[0]
        return f"torch {torch.__version__} cannot compile recomputation on {device}: {message}"
    if error <= MAX_GRADIENT_ERROR:
        return ""
    return (
        f"torch {torch.__version__} recomputes wrong gradients on {device}: relative error "
        f"{error:.0e}"
    )


def gradient_error(
    compiler: Callable[[nn.Module], Callable[..., Tensor]],
    device: torch.device,
) -> float:
    """The relative error of a compiled `Probe`'s gradient, with masks from outside the graph.

    A result that is linear in a weight equals the weight times its gradient. Two compiled steps are
    also compared with an eager one. In float64, so that rounding cannot be confused with an error.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(0)
        probe = Probe().to(device, torch.float64)
        x, weights = torch.randn(2, 16, 4, 8, 8, dtype=torch.float64).to(device)
        masks = probe.draw(x)
        errors, gradients = [], []
        compiled = compiler(probe)
        for call in (compiled, compiled, probe):
            probe.zero_grad()
            result = call(x, weights, masks)
            result.backward()
            weight, gradient = probe.last.weight, probe.last.weight.grad
            assert gradient is not None
            errors.append((result - (weight * gradient).sum()) / (weight.norm() * gradient.norm()))
            gradients.append(
                torch.cat([p.grad.flatten() for p in probe.parameters() if p.grad is not None])
            )
        *steps, eager = gradients
        errors += [(each - eager).norm() / eager.norm() for each in steps]
        return max(abs(error.item()) for error in errors)
