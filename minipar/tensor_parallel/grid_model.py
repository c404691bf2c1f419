"""Tensor parallelism of the whole model in two and three dimensions: no rank holds a whole matrix, or a whole activation.

    embedding            gathered by this rank's features, for its samples     see `GridLayout.gather_table`
    norms                mean of squares                                       two all-reduces of a number per token
    attention, mlp       each matrix by `grid.py` or `cube.py`                 see `linear_costs.py`
    dropouts, residual   this rank's block                                     nothing
    head                 a matrix like these; the loss over split logits       three numbers per token

All ranks are given the same tokens and targets; each takes its samples of them. Between blocks, and between stages, a rank
has [B/R, T, D/C] of [B, T, D]: R = d q and C = q on a grid, R = p^2 and C = p on a cube. `grid_costs.py` counts what a
step sends.

Source: Xu et al. (Optimus), arXiv:2104.05343, section 3; Wang et al. (Tesseract), arXiv:2105.14500; Bian et al.,
arXiv:2105.14450, section 3.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from minipar.comm import autograd
from minipar.mesh import place_whole, placement_of
from minipar.model.block import Block
from minipar.model.deferrable_linear import TiedHead
from minipar.model.norm import RMSNorm
from minipar.model.transformer import Transformer
from minipar.tensor_parallel.grid_layout import Blocks, CubeLayout, GridLayout, make_layout
from minipar.tensor_parallel.limits import check_grid
from minipar.tensor_parallel.shards import place
from minipar.tensor_parallel.split_model import require_not_wrapped
from minipar.tensor_parallel.vocab import vocab_parallel_cross_entropy

Layout = GridLayout | CubeLayout


def grid_parallel(
    model: Transformer, comm, layout: str = "2d", depth: int = 1, algorithm: str = "auto"
) -> Transformer:
    """Turn the one-process model, or a pipeline stage of it, into this rank's blocks of it, in place; returns the model.

    comm       the tp ranks; each calls this with the same model
    layout     "2d": q x q ranks; "2.5d": depth times q x q; "3d": p x p x p
    algorithm  of the collectives, as in `Comm.using`; SUMMA's broadcasts and reductions are trees

    `model.loss` never gathers the logits; `model(tokens)` does, and returns [B, T, V]. Hidden states between stages are
    blocks. Gradients are already summed over tp when autograd accumulates them, all of them in the backward of a
    microbatch: none is deferred. Every parameter has a placement; see `full_state_dict`.
    Raises ValueError where the ranks are no such grid, the model or the samples cannot be split over it evenly, or
    the model is in data parallelism already.
    """
    check_grid(model.config, comm.size, layout, depth)
    require_not_wrapped(model)
    on = make_layout(comm.using(algorithm) if algorithm != "auto" else comm, layout, depth)
    place_whole(model)
    if model.first:
        model.embedding = GridEmbedding(model.embedding, on)
    for block in model.layers.values():
        shard_block(block, on)
    if model.last:
        model.norm = GridRMSNorm(model.norm, on.outer)
        tied = isinstance(model.head, TiedHead)
        model.head = GridTiedHead(on) if tied else on.expand(model.head)
        model.overrides.output = GridOutput(on.inner)
    model.overrides.whole_shape = on.outer.whole_shape
    return model


def shard_block(block: Block, on: Layout) -> None:
    """Replace each layer of a block by this rank's block of it."""
    attention, mlp = block.attention, block.mlp
    attention.q, attention.k, attention.v = map(on.expand, (attention.q, attention.k, attention.v))
    attention.o = on.contract(attention.o)
    attention.num_heads //= on.inner.line.size
    attention.num_kv_heads //= on.inner.line.size
    attention.overrides.project_qkv = partial(project_together, on, (attention.q, attention.k, attention.v))
    attention.overrides.positions = partial(own_positions, on.inner)
    mlp.gate, mlp.up, mlp.down = on.expand(mlp.gate), on.expand(mlp.up), on.contract(mlp.down)
    mlp.overrides.project_gate_up = partial(project_together, on, (mlp.gate, mlp.up))
    for name in ("attention_norm", "mlp_norm"):
        if (norm := getattr(block, name)) is not None:  # a parallel block has one norm
            setattr(block, name, GridRMSNorm(norm, on.outer))
    block.overrides.dropout = GridDropout(block, on.outer)


