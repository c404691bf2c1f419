"""A step's routing metrics are of that step's tokens, however often the run evaluates."""

import pytest

from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig
from minipar.train import train

ROUTING = ("balance_loss", "z_loss", "drop_rate", "unserved", "router_entropy", "imbalance")


def metrics(folder, eval_every: int) -> list[list[float]]:
    model = ModelConfig(dim=16, num_layers=2, num_heads=2, max_seq_len=32, num_experts=4, group_tokens=8)
    run = train(
        TrainConfig(
            model=model,
            batch_size=4,
            seq_len=32,
            steps=3,
            warmup=1,
            dtype="float64",
            verify_steps=0,
            trace_steps=0,
            eval_every=eval_every,
            out=folder,
        )
    )
    assert [("eval_loss" in step) for step in run.metrics].count(True) == 3 // eval_every
    return [[step[name] for name in ROUTING] for step in run.metrics]


@pytest.mark.thorough
def test_evaluation_is_not_counted_in_a_steps_routing_metrics(tmp_path):
    assert metrics(tmp_path / "often", 1) == metrics(tmp_path / "at the end", 3)
