"""Compiled blocks give the numbers of one process that is not compiled; what would break their graph is refused."""

import operator
from dataclasses import replace

import pytest
import torch

from minipar.config.model_config import ModelConfig
from minipar.config.train_config import VERIFY_DEFAULTS
from minipar.model import Transformer
from minipar.train.verification.verify import table, verify

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


@pytest.mark.thorough
def test_a_compiler_is_not_shown_the_hash_of_dropouts_masks():
    """Each of its steps uses the one before twice, and from the second step on its key is a symbol: it has no end."""
    model = Transformer(ModelConfig(dim=8, num_layers=1, num_heads=2, max_seq_len=8, dropout=0.5))
    tokens = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(0))
    shown = []

    def as_it_is(graph, inputs):
        shown.extend(node.target for node in graph.graph.nodes)
        return graph

    with torch.no_grad():
        want = [model.loss(tokens, tokens, step=step) for step in range(3)]
        model.layers["0"].compile(backend=as_it_is, dynamic=False)
        got = [model.loss(tokens, tokens, step=step) for step in range(3)]
    assert got == want
    assert len(set(map(float, want))) == 3
    assert torch.where in shown
    assert not {operator.rshift, operator.xor, operator.and_} & set(shown)
