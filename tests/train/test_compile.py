"""Compiled blocks give the numbers of one process that is not compiled; what would break their graph is refused."""

from dataclasses import replace

import pytest
import torch

from minipar.config.model_config import ModelConfig
from minipar.config.train_config import VERIFY_DEFAULTS
from minipar.model import Transformer
from minipar.verification.verify import table, verify

EXPERTS = replace(VERIFY_DEFAULTS.model, num_experts=4)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (dict(tp=2), "tp=2 sends messages"),
        (dict(cp=2), "cp=2 sends messages"),
        (dict(model=EXPERTS), "experts read their numbers of rows"),
        (dict(dp=2, zero=3), "zero=3 swaps the weights"),
        (dict(recompute="selective"), "recompute=selective runs a block again"),
        (dict(offload_activations=True), "offload_activations moves what is saved"),
        (dict(pp=2, schedule="zb-h1"), "schedule=zb-h1 defers products"),
    ],
)
def test_what_would_break_a_blocks_graph_is_refused(options, reason):
    with pytest.raises(
        ValueError, match=f"compile=inductor makes one graph of a block, and in it {reason}; use"
    ):
        replace(VERIFY_DEFAULTS, compile="inductor", **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("backend", "options"), [("aot_eager", dict(dp=2, zero=1)), ("inductor", dict(pp=2, microbatches=2))]
)
def test_compiled_blocks_give_the_numbers_of_one_process(backend, options):
    config = replace(VERIFY_DEFAULTS, compile=backend, steps=3, timeout_s=300, **options)
    result = verify(config)
    assert result.equal, table(result)


def test_the_step_of_a_compiled_blocks_dropout_is_no_formula():
    """From the second step on, dynamo takes an int that has changed for a symbol: the masks' hash of one has no end."""
    model = Transformer(ModelConfig(dim=8, num_layers=1, num_heads=2, max_seq_len=8, dropout=0.5))
    tokens = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        want = [model.loss(tokens, tokens, step=step) for step in range(3)]
        model.layers["0"].compile(backend="eager", fullgraph=True)
        got = [model.loss(tokens, tokens, step=step) for step in range(3)]
    assert got == want
    assert len(set(map(float, want))) == 3
