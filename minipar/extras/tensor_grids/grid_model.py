"""Tensor parallelism of the model in two and three dimensions: no rank holds a full matrix or a full activation.

                         computation                                           communication
    embedding            lookup of this rank's features, for its samples       see `GridLayout.gather_table`
    norms                mean of squares                                       two all-reduces of a value per token
    attention, mlp       each matrix by `grid.py` or `cube.py`                 see `linear_costs.py`
    dropouts, residual   on this rank's block                                  nothing
    head                 like the matrices above; the loss over split logits   three values per token

All ranks get the same tokens and targets, and each takes its own samples. Between layers, and between pipeline stages, a
rank has [B/R, T, D/C] of [B, T, D], with R = d q and C = q on a grid, R = p^2 and C = p on a cube. `grid_costs.py` counts
the elements sent in a step.

Source: Xu et al. (Optimus), arXiv:2104.05343, section 3; Wang et al. (Tesseract), arXiv:2105.14500; Bian et al.,
arXiv:2105.14450, section 3.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm import Comm, autograd
from minipar.config.train_config import TrainConfig
from minipar.extras.tensor_grids.choices import depth_of
from minipar.extras.tensor_grids.grid_layout import Blocks, CubeLayout, GridLayout, make_layout
from minipar.extras.tensor_grids.limits import check_grid
from minipar.mesh import place_whole, placement_of
from minipar.model.block import Block
from minipar.model.deferrable_linear import TiedHead
from minipar.model.mlp import SwiGLU
from minipar.model.norm import RMSNorm
from minipar.model.transformer import Transformer
from minipar.tensor_parallel.before_split import require_not_wrapped
from minipar.tensor_parallel.shards import place
from minipar.tensor_parallel.vocab import vocab_parallel_cross_entropy

Layout = GridLayout | CubeLayout


def grid_parallel(
    model: Transformer, comm: Comm, layout: str = "2d", depth: int = 1, algorithm: str = "auto"
) -> Transformer:
    """Split the one-process model, or a pipeline stage of it, in place over a grid of ranks; return the model.

    comm       the tp ranks; each calls this with the same model
    layout     "2d": q x q ranks; "2.5d": depth times q x q; "3d": p x p x p
    algorithm  the algorithm of collectives, as in `Comm.using`; SUMMA's broadcasts and reductions always use trees

    `model.loss` never gathers the logits; `model(tokens)` does, and returns [B, T, V]. Pipeline stages send each other
    blocks of hidden states. Each microbatch's backward computes all gradients, summed over tp; none is deferred. Every
    parameter has a placement; see `full_state_dict`.
    Raises ValueError if the number of ranks does not fit the grid, the model or the samples cannot be split evenly over it,
    or the model is already wrapped for data parallelism.
    """
    check_grid(model.config, comm.size, layout, depth)
    require_not_wrapped(model)
    cut = make_layout(comm.using(algorithm) if algorithm != "auto" else comm, layout, depth)
    place_whole(model)
    if model.first:
        model.register_module("embedding", GridEmbedding(model.embedding, cut))
    for block in model.layers.values():
        assert isinstance(block, Block)
        shard_block(block, cut)
    if model.last:
        model.norm = GridRMSNorm(model.norm, cut.outer)
        head = GridTiedHead(cut) if isinstance(model.head, TiedHead) else cut.expand(model.head)
        model.register_module("head", head)
        model.overrides.output = GridOutput(cut.inner)
    model.overrides.whole_shape = cut.outer.whole_shape
    return model


def cut_stage(stage: Transformer, tp: Comm, config: TrainConfig) -> None:
    """Split a run's stage over a grid or a cube, for `--tp-layout 2d`, `2.5d` and `3d`."""
    grid_parallel(stage, tp, config.tp_layout, depth_of(config))


def shard_block(block: Block, layout: Layout) -> None:
    """Replace the layers of a Transformer block by this rank's parts of them."""
    attention, mlp = block.attention, block.mlp
    assert isinstance(mlp, SwiGLU), "`check_grid` refuses experts"
    for layer, name in ((attention, "q"), (attention, "k"), (attention, "v"), (mlp, "gate"), (mlp, "up")):
        layer.register_module(name, layout.expand(getattr(layer, name)))
    for layer, name in ((attention, "o"), (mlp, "down")):
        layer.register_module(name, layout.contract(getattr(layer, name)))
    attention.num_heads //= layout.inner.line.size
    attention.num_kv_heads //= layout.inner.line.size
    attention.overrides.project_qkv = partial(
        project_together, layout, (attention.q, attention.k, attention.v)
    )
    attention.overrides.positions = partial(own_positions, layout.inner)
    mlp.overrides.project_gate_up = partial(project_together, layout, (mlp.gate, mlp.up))
    for name in ("attention_norm", "mlp_norm"):
        if (norm := getattr(block, name)) is not None:  # a parallel block has only one norm
            setattr(block, name, GridRMSNorm(norm, layout.outer))
    block.overrides.dropout = GridDropout(block, layout.outer)


