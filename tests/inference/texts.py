"""Requests, and what each of them gets alone: one process, no cache, no batch, no blocks."""

from collections.abc import Sequence
from dataclasses import replace

import torch
from hypothesis import strategies as st

from minipar.config.model_config import ModelConfig
from minipar.inference import ModelDraft, NGramDraft, Options, Result
from minipar.inference.blocks import blocks_for
from minipar.inference.policy import POLICIES
from minipar.inference.request import Request, distribution
from minipar.model import Transformer
from minipar.model.sampling import choose
from tests.model.texts import loud_model

VOCAB, LONGEST = 13, 24


@torch.no_grad()
def alone(model, request: Request) -> list[int]:
    """The new tokens by the plain loop: the whole text is read anew for each token."""
    text = list(request.prompt)
    while True:
        logits = model(torch.tensor([text]))[0, -1]
        if request.temperature == 0:
            text.append(int(logits.argmax()))
        elif logits.isnan().any():
            text.append(0)
        else:
            text.append(choose(distribution(logits, request), request.seed, len(text)))
        if len(text) == request.max_tokens or text[-1] in request.end_tokens:
            return text[len(request.prompt) :]


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def texts_alone(model, several: Sequence[Request]) -> list[list[int]]:
    return [alone(model, request) for request in several]


def tokens_of(results: Sequence[Result]) -> list[list[int]]:
    return [result.tokens for result in results]


BAD = 12


def model_with_a_bad_token(config: ModelConfig) -> Transformer:
    """A loud model that has nan wherever it has read the token BAD."""
    model = loud_model(replace(config, tie_embeddings=False))
    with torch.no_grad():
        model.embedding.weight[BAD] = torch.nan
    return model


def outcome_alone(model, request: Request) -> tuple[list[int], bool]:
    """The new tokens up to BAD or the end, and whether the text ends because no further token can be chosen."""
    if BAD in request.prompt:
        return [], True
    tokens = alone(model, request)
    before = tokens.index(BAD) + 1 if BAD in tokens else len(tokens)
    return tokens[:before], before < len(tokens)


def outcomes_alone(model, several: Sequence[Request]) -> list[tuple[list[int], bool]]:
    return [outcome_alone(model, request) for request in several]


# What a request may begin with: few, so that prefixes are shared, also by halves of blocks.
PROMPTS = [tuple((7 * i + i * i * k + k) % VOCAB for i in range(40)) for k in range(3)]


@st.composite
def requests(draw, max_tokens: int, temperatures=(0.0, 0.0, 8.0, 40.0)) -> Request:
    length = draw(st.integers(1, max_tokens - 1))
    own = draw(st.integers(0, min(2, length)))  # the last tokens may be the request's own
    prompt = draw(st.sampled_from(PROMPTS))[: length - own]
    return Request(
        prompt + tuple(draw(st.lists(st.integers(0, VOCAB - 1), min_size=own, max_size=own))),
        max_new_tokens=draw(st.integers(1, max_tokens - length)),
        temperature=draw(st.sampled_from(temperatures)),
        top_k=draw(st.sampled_from([None, None, 3])),
        top_p=draw(st.sampled_from([1.0, 0.8])),
        seed=draw(st.integers(0, 3)),
        end_tokens=draw(st.sampled_from([frozenset(), frozenset({4})])),
        arrival_s=draw(st.sampled_from([0.0, 0.0, 1.0, 2.5, 30.0])),
    )


DRAFT_CONFIG = ModelConfig(vocab_size=VOCAB, dim=8, num_layers=1, num_heads=1, max_seq_len=LONGEST)


@st.composite
def options(draw, rules=("same text",), cp=1) -> Options:
    """Options with blocks that cp divides, and hardly enough of them."""
    block_size = draw(st.integers(1, 6)) if cp == 1 else cp * draw(st.integers(1, 2))
    enough = blocks_for(LONGEST - 1, block_size)  # for one request, so that several fight for them
    return Options(
        block_size=block_size,
        num_blocks=enough + draw(st.sampled_from([0, 1, 3, 50])),
        token_budget=draw(st.sampled_from([1, 3, 7, 100])),
        max_running=draw(st.sampled_from([1, 2, 50])),
        policy=draw(st.sampled_from(list(POLICIES))),
        prefix_cache=draw(st.booleans()),
        preemption=draw(st.sampled_from(["recompute", "swap"])),
        draft=draw(st.sampled_from([None, NGramDraft(1), ModelDraft(loud_model(DRAFT_CONFIG))])),
        num_drafts=draw(st.integers(1, 4)),
        rule=draw(st.sampled_from(rules)),
    )
