"""What the tests of tensor parallelism draw: sizes that tp divides, and the batch they are tried on."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.model import IGNORE_INDEX, Transformer
from tests.strategies import seeds, world_sizes


class Case(NamedTuple):
    config: ModelConfig
    tp: int
    sequence_parallel: bool
    batch: int
    length: int
    seed: int
    algorithm: str = "auto"
    chunked: bool = False

    def model(self, **stage) -> Transformer:
        return Transformer(self.config, self.seed, **stage).double()

    def tokens(self, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The tokens of a step, and targets of which about a quarter are ignored."""
        generator = torch.Generator().manual_seed(self.seed + step)
        shape, vocab = (self.batch, self.length), self.config.vocab_size
        tokens, targets = torch.randint(vocab, (2, *shape), generator=generator)
        return tokens, targets.masked_fill(torch.rand(shape, generator=generator) < 0.25, IGNORE_INDEX)


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


SOMETIMES = st.sampled_from([False, False, True])


@st.composite
def cases(draw, tp=world_sizes, sequence_parallel=None, latent=SOMETIMES):
    """A small model that tp ranks can cut: as many key/value heads as they divide, or fewer than there are ranks."""
    tp, few = draw(tp), draw(st.integers(1, 2))
    short = draw(st.booleans())
    num_heads = tp * few
    fitting = [kv for kv in divisors(num_heads) if (tp % kv == 0 if short else kv % tp == 0)]
    attention = {
        "num_kv_heads": draw(st.sampled_from(fitting)),
    }
    if draw(st.booleans()):  # as Qwen's; a head's features are cut evenly where gradients of norms are summed
        attention |= {"head_dim": 2 * tp, "qkv_bias": draw(st.booleans()), "qk_norm": draw(st.booleans())}
    if draw(latent):
        attention = {
            "kv_latent_dim": draw(st.sampled_from([3, 8])),
            "rope_dim": draw(st.sampled_from([2, 4])),
        }
    config = ModelConfig(
        vocab_size=tp * draw(st.integers(2, 4)),
        dim=num_heads * draw(st.sampled_from([2, 4])),
        num_layers=draw(st.integers(1, 2)),
        num_heads=num_heads,
        **attention,
        hidden_dim=tp * draw(st.integers(1, 4)),
        max_seq_len=64,
        tie_embeddings=draw(st.booleans()),
        dropout=draw(st.sampled_from([0.0, 0.3])),
        attention=draw(st.sampled_from(["fused", "plain"])),
        parallel_block=draw(st.booleans()),
    )
    sequence_parallel = draw(st.booleans()) if sequence_parallel is None else sequence_parallel
    return Case(
        config=config,
        tp=tp,
        sequence_parallel=sequence_parallel,
        batch=draw(st.integers(1, 3)),
        length=tp * draw(st.integers(1, 2)),
        seed=draw(seeds),
        chunked=sequence_parallel and draw(st.booleans()),
        algorithm=draw(st.sampled_from(["auto", "ring", "native"])),
    )


def bytes_kept(model, x: torch.Tensor, case: Case) -> int:
    """Bytes of the distinct storages that the graph of the model's first layer keeps, parameters apart."""
    kept, parameters = {}, {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage  # held, so that no later one gets the same address
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = model.layers["0"](x, torch.arange(case.length), torch.arange(case.batch))
    assert y.requires_grad
    assert y.shape == x.shape
    return sum(storage.nbytes() for storage in kept.values())
