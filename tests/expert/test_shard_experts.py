"""Sharding experts keeps the parameters' objects and flags."""

import minipar
from minipar import ModelConfig, Transformer
from minipar.expert import expert_parallel


def test_sharded_experts_are_the_same_parameters_and_stay_frozen():
    def kept(world):
        sizes = dict(vocab_size=8, dim=8, num_layers=2, num_heads=2, hidden_dim=8, max_seq_len=4)
        model = Transformer(ModelConfig(**sizes, num_experts=2), seed=0)
        experts = next(m for m in model.modules() if getattr(m, "has_expert_parameters", False))
        experts.requires_grad_(False)
        before = list(experts.parameters())
        expert_parallel(model, world)
        return [(a is b, b.shape[0], b.requires_grad) for a, b in zip(before, experts.parameters())]

    assert minipar.run(kept, world_size=2) == [[(True, 1, False)] * 3] * 2
