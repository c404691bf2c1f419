"""Traffic between nodes: which mesh axes cross nodes, and how many bytes it costs where tp does.

Nodes are blocks of consecutive ranks, as torchrun and SLURM number them. An all-reduce over t ranks, which t divides,
sends 2(t-1)/t of its elements with algorithm="auto", "ring" or "hierarchical". With e bytes per element, a rank that has
N tokens (over all its microbatches) sends per step:

    tp          4 all-reduces of N*D*e bytes per layer, 1 for the embedding, 1 for the head     8(t-1)/t N*D*e per layer
    gradients   one all-reduce, over dp x cp, of the rank's dense parameters; over edp, of its experts

A parallel block (model.parallel_block) without experts has 2 all-reduces, not 4. With sequence_parallel, the backward
all-gathers the input of each column-parallel product again, half an all-reduce: twice per layer (a parallel block: once),
and once for the head. recompute="full" repeats a layer's forward all-reduces, except the last one where no dropout follows
it; "every:N" repeats them, too, except the last one of a unit.

In every layer the ranks wait for tp's messages; they need the gradients' only when the step ends. So tp belongs inside a
node.

Source: Megatron-LM on clusters, arXiv:2104.04473, section 3.2 (tp up to the size of a node, then pp and dp).
"""

from __future__ import annotations

import warnings
from math import ceil, gcd

from minipar.cost.topology import members_per_node
from minipar.mesh import axes_across_nodes, mesh_without_comm, place_whole, placement_of
from minipar.model import Transformer
from minipar.train.check_config import blocks_per_unit


def warn_if_tp_crosses(config, ranks_per_node: int) -> None:
    """Warn where tp's messages cross nodes, with the bytes per step, and those of a mesh whose tp stays inside a node.

    config          a TrainConfig; none whose tp_layout is a grid is warned of, since the formula is that of 1d
    ranks_per_node  number of ranks on one machine: torchrun's LOCAL_WORLD_SIZE
    """
    sizes = config.mesh_sizes
    if config.tp_layout != "1d" or not axes_across_nodes(sizes, ranks_per_node)["tp"]:
        return
    tp = gcd(sizes["tp"], ranks_per_node)
    inside = sizes | dict(tp=tp, dp=sizes["dp"] * sizes["tp"] // tp)
    tp_now, gradients_now = leaving_bytes(config, sizes, ranks_per_node)
    _, gradients_then = leaving_bytes(config, inside, ranks_per_node)
    warnings.warn(
        f"tp={sizes['tp']} does not divide ranks_per_node={ranks_per_node}: every step {_mb(tp_now)} of tp's messages "
        f"leave a node, every layer waiting for them, and {_mb(gradients_now)} of gradients; with tp={tp} and "
        f"dp={inside['dp']} these would be 0 MB and {_mb(gradients_then)}",
        stacklevel=2,
    )


def leaving_bytes(config, mesh_sizes: dict[str, int], ranks_per_node: int) -> tuple[float, float]:
    """(tp, gradients): the bytes that leave a node per step, averaged over nodes, with algorithm="auto".

    A group with g > 1 of its p ranks on each of k nodes goes in two levels: (k-1)/(p-1) of every rank's bytes leave. Any
    other is taken as a ring: a rank's bytes leave its node where its right neighbour is on another one.
    """
    mesh = mesh_without_comm(mesh_sizes)
    num_nodes = -(-mesh.world_size // ranks_per_node)

    def leavers(*axes: str) -> float:
        groups = {mesh.group(rank, *axes) for rank in range(mesh.world_size)}
        return sum(_leavers(group, ranks_per_node) for group in groups)

    dense, experts = gradient_bytes(config, mesh_sizes)
    gradients = dense * leavers("dp", "cp") + experts * leavers("edp")
    return tp_bytes(config, mesh_sizes) * leavers("tp") / num_nodes, gradients / num_nodes


def _leavers(group: tuple[int, ...], ranks_per_node: int) -> float:
    """The bytes of a group's ranks that leave their nodes, over the bytes that one of them sends."""
    p, g = len(group), members_per_node(group, ranks_per_node)
    if g is not None:
        return p * (p // g - 1) / (p - 1)
    return sum(a // ranks_per_node != b // ranks_per_node for a, b in zip(group, group[1:] + group[:1]))


def tp_bytes(config, mesh_sizes: dict[str, int]) -> float:
    """The bytes that a rank sends over tp per step, averaged over pp: the formula above, and 3 numbers per token.

    These 3 belong to the loss. A layer with experts all-reduces top_k more numbers per token; sequence_parallel also
    all-reduces the gradients of the norms, D elements each, once per microbatch. Left out: the all-reduce of a key/value
    head's gradients between the tp ranks that share it.
    """
    mesh, model = mesh_without_comm(mesh_sizes), config.model
    tokens = config.batch_size * config.seq_len // (mesh.sizes["dp"] * mesh.sizes["cp"])
    itemsize, split = config.torch_dtype.itemsize, config.sequence_parallel
    halves = _halves(model)
    sums = halves * (2 + split / 2) + _sums_again(config, mesh.sizes["pp"]) + 2 + 0.5 * split
    routed = model.top_k * sum(model.has_experts(layer) for layer in range(model.num_layers))
    norms = split * ((1 if model.parallel_block else 2) * model.num_layers + 1) * config.microbatches
    elems = (sums * tokens + norms) * model.dim + routed * tokens
    num_bytes = elems * itemsize + 3 * tokens * max(4, itemsize)
    return _sum(mesh.sizes["tp"], num_bytes) / mesh.sizes["pp"]


def _halves(model) -> int:
    """The forward's all-reduces over all layers: attention's and the MLP's, or a parallel block's one."""
    shared = sum(model.parallel_block and not model.has_experts(layer) for layer in range(model.num_layers))
    return 2 * model.num_layers - shared


def _sums_again(config, pp: int) -> float:
    """The all-reduces of hidden states that a recomputation repeats, over all layers."""
    every = 1 if config.recompute == "full" else blocks_per_unit(config.recompute)
    if every is None:
        return 0
    layers = config.model.num_layers
    units = pp * ceil(layers / pp / every)
    return _halves(config.model) - units * (
        0 if config.model.dropout else 0.5 if config.sequence_parallel else 1
    )


def gradient_bytes(config, mesh_sizes: dict[str, int]) -> tuple[float, float]:
    """(dense, experts): the bytes that a rank sends per step to all-reduce the gradients of either kind of parameter.

    Every parameter is counted as cut by tp and pp: norms, which are not, are small. A tied embedding is on two stages.
    """
    sizes = mesh_without_comm(mesh_sizes).sizes
    model = Transformer(config.model, device="meta")
    elems = {True: 0, False: 0}
    place_whole(model)
    for parameter in model.parameters():
        elems[placement_of(parameter).expert] += parameter.numel()
    if config.model.tie_embeddings and sizes["pp"] > 1:
        elems[False] += model.embedding.weight.numel()
    a_rank = config.torch_dtype.itemsize / (sizes["tp"] * sizes["pp"])
    dense = _sum(sizes["dp"] * sizes["cp"], elems[False]) * a_rank
    return dense, _sum(sizes["edp"], elems[True]) * a_rank / sizes["ep"]


def _sum(ranks: int, elems: float) -> float:
    """The elements that a rank sends to all-reduce `elems` elements over `ranks` ranks."""
    return 2 * (ranks - 1) / ranks * elems


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.2g} MB" if num_bytes < 1e7 else f"{num_bytes / 1e6:,.0f} MB"
