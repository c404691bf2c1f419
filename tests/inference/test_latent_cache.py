"""Requests of a model with latent attention: their texts alone, over latents in blocks, on any mesh."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import minipar
from minipar.config.model_config import ModelConfig
from minipar.inference import Engine, NGramDraft, Options, Request
from minipar.inference.blocks import cache_bytes
from minipar.mesh import Mesh
from minipar.model import LatentAttention
from minipar.pipeline import partition
from minipar.tensor_parallel import tensor_parallel
from tests.examples import examples
from tests.inference.texts import PROMPTS, VOCAB, alone, requests
from tests.model.texts import loud_model

LONGEST = 24
CONFIG = ModelConfig(
    vocab_size=VOCAB, dim=16, num_layers=2, num_heads=4, kv_latent_dim=6, rope_dim=4, max_seq_len=LONGEST
)
CROWDED = Options(block_size=4, num_blocks=9, token_budget=9, draft=NGramDraft(1))


@examples(25)
@given(
    several=st.lists(requests(LONGEST), min_size=1, max_size=6),
    block_size=st.integers(1, 6),
    more_blocks=st.sampled_from([0, 3, 50]),
    preemption=st.sampled_from(["recompute", "swap"]),
    draft=st.sampled_from([None, NGramDraft(1)]),
    core=st.sampled_from(["plain", "fused", "flash"]),
    one_by_one=st.booleans(),
)
def test_each_request_gets_the_text_it_gets_alone(several, block_size, more_blocks, core, **options):
    model = loud_model(replace(CONFIG, attention=core))
    num_blocks = -(-LONGEST // block_size) + more_blocks
    engine = Engine(model, Options(block_size, num_blocks, token_budget=7, **options))
    for result, request in zip(engine.run(several), several, strict=True):
        assert result.tokens == alone(model, request)


def crowd() -> list[Request]:
    return [
        Request(PROMPTS[i % 2][: 8 + 4 * (i % 3 == 0)], 9 - i % 3, 8.0 * (i % 2), arrival_s=i // 2)
        for i in range(8)
    ]


def serve_on(world, sizes):
    """On a rank: texts, and the bytes of this rank's cache."""
    mesh = Mesh(world, **sizes)
    stage = tensor_parallel(
        partition(loud_model(CONFIG), sizes["pp"])[mesh.coordinates.pp], mesh.comm("tp"), pad_vocab=True
    )
    engine = Engine(stage, CROWDED, mesh)
    texts = [result.tokens for result in engine.run(crowd())]
    return texts, sum(memory.nbytes for memory in engine.paged.memories)


@pytest.mark.filterwarnings("ignore:vocab_size=13 is cut over tp")
@pytest.mark.parametrize("sizes", [dict(tp=2, pp=1), dict(tp=2, pp=2), dict(tp=4, pp=1)])
@pytest.mark.thorough
def test_mesh_texts_are_the_same_and_tp_ranks_hold_all_latents(sizes):
    want = [alone(loud_model(CONFIG), request) for request in crowd()]
    of_all_layers = cache_bytes(CONFIG, CROWDED.num_blocks * CROWDED.block_size, CROWDED.block_size, 8)
    assert of_all_layers == 9 * 4 * 2 * (6 + 4) * 8
    for texts, held in minipar.run(serve_on, sizes, world_size=sizes["tp"] * sizes["pp"]):
        assert texts == want
        assert held == of_all_layers // sizes["pp"]


def latents_without_norm(self, x):
    return torch.cat((self.kv_down(x), self.k_rope(x)), dim=-1)


def test_a_norm_left_out_of_the_absorbed_path_changes_the_text(monkeypatch):
    model, whole = loud_model(CONFIG), LatentAttention.latents
    want = [alone(model, request) for request in crowd()]
    monkeypatch.setattr(
        LatentAttention,
        "latents",
        lambda self, x: (latents_without_norm if self.overrides.absorbed else whole)(self, x),
    )
    assert [result.tokens for result in Engine(model, CROWDED).run(crowd())] != want


def test_latents_are_not_rounded():
    said = "cache_bits=8 with kv_latent_dim=6: keys and values are rounded, latents are not; leave cache_bits out"
    with pytest.raises(ValueError, match=said):
        Engine(loud_model(CONFIG), Options(cache_bits=8))
