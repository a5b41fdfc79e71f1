"""How is a network compiled for training so that it keeps little for its gradient, and when may it be?

A compiler can compute cheap maps a second time in the backward pass rather than keep them. It would draw masks a second
time too, others than before, and the gradients would be wrong without a word: seen with torch 2.11 and 2.15. So masks
are inputs of a network (`Network.draw`), and what the installed torch makes of that is tried before it is relied on.
"""

import operator
import warnings
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, Literal, NamedTuple

import torch
import torch._functorch.config
from torch import Tensor, nn
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.custom_graph_pass import CustomPartitionerFn, get_hash_for_files
from torch._ops import OpOverload
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import CheckpointPolicy

from fullstride.nets.network import Network

LARGEST_ERROR = 1e-5  # of a gradient, relative; with other masks it is 0.07, by rounding 1e-16 (torch 2.11 to 2.15)
SEGMENT = 4  # blocks from one kept result to the next: TResNet-M's 11 in a row keep two, and make three at most again
CHEAP = (
    "fullstride::join",
    "fullstride::rejoin",
    "fullstride::gate",
    "fullstride::blur",
)  # ours without a convolution


class Compiled(NamedTuple):
    call: Callable[..., Any]  # as the network
    mode: Literal["recompute", "plain"]
    reason: str  # why it is "plain"; "" where it is not


def compiled_for_training(
    net: nn.Module, *, recompute: bool = True, dynamic: bool | None = None
) -> Compiled:
    """`net` by torch.compile, which computes all but convolutions and products twice where that saves memory.

    What is drawn at random must be an input: a network that draws for itself keeps what torch.compile keeps, and warns.
    PyTorch's settings stay as they are. A `Network` is compiled as one graph, or an error says why not. `dynamic` is
    torch.compile's: False makes a graph for each size.
    """
    reason = (
        recompute_is_safe(next(net.parameters()).device)
        if recompute
        else "recomputing was not asked for"
    )
    options = None if reason else RECOMPUTE
    return Compiled(
        torch.compile(net, fullgraph=isinstance(net, Network), dynamic=dynamic, options=options),
        "plain" if reason else "recompute",
        reason,
    )


class KeepLittle(CustomPartitionerFn):
    """Cuts what forward and backward pass do together into the two, so that little is handed from one to the other."""

    def __call__(
        self, gm: GraphModule, joint_inputs: Sequence[object], **settings: Any
    ) -> tuple[GraphModule, GraphModule]:
        nodes = [node for node in gm.graph.nodes if isinstance(node.target, OpOverload)]
        draws = any(torch.Tag.nondeterministic_seeded in node.target.tags for node in nodes)
        if draws:
            warnings.warn(
                "a network draws at random where it is compiled: nothing more is recomputed",
                stacklevel=1,
            )
        for node in nodes:
            if costly(node):
                node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        kept = waypoints(gm.graph)
        for node in kept:
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE
        if not draws:
            make_of_codes(gm.graph, kept)
        with torch._functorch.config.patch(aggressive_recomputation=not draws):
            return min_cut_rematerialization_partition(gm, joint_inputs, **settings)

    def uuid(self) -> bytes | None:
        return get_hash_for_files((__file__,))


def costly(node: Node) -> bool:
    """Of operators that PyTorch knows nothing of: one with a convolution, of others, or that waits for processes."""
    assert isinstance(node.target, OpOverload)
    if node.target.namespace in ("aten", "prims"):
        return False
    schema = node.target._schema
    return schema.name not in CHEAP or (
        schema.arguments[-1].name == "group" and bool(node.args[-1])
    )


def waypoints(graph: Graph) -> list[Node]:
    """The ends of blocks that keep their result: of those in a row without a convolution between, every `SEGMENT`-th.

    The last result would else be made again of all before it, which would all be there at once.
    """
    place: dict[Node, int] = {}  # in its row, from 0
    for node in graph.nodes:
        if node.target is torch.ops.fullstride.join.default:
            other = node.args[6]
            before = (
                other[0].args[0]
                if len(other) == 1 and other[0].target is operator.getitem
                else None
            )
            place[node] = place[before] + 1 if before in place else 0
    return [node for node, number in place.items() if number and number % SEGMENT == 0]


