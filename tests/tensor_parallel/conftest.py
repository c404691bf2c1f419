import importlib

import pytest
import torch

import minipar
from minipar.config.model_config import ModelConfig
from minipar.model import Transformer
from minipar.tensor_parallel import tensor_parallel


def warm_up(world) -> None:
    """What the tests come with and what torch loads at first use, before anybody waits for a message."""
    importlib.import_module("tests.tensor_parallel.strategies")
    config = ModelConfig(vocab_size=4, dim=4, num_layers=1, num_heads=1, hidden_dim=2)
    alone = world.subgroup([world.rank], "alone")
    tensor_parallel(Transformer(config), alone).loss(*torch.zeros(2, 1, 2, dtype=torch.int64)).backward()


@pytest.fixture(scope="session", autouse=True)
def eight_ranks():
    """One pool for all: worlds of fewer ranks are a part of it, and it is not grown time and again."""
    minipar.run(warm_up, world_size=8)
