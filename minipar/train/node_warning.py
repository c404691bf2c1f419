"""A warning for runs whose tp crosses nodes; it states the bytes that then leave a node. Imports no torch.

Nodes are blocks of consecutive ranks, as torchrun and SLURM number them. Ranks wait for tp's messages in every layer, but
for the gradients' messages only at the end of the step. So tp belongs inside a node.

Source: Megatron-LM on clusters, arXiv:2104.04473, section 3.2 (tp up to the size of a node, then pp and dp).
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from math import gcd

from minipar.config.train_config import TrainConfig
from minipar.cost.machines import MACHINES
from minipar.cost.traffic import step_traffic
from minipar.mesh.nodes import axes_across_nodes, members_per_node, mesh_without_comm
from minipar.train.planned import job_and_layout


def warn_if_tp_crosses(config: TrainConfig, ranks_per_node: int) -> None:
    """Warn if tp's messages cross nodes: print the bytes per step, and the bytes for a mesh with tp inside a node.

    config          no warning with an extra's tp_layout, for which there are no formulas
    ranks_per_node  number of ranks on one machine: torchrun's LOCAL_WORLD_SIZE
    """
    sizes = config.mesh_sizes
    if config.tp_layout != "1d":
        return
    if not axes_across_nodes(sizes, ranks_per_node)["tp"]:
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


def leaving_bytes(
    config: TrainConfig, mesh_sizes: dict[str, int], ranks_per_node: int
) -> tuple[float, float]:
    """Return (tp, gradients): the bytes that leave a node per step with algorithm="auto", averaged over nodes.

    A group with g > 1 of its p ranks on each of k nodes communicates in two levels: (k-1)/(p-1) of each rank's bytes leave
    the node. Any other group is treated as a ring: a rank's bytes leave its node if its right neighbour is on another node.
    """
    mesh = mesh_without_comm(mesh_sizes)
    num_nodes = -(-mesh.world_size // ranks_per_node)

    def leavers(*axes: str) -> float:
        groups = {mesh.group(rank, *axes) for rank in range(mesh.world_size)}
        return sum(_leavers(group, ranks_per_node) for group in groups)

    sent = sent_bytes(config, mesh_sizes)
    gradients = sent["dp"] * leavers("dp", "cp") + sent["edp"] * leavers("edp")
    return sent["tp"] * leavers("tp") / num_nodes, gradients / num_nodes


def sent_bytes(config: TrainConfig, mesh_sizes: dict[str, int]) -> dict[str, float]:
    """Return the bytes that a rank sends in a step over tp, dp (x cp) and edp, averaged over the pipeline ranks.

    mesh_sizes  sizes of dp and tp; the sizes of the other axes are the configuration's
    """
    job, layout = job_and_layout(config, next(iter(MACHINES.values())))  # any machine: the bytes are the same
    dp = layout.dp * mesh_sizes["dp"] // config.dp
    microbatch = max(1, config.batch_size // (dp * layout.microbatches(job)))
    layout = replace(layout, dp=dp, tp=mesh_sizes["tp"], microbatch=microbatch)
    ranks = [step_traffic(job, layout, rank) for rank in range(layout.pp)]
    return {axis: sum(sent[axis].total for sent in ranks) / layout.pp for axis in ("tp", "dp", "edp")}


def _leavers(group: tuple[int, ...], ranks_per_node: int) -> float:
    """Return the bytes that leave their nodes in a group, divided by the bytes that each rank of the group sends."""
    p, g = len(group), members_per_node(group, ranks_per_node)
    if g is not None:
        return p * (p // g - 1) / (p - 1)
    return sum(a // ranks_per_node != b // ranks_per_node for a, b in zip(group, group[1:] + group[:1]))


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.2g} MB" if num_bytes < 1e7 else f"{num_bytes / 1e6:,.0f} MB"
