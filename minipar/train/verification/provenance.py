"""The origin of a rank's part of a tensor: the strategies that split it, in the order of `train/parallelize.py`."""

from __future__ import annotations

from minipar.config.train_config import TrainConfig
from minipar.mesh import Mesh, Placement


def place_in_recipe(config: TrainConfig, placement: Placement, rank: int) -> str:
    """Describe how strategies made this part, for example "pipeline: on pp rank 1 of 2; tensor: [0, 64) of 128 ...".

    A cut along a dim comes from expert parallelism (dim 0 of stacked experts) or tp; a flat range comes from ZeRO.
    """
    mesh = Mesh(config.world_size, **config.mesh_sizes)
    at = mesh.coordinates_of(rank)
    expert = placement.expert
    steps = []
    if config.pp > 1:
        steps.append(f"pipeline: on pp rank {at.pp} of {config.pp}")
    for dim, (start, length, size) in enumerate(
        zip(placement.start, placement.length, placement.global_shape)
    ):
        if length < size:
            cut = "experts" if expert and dim == 0 else "tensor"
            steps.append(f"{cut}: [{start}, {start + length}) of {size} along dim {dim}")
    if config.tp > 1 and len(placement.global_shape) and placement.length == placement.global_shape:
        steps.append("tensor: whole on every tp rank")
    if placement.tied_to is not None:
        steps.append(f"tied to {placement.tied_to}, their gradients summed over pp")
    over = [axis for axis in ("dp", "cp") if getattr(config, axis) > 1]
    if over:
        ranks = "the ranks with these experts" if expert and config.ep > 1 else " x ".join(over)
        steps.append(f"data: gradient summed over {ranks}")
    if placement.flat is not None:
        steps.append(f"ZeRO: elements [{placement.flat[0]}, {placement.flat[1]}) of that")
    return "; ".join(steps) or "one process"
