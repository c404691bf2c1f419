"""FSDP around a model of which a part is frozen: the root, an embedding, a norm, units that are recomputed together."""

from itertools import product

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import minipar
from minipar.data_parallel import FSDP
from tests.strategies import assert_equal_to


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 6), nn.Linear(6, 4)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """Token ids go in; all blocks may be recomputed together, as one activation checkpoint."""

    def __init__(self, frozen, together):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.norm, self.head = nn.Embedding(7, 4), nn.LayerNorm(4), nn.Linear(4, 7)
        self.blocks, self.together = nn.Sequential(Block(), Block(), Block()), together
        self.double()
        for name, p in self.named_parameters():
            p.requires_grad_(not name.startswith(frozen))

    def forward(self, tokens):
        x = self.embedding(tokens)
        x = checkpoint(self.blocks, x, use_reentrant=False) if self.together else self.blocks(x)
        return self.head(self.norm(x))


FROZEN = [
    ("embedding", "norm", "head"),  # the root, as with LoRA in the blocks
    ("embedding", "blocks", "norm"),
    ("blocks.1", "norm"),
    ("blocks.0", "blocks.2.norm"),
    ("embedding", "blocks.0", "blocks.1.norm", "head"),
]
OPTIONS = [{}, dict(reshard_after_forward=False), dict(shard_rest=False), dict(prefetch=False)]
TOKENS = torch.arange(8).view(4, 2) * 3 % 7


def trained(model, tokens):
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(2):
        model((tokens + step) % 7).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def on_ranks(world, frozen):
    states = []
    for together, options in product((False, True), OPTIONS):
        fsdp = FSDP(Net(frozen, together), world, Block, **options)
        trained(fsdp, TOKENS.chunk(world.size)[world.rank])
        states.append(fsdp.full_state_dict())
    return states


@pytest.mark.parametrize("frozen", FROZEN)
def test_a_model_with_frozen_parts_trains_as_in_one_process(frozen):
    model = Net(frozen, False)
    trained(model, TOKENS)
    for states in minipar.run(on_ranks, frozen, world_size=2):
        for state in states:
            for name, want in model.state_dict().items():
                assert_equal_to(state[name], want, what=name)


def frozen_now_and_then(world):
    fsdp = FSDP(Net((), False), world, Block)
    train_now_and_then(fsdp, fsdp.module, TOKENS.chunk(world.size)[world.rank])
    return fsdp.full_state_dict()


def train_now_and_then(model, module, tokens):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        for part in (module.norm, module.blocks[1]):
            part.requires_grad_(step != 1)
        optimizer.zero_grad()
        model(tokens).square().mean().backward()
        optimizer.step()


def test_what_is_frozen_for_a_while_is_not_trained_then():
    model = Net((), False)
    train_now_and_then(model, model, TOKENS)
    for state in minipar.run(frozen_now_and_then, world_size=2):
        for name, want in model.state_dict().items():
            assert_equal_to(state[name], want, what=name)
