"""A small Transformer over bytes, and a rank's part of it: some of the layers (pp), some heads and features of each (tp).

    embedding -> block -> ... -> block -> head          block: x + attention(norm(x)), then x + mlp(norm(x))

Every rank builds the whole model from one seed, keeps its part and drops the rest: no weights are sent, and training starts
from the same numbers on every mesh.

In the library: minipar.Transformer, which adds rotary positions, grouped queries, experts, dropout, tied embeddings, and is
sharded by minipar.tensor_parallel and minipar.partition.
"""

from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from torch import nn

from minipar.simple.tensor_parallel import attention, columns, mlp, rows

DIM, HEAD_DIM, NUM_LAYERS = 64, 16, 4
CUTS = dict(q=rows, k=rows, v=rows, o=columns, gate=rows, up=rows, down=columns)
TEXT = torch.tensor(list("\n".join(topics.values()).encode()))  # the Python language reference, as bytes


class Alone:
    """A Comm of one rank, as far as a Block needs it."""

    all_reduce = staticmethod(lambda x: x)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.tp, self.norm = Alone, nn.ModuleList(nn.RMSNorm(DIM) for _ in range(2))
        for name in CUTS:
            self.register_parameter(name, nn.Parameter(torch.randn(DIM, DIM) / DIM**0.5))

    def cut(self, tp):
        for name, part_of in CUTS.items():
            self.register_parameter(name, nn.Parameter(part_of(tp, getattr(self, name))))
        self.tp = tp

    def forward(self, x):
        """x [B, T, D] -> [B, T, D]. No position encoding: the causal mask alone makes the order of tokens matter."""
        x = x + attention(self.tp, self.norm[0](x), self.q, self.k, self.v, self.o, HEAD_DIM)
        return x + mlp(self.tp, self.norm[1](x), self.gate, self.up, self.down)


def whole_model():
    """Build the model of one process: tokens [B, T] -> logits [B, T, 256]."""
    torch.manual_seed(0)
    blocks = (Block() for _ in range(NUM_LAYERS))
    return nn.Sequential(nn.Embedding(256, DIM), *blocks, nn.Linear(DIM, 256, bias=False)).double()


def part_of_model(model, pp, num_stages, tp):
    """Shard the model over the Comm `tp`; return stage `pp`. The first stage has the embedding, the last has the head."""
    if NUM_LAYERS % num_stages:
        raise ValueError(f"{num_stages} stages do not divide {NUM_LAYERS} layers; use minipar.partition")
    each = NUM_LAYERS // num_stages  # model[0]: the embedding, model[-1]: the head
    first, last = 1 + pp * each - (pp == 0), 1 + (pp + 1) * each + (pp == num_stages - 1)
    for block in model[1:-1]:
        block.cut(tp)
    return model[first:last]


def batch(step, size, length):
    """Return a step's (tokens, targets), [size, length]. They depend only on `step`, so every rank makes the same batch."""
    starts = torch.randint(len(TEXT) - length, (size, 1), generator=torch.Generator().manual_seed(step))
    samples = TEXT[starts + torch.arange(length + 1)]
    return samples[:, :-1], samples[:, 1:]


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())
