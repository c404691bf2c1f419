"""Auxiliary losses reach the gradients with the loss's own factors; evaluation leaves no trace in the balance."""

import torch

from minipar.config.model_config import ModelConfig
from minipar.model import Transformer, moe_layers, set_num_groups, update_balance_bias
from tests.strategies import assert_equal_to

CONFIG = ModelConfig(
    vocab_size=7,
    dim=8,
    num_layers=2,
    num_heads=2,
    num_experts=4,
    moe_every=1,
    balance_coef=0.5,
    z_coef=0.3,
    balance_bias=True,
)
TEXT = torch.randint(7, (2, 8), generator=torch.Generator().manual_seed(0))


def gradients(scale: float, loss_scale: float) -> dict[str, torch.Tensor]:
    model = Transformer(CONFIG).double()
    set_num_groups(model, None, loss_scale)
    (model.loss(TEXT, TEXT) * scale).backward()
    return {name: p.grad / scale for name, p in model.named_parameters()}


def test_a_scaled_loss_and_its_auxiliary_losses_have_one_scale():
    want = gradients(1.0, 1.0)
    for name, found in gradients(1024.0, 1024.0).items():
        assert_equal_to(found, want[name], what=name)
    unscaled = gradients(1024.0, 1.0)  # a seeded fault: the scale is not carried to the auxiliary losses
    name = "layers.0.mlp.router.weight"
    assert (unscaled[name] - want[name]).abs().max() > 0.01 * want[name].abs().max()


def test_evaluation_does_not_count_in_the_load_that_moves_the_biases():
    model = Transformer(CONFIG)
    model.eval().loss(TEXT, TEXT)
    update_balance_bias(model)
    assert all(not moe.balance_bias.any() for _, moe in moe_layers(model))
    model.train().loss(TEXT, TEXT)
    update_balance_bias(model)
    assert all(moe.balance_bias.any() for _, moe in moe_layers(model))
