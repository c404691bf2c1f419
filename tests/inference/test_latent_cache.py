"""Requests of a model with latent attention: their texts alone, over latents in blocks, on any mesh."""

import pytest
import torch

import minipar
from minipar.config.model_config import ModelConfig
from minipar.inference import Engine, NGramDraft, Options, Request
from minipar.inference.blocks import cache_bytes
from minipar.model import LatentAttention
from tests.inference.meshes import cut
from tests.inference.texts import PROMPTS, VOCAB, texts_alone, tokens_of
from tests.model.texts import loud_model

LONGEST = 24
CONFIG = ModelConfig(
    vocab_size=VOCAB, dim=16, num_layers=2, num_heads=4, kv_latent_dim=6, rope_dim=4, max_seq_len=LONGEST
)
CROWDED = Options(block_size=4, num_blocks=9, token_budget=9, draft=NGramDraft(1))


def crowd() -> list[Request]:
    return [
        Request(PROMPTS[i % 2][: 8 + 4 * (i % 3 == 0)], 9 - i % 3, 8.0 * (i % 2), arrival_s=i // 2)
        for i in range(8)
    ]


def serve_on(world, sizes):
    """On a rank: texts, and the bytes of this rank's cache."""
    mesh, stage = cut(world, loud_model(CONFIG), sizes, pad_vocab=True)
    engine = Engine(stage, CROWDED, mesh)
    texts = tokens_of(engine.run(crowd()))
    return texts, sum(memory.nbytes for memory in engine.paged.memories)


@pytest.mark.filterwarnings("ignore:vocab_size=13 is cut over tp")
@pytest.mark.parametrize("sizes", [dict(tp=2, pp=1), dict(tp=2, pp=2), dict(tp=4, pp=1)])
@pytest.mark.thorough
def test_mesh_texts_are_the_same_and_tp_ranks_hold_all_latents(sizes):
    want = texts_alone(loud_model(CONFIG), crowd())
    of_all_layers = cache_bytes(CONFIG, CROWDED.num_blocks * CROWDED.block_size, CROWDED.block_size, 8)
    assert of_all_layers == 9 * 4 * 2 * (6 + 4) * 8
    for texts, held in minipar.run(serve_on, sizes, world_size=sizes["tp"] * sizes["pp"]):
        assert texts == want
        assert held == of_all_layers // sizes["pp"]


def latents_without_norm(self, x):
    return torch.cat((self.kv_down(x), self.k_rope(x)), dim=-1)


def test_a_norm_left_out_of_the_absorbed_path_changes_the_text(monkeypatch):
    model, whole = loud_model(CONFIG), LatentAttention.latents
    want = texts_alone(model, crowd())
    monkeypatch.setattr(
        LatentAttention,
        "latents",
        lambda self, x: (latents_without_norm if self.overrides.absorbed else whole)(self, x),
    )
    assert tokens_of(Engine(model, CROWDED).run(crowd())) != want
