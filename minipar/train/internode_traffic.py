"""Where a mesh meets the machines it runs on: which axes cross from node to node, and what it costs where tp does.

Nodes are blocks of neighbouring ranks, as torchrun and SLURM number them. A step of a rank that has N tokens (over
all its microbatches) sends, with e bytes an element and a sum over t ranks being 2(t-1)/t of its elements:

    tp          4 sums of N*D*e a layer, one for the embedding and one for the head     8(t-1)/t N*D*e a layer
    gradients   one sum, over dp x cp, of a rank's parameters; of its experts over edp

sequence_parallel gathers the inputs of each column-parallel product once more, half a sum: twice a layer, and for the
head. recompute="full" runs a forward's sums again, but the last, where no dropout follows it.

tp's wait in every layer for the link; the gradients' wait for nobody until the step ends. So tp belongs inside a node.

Source: Megatron-LM on clusters, arXiv:2104.04473, section 3.2 (tp up to the size of a node, then pp and dp).
"""

from __future__ import annotations

import warnings
from math import gcd

from minipar.mesh import crossing, mesh_of_sizes, place_whole, placement_of
from minipar.model import Transformer


def warn_if_tp_crosses(config, ranks_per_node: int) -> None:
    """Warn where tp's messages leave the nodes, with the bytes a step, and those of the mesh that keeps them inside.

    config          a TrainConfig
    ranks_per_node  how many ranks run on a machine: torchrun's LOCAL_WORLD_SIZE
    """
    sizes = config.mesh_sizes
    if not crossing(sizes, ranks_per_node)["tp"]:
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
    """(tp, gradients): what leaves a node in a step, on average over nodes, each group's ranks forming a ring.

    A rank's messages leave where its right neighbour is on another node.
    """
    mesh = mesh_of_sizes(mesh_sizes)
    num_nodes = -(-mesh.world_size // ranks_per_node)

    def leavers(*axes: str) -> int:
        rings = {mesh.group(rank, *axes) for rank in range(mesh.world_size)}
        steps = [(a, b) for ring in rings for a, b in zip(ring, ring[1:] + ring[:1])]
        return sum(a // ranks_per_node != b // ranks_per_node for a, b in steps)

    dense, experts = gradient_bytes(config, mesh_sizes)
    gradients = dense * leavers("dp", "cp") + experts * leavers("edp")
    return tp_bytes(config, mesh_sizes) * leavers("tp") / num_nodes, gradients / num_nodes


def tp_bytes(config, mesh_sizes: dict[str, int]) -> float:
    """What a rank sends over tp in a step, the pipeline's ranks taken alike: by the formula above, and 3 numbers a token.

    Those are the loss's. A layer with experts sums top_k numbers a token more; sequence_parallel also sums its norms'
    gradients, D each, for each microbatch. Left out: what tp ranks that share a key/value head sum of its gradients.
    """
    mesh, model = mesh_of_sizes(mesh_sizes), config.model
    tokens = config.batch_size * config.seq_len // (mesh.sizes["dp"] * mesh.sizes["cp"])
    itemsize, split = config.torch_dtype.itemsize, config.sequence_parallel
    again = (2 if model.dropout else 1.5 if split else 1) if config.recompute == "full" else 0
    sums = model.num_layers * (4 + split + again) + 2 + 0.5 * split
    routed = model.top_k * sum(model.has_experts(layer) for layer in range(model.num_layers))
    norms = split * (2 * model.num_layers + 1) * config.microbatches
    elems = (sums * tokens + norms) * model.dim + routed * tokens
    num_bytes = elems * itemsize + 3 * tokens * max(4, itemsize)
    return _sum(mesh.sizes["tp"], num_bytes) / mesh.sizes["pp"]


def gradient_bytes(config, mesh_sizes: dict[str, int]) -> tuple[float, float]:
    """(dense, experts): what a rank sends in a step to sum the gradients of its dense parameters, and of its experts.

    As if tp and pp cut every parameter: a model has few numbers in norms. A tied embedding is on two stages.
    """
    sizes = mesh_of_sizes(mesh_sizes).sizes
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
    """Elements a rank sends to sum so many over so many ranks."""
    return 2 * (ranks - 1) / ranks * elems


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.2g} MB" if num_bytes < 1e7 else f"{num_bytes / 1e6:,.0f} MB"