def project_together(on: Layout, layers, x: Tensor) -> tuple[Tensor, ...]:
    """Apply several layers to one input, which travels once for all."""
    ys = on.multiply(x, [layer.weight for layer in layers])
    return tuple(layer.add_bias(y) for layer, y in zip(layers, ys))


def own_positions(blocks: Blocks, positions: Tensor) -> Tensor:
    """Return the positions of this rank's samples: [T], the same for all samples, or their rows of [B, T]."""
    return blocks.samples(positions) if positions.dim() == 2 else positions


class GridRMSNorm(RMSNorm):
    """RMSNorm of this rank's block of x, with this rank's features of the weight.

    x, y  [B/R, T, D/C]    w  [D/C]    y = w x / sqrt(mean of x^2 over all D features + eps)

    backward   dx from a sum over all features, too; dw = sum over the ranks with these features of their samples' dw

    Sends two all-reduces, forward and backward, of a number per token over C ranks; and one of D/C elements over R.
    """

    def __init__(self, norm: RMSNorm, blocks: Blocks):
        nn.Module.__init__(self)
        placement = placement_of(norm.weight).shard(0, blocks.line.rank, blocks.line.size).replicate("tp")
        self.eps, self.weight, self.blocks = norm.eps, place(norm.weight, placement), blocks

    def forward(self, x: Tensor) -> Tensor:
        line, wide = self.blocks.line, x.to(torch.promote_types(x.dtype, torch.float32))
        squares = autograd.all_reduce(line, wide.square().sum(-1, keepdim=True))
        # Each rank uses the sum for its own features, so the gradient of the sum is summed over ranks, too.
        squares = autograd.copy(line, squares)
        scale = torch.rsqrt(squares / (x.shape[-1] * line.size) + self.eps)
        return autograd.copy(self.blocks.stack, self.weight) * (wide * scale).to(x.dtype)


class GridDropout:
    """A block's dropout of this rank's block [B/R, T, D/C]: it drops the same elements as in one process."""

    def __init__(self, block: Block, blocks: Blocks):
        self.dropout, self.blocks = block.dropout, blocks

    def __call__(self, x: Tensor, site: int, indices: Tensor, sample_ids: Tensor, step: int) -> Tensor:
        first_feature = self.blocks.line.rank * x.shape[-1]
        indices, sample_ids = own_positions(self.blocks, indices), self.blocks.samples(sample_ids)
        return self.dropout(x, site, indices, sample_ids, step, first_feature)


class GridEmbedding(nn.Module):
    """An embedding split along both dims: tokens [B, T] on every rank -> this rank's block [B/R, T, D/C].

    w  [V/q, D/q] on a grid, [V/p^2, D/p] on a cube: the block that a head would have

    All rows of this rank's features, [V, D/C], are gathered for the lookup; backward, their gradient is reduce-scattered.
    Costs: `gather_table` of the layout.
    """

    def __init__(self, embedding: nn.Embedding, layout: Layout):
        super().__init__()
        self.weight, self.layout = layout.weight_block(embedding.weight), layout

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(self.layout.outer.samples(tokens), self.layout.gather_table(self.weight))


class GridTiedHead(TiedHead):
    """The tied head, by this rank's block of the embedding."""

    def __init__(self, layout: Layout):
        super().__init__()
        self.layout = layout

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        (logits,) = self.layout.multiply(x, [weight])
        return logits


class GridOutput:
    """The model's output from this rank's block of the logits: the gathered logits, or with targets the sum of losses.

    The losses of this rank's samples are computed over split logits, and summed over the ranks with other samples: every
    rank returns the sum over all samples.
    """

    def __init__(self, blocks: Blocks):
        self.blocks = blocks

    def __call__(self, logits: Tensor, targets: Tensor | None) -> Tensor:
        line, stack = self.blocks
        if targets is None:
            return autograd.gather(line, autograd.gather(stack, logits), dim=-1)
        loss = vocab_parallel_cross_entropy(line, logits, self.blocks.samples(targets), reduction="sum")
        return autograd.all_reduce(stack, loss)