def project_together(layout: Layout, layers: Sequence[Any], x: Tensor) -> tuple[Tensor, ...]:
    """Apply several layers to one input, which is sent once for all of them."""
    ys = layout.multiply(x, [layer.weight for layer in layers])
    return tuple(layer.add_bias(y) for layer, y in zip(layers, ys))


def own_positions(blocks: Blocks, positions: Tensor) -> Tensor:
    """Return the positions of this rank's samples: their rows of [B, T]; [T] is returned unchanged."""
    return blocks.samples(positions) if positions.dim() == 2 else positions


class GridRMSNorm(RMSNorm):
    """RMSNorm for this rank's block of x, with the weight of this rank's features.

    x, y  [B/R, T, D/C]    w  [D/C]    y = w x / sqrt(mean of x^2 over all D features + eps)

    backward   dx also needs a sum over all features; dw is summed over the ranks with other samples

    Makes two all-reduces of one value per token over C ranks (one forward, one backward), and one of D/C elements over R.
    """

    def __init__(self, norm: RMSNorm, blocks: Blocks):
        nn.Module.__init__(self)
        placement = placement_of(norm.weight).shard(0, blocks.line.rank, blocks.line.size).replicate("tp")
        self.eps, self.weight, self.blocks = norm.eps, place(norm.weight, placement), blocks

    def forward(self, x: Tensor) -> Tensor:
        line, wide = self.blocks.line, x.to(torch.promote_types(x.dtype, torch.float32))
        squares = autograd.all_reduce(line, wide.square().sum(-1, keepdim=True))
        # Each rank uses the sum for its own features, so the sum's gradient is summed over ranks, too.
        squares = autograd.copy(line, squares)
        scale = torch.rsqrt(squares / (x.shape[-1] * line.size) + self.eps)
        return autograd.copy(self.blocks.stack, self.weight) * (wide * scale).to(x.dtype)


class GridDropout:
    """A layer's dropout on this rank's block [B/R, T, D/C]: it drops the same elements as in one process."""

    def __init__(self, block: Block, blocks: Blocks):
        self.dropout, self.blocks = block.dropout, blocks

    def __call__(self, x: Tensor, site: int, indices: Tensor, sample_ids: Tensor, step: int) -> Tensor:
        first_feature = self.blocks.line.rank * x.shape[-1]
        indices, sample_ids = own_positions(self.blocks, indices), self.blocks.samples(sample_ids)
        return self.dropout(x, site, indices, sample_ids, step, first_feature)


class GridEmbedding(nn.Module):
    """An embedding split along both dims: tokens [B, T] on every rank -> this rank's block [B/R, T, D/C].

    w  [V/q, D/q] on a grid, [V/p^2, D/p] on a cube: the same block as that of a tied head

    The lookup gathers all rows of this rank's features, [V, D/C]; the backward reduce-scatters their gradient.
    Costs what the layout's `gather_table` costs.
    """

    def __init__(self, embedding: nn.Embedding, layout: Layout):
        super().__init__()
        self.weight, self.layout = layout.weight_block(embedding.get_parameter("weight")), layout

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(self.layout.outer.samples(tokens), self.layout.gather_table(self.weight))


class GridTiedHead(TiedHead):
    """A tied head, which multiplies by this rank's block of the embedding."""

    def __init__(self, layout: Layout):
        super().__init__()
        self.layout = layout

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        (logits,) = self.layout.multiply(x, [weight])
        return logits


class GridOutput:
    """Computes the model's output from this rank's block of the logits: the gathered logits or, given targets, the loss.

    The losses of this rank's samples are computed from split logits, then summed over the ranks with other samples. So
    every rank returns the sum over all samples.
    """

    def __init__(self, blocks: Blocks):
        self.blocks = blocks

    def __call__(self, logits: Tensor, targets: Tensor | None) -> Tensor:
        line, stack = self.blocks
        if targets is None:
            return autograd.gather(line, autograd.gather(stack, logits), dim=-1)
        loss = vocab_parallel_cross_entropy(line, logits, self.blocks.samples(targets), reduction="sum")
        return autograd.all_reduce(stack, loss)
