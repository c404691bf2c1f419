"""Activations that are recomputed or offloaded are not kept: seen from the bytes alive, and from what is overwritten."""

import pytest
import torch

from minipar.config.model_config import ModelConfig
from minipar.model import Transformer
from minipar.support.live_bytes import LiveBytes
from minipar.train.recompute import recompute, relocate_activations

CONFIG = ModelConfig(vocab_size=16, dim=16, num_layers=3, num_heads=4, max_seq_len=32, attention="plain")
TOKENS = torch.randint(16, (2, 32), generator=torch.Generator().manual_seed(0))


def bytes_kept(mode: str, offload: bool = False) -> int:
    stage = Transformer(CONFIG)
    recompute(stage, mode)
    relocate_activations(stage, offload=offload)
    with LiveBytes() as memory:
        loss = stage.loss(TOKENS, TOKENS)
        kept = memory.now
    assert loss.requires_grad
    return kept


def test_selective_recomputation_keeps_no_scores_and_full_less():
    none, selective, full = (bytes_kept(mode) for mode in ("none", "selective", "full"))
    scores = 4 * CONFIG.num_layers * 2 * CONFIG.num_heads * 32 * 32  # probabilities
    inputs = 4 * CONFIG.num_layers * 2 * 32 * CONFIG.dim
    assert none - selective >= scores
    assert selective - full >= inputs  # queries, keys, values and the MLPs' tensors are many times these


def test_an_activation_that_several_operations_save_is_offloaded_once():
    assert bytes_kept("none", offload=True) <= bytes_kept("none")


def gradients(offload: bool) -> dict[str, torch.Tensor]:
    """After a forward whose blocks' inputs are overwritten: what the backward reads must lie elsewhere."""
    stage, inputs = Transformer(CONFIG), []
    recompute(stage, "full")
    relocate_activations(stage, offload=offload)
    for block in stage.layers.values():
        block.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
    loss = stage.loss(TOKENS, TOKENS)
    for x in inputs:
        x.data.fill_(torch.nan)
    loss.backward()
    return {name: p.grad for name, p in stage.layers.named_parameters()}


def test_offloaded_activations_are_elsewhere():
    want = Transformer(CONFIG)
    want.loss(TOKENS, TOKENS).backward()
    kept, offloaded = gradients(offload=False), gradients(offload=True)
    for name, p in want.layers.named_parameters():
        torch.testing.assert_close(offloaded[name], p.grad)
        assert kept[name].isnan().any(), name


@pytest.mark.parametrize("mode", ["selective", "full", "every:2"])
def test_recomputed_activations_give_the_same_bits(mode):
    want, stage = Transformer(CONFIG), Transformer(CONFIG)
    recompute(stage, mode)
    for model in (want, stage):
        model.loss(TOKENS, TOKENS).backward()
    for a, b in zip(want.parameters(), stage.parameters()):
        assert torch.equal(a.grad, b.grad)


def test_memory_used_again_is_not_taken_for_what_was_saved_in_it():
    found = []
    for offload in (False, True):
        stage = Transformer(CONFIG)
        relocate_activations(stage, offload=offload)
        stage.loss(TOKENS, TOKENS).backward()
        found.append([p.grad for p in stage.parameters()])
    torch.testing.assert_close(*found)
