"""Sharding experts keeps the parameters' objects and flags."""

import pytest
import torch

import minipar
from minipar import ModelConfig, Transformer
from minipar.expert import expert_parallel


@pytest.mark.parametrize("trained", [True, False])
def test_sharded_experts_are_the_same_parameters_and_stay_frozen(trained):
    def kept(world):
        tokens = torch.arange(8).reshape(2, 4)
        sizes = dict(vocab_size=8, dim=8, num_layers=2, num_heads=2, hidden_dim=8, max_seq_len=4)
        model = Transformer(ModelConfig(**sizes, num_experts=2), seed=0)
        experts = next(m for m in model.modules() if getattr(m, "has_expert_parameters", False))
        experts.requires_grad_(trained)
        before = list(experts.parameters())
        output = model(tokens)  # kept, and with it the graph of the whole model
        expert_parallel(model, world)
        model(tokens).sum().backward()
        del output
        return [(a is b, b.shape[0], b.grad is not None) for a, b in zip(before, experts.parameters())]

    assert minipar.run(kept, world_size=2) == [[(True, 1, trained)] * 3] * 2