def make_of_codes(graph: Graph, kept: Sequence[Node]) -> None:
    """Where the end of a block keeps codes and is not `kept`, let the backward pass see its result as they give it.

    Else it would be made again of the convolution's output, which is twice as large, and the codes would be too. Codes
    tell the result's sign, without which the activation's gradient would be wrong wherever it is near zero.
    """
    backward: set[Node] = set()
    for node in graph.nodes:
        if (node.op == "placeholder" and "tangents" in str(node.target)) or backward & set(
            node.all_input_nodes
        ):
            backward.add(node)
    made: dict[Node, Node] = {}
    for node in list(graph.nodes):
        if (
            node.target is not torch.ops.fullstride.join.default
            or node.args[9] != "codes"
            or node in kept
        ):
            continue
        _, gain, bias, _, se, keep, other, slope, eps, *_ = node.args
        (y,) = (user for user in node.users if user.args[1] == 0)
        parts = [node]
        for number, value in enumerate(node.meta["val"][1:], 1):
            with graph.inserting_after(parts[-1]):
                parts.append(graph.call_function(operator.getitem, (node, number)))
            parts[-1].meta = node.meta | {"val": value}
        _, moments, means, codes, other_codes = parts
        others = (
            [other_codes, *other[1:3]]
            if len(other) > 1
            else [made.get(each, each) for each in other]
        )
        with graph.inserting_after(parts[-1]):
            given = (
                codes,
                gain,
                bias,
                moments,
                means,
                se,
                keep,
                others,
                slope,
                eps,
                y.meta["val"].dtype,
            )
            made[y] = graph.call_function(torch.ops.fullstride.rejoin.default, given)
        made[y].meta = dict(y.meta)
        y.replace_all_uses_with(made[y], lambda user: user in backward and user.op != "output")


RECOMPUTE: dict[str, Any] = {"custom_partitioner_fn": KeepLittle()}  # options of torch.compile


class Probe(nn.Module):
    """A block with stochastic depth, dropout, and a convolution in whose weight the result is linear."""

    def __init__(self):
        super().__init__()
        self.branch = nn.Conv2d(4, 4, 3, padding=1)
        self.last = nn.Conv2d(4, 4, 3, padding=1, bias=False)

    def draw(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.empty_like(x[:, :1, :1, :1]).bernoulli_(0.5), torch.empty_like(x).bernoulli_(
            0.5
        )

    def forward(
        self, x: Tensor, weights: Tensor, masks: tuple[Tensor, Tensor] | None = None
    ) -> Tensor:
        """Without masks it draws its own."""
        path, dropout = self.draw(x) if masks is None else masks
        return (self.last((x + self.branch(x).relu() * path).relu() * dropout) * weights).sum()


@cache
def recompute_is_safe(device: torch.device) -> str:
    """Why a network must not be compiled to recompute on `device`; "" if it may. Takes seconds, once a process."""
    try:
        error = gradient_error(
            lambda probe: torch.compile(probe, fullgraph=True, options=RECOMPUTE), device
        )
    except RuntimeError as failed:
        return f"torch {torch.__version__} compiles no recomputing on {device}: {str(failed).partition(chr(10))[0]}"
    if error <= LARGEST_ERROR:
        return ""
    return f"torch {torch.__version__} recomputes wrong gradients on {device}: off by {error:.0e}"


def gradient_error(
    compiler: Callable[[nn.Module], Callable[..., Tensor]],
    device: torch.device,
    *,
    drawn: Literal["in", "out"] = "out",
) -> float:
    """How far a compiled `Probe`'s gradient is off, relative to its size, where masks are drawn in or out of it.

    A result that is linear in a weight is that weight times its gradient. With masks from outside, steps are also
    compared with each other and with one that is not compiled. In float64, which leaves no doubt.
    """
    with torch.random.fork_rng([device] if device.type == "cuda" else []), torch.enable_grad():
        torch.manual_seed(0)
        probe = Probe().to(device, torch.float64)
        x, weights = torch.randn(2, 16, 4, 8, 8, dtype=torch.float64).to(device)
        masks = [probe.draw(x)] if drawn == "out" else []
        errors, found = [], []
        compiled = compiler(probe)
        for call in (compiled, compiled, probe):
            probe.zero_grad()
            result = call(x, weights, *masks)
            result.backward()
            weight, gradient = probe.last.weight, probe.last.weight.grad
            assert gradient is not None
            errors.append((result - (weight * gradient).sum()) / (weight.norm() * gradient.norm()))
            found.append(
                torch.cat([p.grad.flatten() for p in probe.parameters() if p.grad is not None])
            )
        if masks:
            errors += [(each - found[-1]).norm() / found[-1].norm() for each in found[:-1]]
        return max(abs(error.item()) for error in errors)
