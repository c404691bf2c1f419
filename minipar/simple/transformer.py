"""A small Transformer over bytes, and a rank's part of it: some of the layers (pp), some heads and features of each (tp).

    embedding -> block -> ... -> block -> norm -> head        block: x + attention(norm(x)), then x + mlp(norm(x))

    stage 0 of 2: embedding, blocks 0 and 1            stage 1: blocks 2 and 3, norm, head
    in each, tp rank 0: heads 0 and 1, half of the features, bytes 0-127; tp rank 1: the other heads, features and bytes

Every rank draws the whole weights of its layers from the same seeds and keeps its part: no weights are sent, and training
starts from the same numbers on every mesh. In one process, each group has one rank, and the part is the whole.

In the library: minipar.Transformer, which adds rotary positions, grouped queries, dropout, tied embeddings, and is sharded
by minipar.tensor_parallel and minipar.partition.
"""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from .autograd import all_reduce, copy, gather_tokens, scatter_tokens
from .moe import switch
from .ring_attention import ring_attention
from .sequence_parallel import rms_norm
from .tensor_parallel import attention, causal_attention, column_parallel, columns, mlp, rows
from .vocab import embedding

DIM, HEAD_DIM, NUM_LAYERS, VOCAB = 64, 16, 4, 256
CUTS = dict(q=rows, k=rows, v=rows, o=columns, gate=rows, up=rows, down=columns, tokens=rows, head=rows)
SOURCES = sorted(Path(__file__).parent.glob("*.py"))
TEXT = torch.tensor(
    list(b"".join(path.read_bytes() for path in SOURCES))
)  # it is trained on the files of this folder


class Groups(NamedTuple):
    """A rank's groups, as the layers need them. `sequence`: sequence parallelism over tp."""

    tp: Any
    cp: Any
    ep: Any
    sequence: bool = False


def shard(groups, name, whole):
    """Return this rank's part of the weight `name`: of experts, some; of a matrix, rows or columns; of a norm, all."""
    if whole.dim() == 3:
        return whole.chunk(groups.ep.size)[groups.ep.rank].clone()
    return CUTS[name](groups.tp, whole) if name in CUTS else whole


class Layer(nn.Module):
    """A module whose parameters are drawn from a seed and then sharded."""

    def __init__(self, groups, seed, **shapes):
        super().__init__()
        self.groups = groups
        draw = torch.Generator().manual_seed(seed)
        for name, shape in shapes.items():
            whole = torch.randn(shape, generator=draw, dtype=torch.float64) / shape[-1] ** 0.5
            if name.startswith("norm"):
                whole = torch.ones(shape, dtype=torch.float64)
            self.register_parameter(name, nn.Parameter(shard(groups, name, whole)))
        # Between layers a rank has all tokens, or, with sequence parallelism, some of them.
        self.enter = gather_tokens if groups.sequence else copy
        self.leave = scatter_tokens if groups.sequence else all_reduce

    def normed(self, x, weight):
        return rms_norm(x, copy(self.groups.tp, weight) if self.groups.sequence else weight)


class Embedding(Layer):
    def __init__(self, groups):
        super().__init__(groups, seed=0, tokens=(VOCAB, DIM))

    def forward(self, tokens):
        """tokens [B, T] -> [B, T, D]"""
        return embedding(self.groups.tp, tokens, self.tokens, self.leave)


class Block(Layer):
    def __init__(self, groups, layer, num_experts):
        square, E = (DIM, DIM), num_experts
        sizes = dict(norm1=(DIM,), q=square, k=square, v=square, o=square, norm2=(DIM,))
        if num_experts:
            sizes.update(router=(E, DIM), gate=(E, DIM, DIM), up=(E, DIM, DIM), down=(E, DIM, DIM))
        else:
            sizes.update(gate=square, up=square, down=square)
        super().__init__(groups, seed=1 + layer, **sizes)
        self.num_experts = num_experts
        self.core = None  # generate.py and paged.py put a cache here

    def forward(self, x):
        """x [B, T, D] -> [B, T, D]. No position encoding: the causal mask alone makes the order of tokens matter."""
        tp, cp, ep, sequence = self.groups
        core = self.core or (partial(ring_attention, cp) if cp.size > 1 else causal_attention)
        ends = dict(enter=self.enter, leave=self.leave) if sequence else {}
        h = self.normed(x, self.norm1)
        x = x + attention(tp, h, self.q, self.k, self.v, self.o, HEAD_DIM, core=core, **ends)
        h = self.normed(x, self.norm2)
        if self.num_experts:  # every tp rank has all experts of its ep rank, and computes the same
            y, _, _, _ = switch(ep, h, self.router, self.gate, self.up, self.down)
        else:
            y = mlp(tp, h, self.gate, self.up, self.down, **ends)
        return x + y


class Head(Layer):
    def __init__(self, groups):
        super().__init__(groups, seed=1 + NUM_LAYERS, norm=(DIM,), head=(VOCAB, DIM))

    def forward(self, x):
        """x [B, T, D] -> logits [B, T, V/tp]"""
        x = self.enter(self.groups.tp, self.normed(x, self.norm))
        return column_parallel(x, self.head)


def transformer(groups, stage=0, num_stages=1, num_experts=0):
    """Return stage `stage` of the model. Parameters have the same names on every stage as in the whole model."""
    if NUM_LAYERS % num_stages:
        raise ValueError(f"{num_stages} stages do not divide {NUM_LAYERS} layers; use minipar.partition")
    each = NUM_LAYERS // num_stages
    layers = {str(i): Block(groups, i, num_experts) for i in range(stage * each, (stage + 1) * each)}
    if stage == 0:
        layers = {"embedding": Embedding(groups), **layers}
    if stage == num_stages - 1:
        layers = {**layers, "head": Head(groups)}
    model = nn.Sequential()
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


def batch(step, size, length):
    """Return a step's (tokens, targets), [size, length]. They depend only on `step`, so every rank makes the same batch."""
    starts = torch.randint(len(TEXT) - length, (size, 1), generator=torch.Generator().manual_seed(step))
    samples = TEXT[starts + torch.arange(length + 1)]
    return samples[:, :-1], samples[:, 1:]
