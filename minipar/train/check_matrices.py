"""The check that tp can cut the matrices of a run's model and, on a grid of ranks, its samples. Imports no torch."""

from __future__ import annotations

from minipar.errors import require_divides
from minipar.tensor_parallel.limits import check_grid, check_tensor_parallel, grid_shape


def check_matrices(config) -> None:
    """Raise ValueError, before any rank starts, where tp ranks in `config.tp_layout` cannot train the model."""
    layout, depth = config.tp_layout, config.tp_depth
    if (layout == "2.5d") != (depth > 1):
        raise ValueError(
            f"tp_depth={depth} with tp_layout={layout}: 2.5d has tp_depth squares of ranks, 2 or more, and no other "
            "layout has any; use both, or neither"
        )
    if layout == "1d":
        check_tensor_parallel(config.model, config.tp, config.pad_vocab)
        return
    check_grid(config.model, config.tp, layout, depth)
    rows, _ = grid_shape(config.tp, layout, depth)
    samples = config.batch_size // config.dp // config.microbatches
    require_divides(
        f"tp_layout={layout}'s rows of ranks", rows, "samples (batch_size/dp/microbatches)", samples
    )
    for name in ("sequence_parallel", "partition_activations"):
        if getattr(config, name):
            raise ValueError(
                f"{name}=True is for tp_layout=1d, where ranks hold whole activations, and tp_layout={layout} cuts them; "
                "use one of the two"
            )


def ranks_of_heads(config) -> int:
    """Return the number of tp ranks that share the heads of a sample."""
    if config.tp_layout == "1d":
        return config.tp
    return grid_shape(config.tp, config.tp_layout, config.tp_depth)[1]
