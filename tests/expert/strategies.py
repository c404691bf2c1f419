"""What the tests of expert parallelism draw: a small model with experts, a mesh, and who has how many samples."""

from __future__ import annotations

from typing import NamedTuple

import torch
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.model import IGNORE_INDEX, Transformer, moe_layers
from tests.strategies import seeds, splits


class Case(NamedTuple):
    config: ModelConfig
    dp: int
    ep: int
    samples: list[int]  # of each dp rank
    length: int
    seed: int
    ties: bool  # a router of zeros: every token's choice is a tie
    algorithm: str
    dispatch: str = "all-to-all"
    options: dict = {}  # of the dispatch

    def model(self) -> Transformer:
        model = Transformer(self.config, self.seed).double()
        for _, moe in moe_layers(model):
            # Larger than at the start of a training, so that experts are unlike and some are avoided.
            moe.router.weight.data *= 0 if self.ties else 50
        return model

    def tokens(self, step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole batch of a step, and targets of which about a quarter are ignored."""
        generator = torch.Generator().manual_seed(self.seed + step)
        shape = (sum(self.samples), self.length)
        tokens, targets = torch.randint(self.config.vocab_size, (2, *shape), generator=generator)
        return tokens, targets.masked_fill(torch.rand(shape, generator=generator) < 0.25, IGNORE_INDEX)

    def rows(self, dp: int) -> torch.Tensor:
        """Which samples a dp rank has."""
        return torch.arange(sum(self.samples)).split(self.samples)[dp]


factors = st.sampled_from([0.1, 0.5, 1.0, 1.25, 2.0, None])


@st.composite
def restrictions(draw, num_experts: int, top_k: int) -> dict:
    """Of which experts a token uses: the second at random, and those of few nodes."""
    nodes = draw(st.sampled_from([n for n in range(1, num_experts + 1) if num_experts % n == 0]))
    limit = draw(st.integers(-(-top_k * nodes // num_experts), nodes))
    few = dict(expert_nodes=nodes, nodes_per_token=limit) if draw(st.booleans()) else {}
    return dict(random_second=top_k == 2 and draw(st.booleans())) | few


@st.composite
def moe_options(draw, num_experts: int) -> dict:
    """Any of the routers, with any of what keeps the load even."""
    router = draw(st.sampled_from(["top_k", "top_k", "noisy_top_k", "expert_choice"]))
    free = router != "expert_choice"
    top_k = draw(st.integers(1, min(3, num_experts)))
    factor = draw(factors if free else factors.filter(bool))
    return dict(
        num_experts=num_experts,
        router=router,
        top_k=top_k,
        capacity_factor=factor,
        group_tokens=draw(st.sampled_from([None, 1, 3, 4])),
        drop_order=draw(st.sampled_from(["position", "weight"])),
        jitter=draw(st.sampled_from([0.0, 0.3])),
        balance_bias=free and draw(st.booleans()),
        shared_dim=draw(st.sampled_from([0, 4])),
        **draw(restrictions(num_experts, top_k) if free else st.just({})),
        balance_coef=0.3,
        z_coef=0.1,
    )


@st.composite
def all_to_all(draw, ep: int) -> tuple[str, dict]:
    """The core's own dispatch, and its options: one level, or two."""
    return "all-to-all", dict(node_size=draw(node_sizes(ep)))


def node_sizes(ep: int):
    """None, or the ranks of a node."""
    return st.sampled_from([None, *(g for g in range(1, ep + 1) if ep % g == 0)])


@st.composite
def cases(draw, dispatches=all_to_all, min_ranks: int = 1, max_ranks: int = 8) -> Case:
    """dispatches(ep) draws (dispatch, options)."""
    ep = draw(st.integers(min_ranks, max_ranks))
    dispatch, options = draw(dispatches(ep))
    dp = ep * draw(st.integers(1, max_ranks // ep))
    config = ModelConfig(
        vocab_size=7,
        dim=4,
        num_layers=2,
        num_heads=2,
        hidden_dim=draw(st.integers(1, 5)),
        max_seq_len=16,
        moe_every=draw(st.integers(1, 2)),
        **draw(moe_options(ep * draw(st.integers(1, 3)))),
    )
    return Case(
        config=config,
        dp=dp,
        ep=ep,
        samples=draw(splits(draw(st.integers(1, 2 * dp)), dp)),
        length=draw(st.integers(1, 9)),
        seed=draw(seeds),
        ties=draw(st.sampled_from([False, False, True])),
        algorithm=draw(st.sampled_from(["auto", "native"])),
        dispatch=dispatch,
        options=options,
    )
