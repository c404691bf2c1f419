"""Problems of lessons 18 and 19: one token at a time, many requests."""

from __future__ import annotations

from math import ceil

from minipar.cost.model_table import find_model
from minipar.cost.serving import cache_token_bytes
from minipar.learn.exercises.problems.card import Card, problem

GIGA, TERA = 1e9, 1e12
MODELS: tuple[tuple[str, int, int], ...] = (("llama-7b", 32, 32), ("llama3-8b", 32, 8), ("llama-70b", 80, 8))


@problem(
    "18",
    billions=(7, 8, 13),
    terabytes=(2.0, 3.35, 8.0),
    batch=(1, 8, 32),
    context=(1024, 4096),
    kilobytes=(128, 160),
)
def least_time_of_a_step(billions: int, terabytes: float, batch: int, context: int, kilobytes: int) -> Card:
    return Card(
        f"{billions} billion weights in 16 bits and a cache of {kilobytes} kB a token are read from memory at "
        f"{terabytes:g} TB/s. How many ms does a step of decoding take at least, for {batch} requests of "
        f"{context} tokens?",
        (2 * billions * GIGA + batch * context * kilobytes * 1e3) / (terabytes * TERA) * 1e3,
        "ms",
        (
            "all weights once, and the cache of every request: (2 P + b s c)/W",
            f"(2 * {billions}e9 + {batch} * {context} * {kilobytes}e3) / {terabytes:g}e12 * 1e3",
        ),
    )


@problem("18", model=MODELS, context=(2048, 8192, 32768))
def cache_of_a_request(model: tuple[str, int, int], context: int) -> Card:
    name, layers, kv_heads = model
    return Card(
        f"A model has {layers} layers and {kv_heads} key/value heads of 128 features. How many MB is the cache "
        f"of a request of {context} tokens, in 16 bits?",
        context * cache_token_bytes(find_model(name)) / 1e6,
        "MB",
        (
            "a key and a value for each layer and head: 2 L h_kv d e a token",
            f"{context} * 2 * {layers} * {kv_heads} * 128 * 2 / 1e6",
        ),
    )


@problem("18", guesses=(2, 3, 4, 8), percent=(50, 60, 70, 80, 90))
def tokens_of_a_guessing_step(guesses: int, percent: int) -> Card:
    a = percent / 100
    return Card(
        f"A draft model guesses {guesses} tokens; each is accepted with probability {percent} %, until one is "
        "not, whose place the large model fills. How many tokens does a step of the large model give, on "
        "average?",
        (1 - a ** (guesses + 1)) / (1 - a),
        "tokens",
        (
            "1 + a + a^2 + ... + a^k = (1 - a^(k+1))/(1 - a)",
            f"(1 - {a:g}**{guesses + 1}) / (1 - {a:g})",
        ),
    )


@problem("19", rate=(2, 5, 20), answer=(100, 200, 500), milliseconds=(15, 25, 40))
def requests_in_flight(rate: int, answer: int, milliseconds: int) -> Card:
    return Card(
        f"{rate} requests a second arrive, each of which is written {answer} tokens; a step takes "
        f"{milliseconds} ms, and nobody waits for a place. How many requests are in the batch on average?",
        rate * answer * milliseconds * 1e-3,
        "requests",
        (
            "Little's law: rate times the time that each stays, answer * step",
            f"{rate} * {answer} * {milliseconds}e-3",
        ),
    )


@problem("19", lengths=((10, 80, 20, 40), (64, 8, 16, 128), (30, 35, 200, 55, 20, 60), (16, 16, 16, 512)))
def idle_places_of_a_static_batch(lengths: tuple[int, ...]) -> Card:
    work, places = sum(lengths), len(lengths) * max(lengths)
    return Card(
        f"A static batch of {len(lengths)} requests writes {', '.join(map(str, lengths))} tokens. Which part "
        "of its places computes for nobody, in %?",
        100 * (1 - work / places),
        "%",
        (
            "it takes as many steps as its longest answer: 1 - sum/(n max)",
            f"100 * (1 - ({' + '.join(map(str, lengths))}) / ({len(lengths)} * {max(lengths)}))",
        ),
    )


@problem("19", prompt=(2000, 8000, 30000), budget=(512, 2048), decodes=(32, 64, 200), milliseconds=(20, 35))
def first_token_of_a_long_prompt(prompt: int, budget: int, decodes: int, milliseconds: int) -> Card:
    steps = ceil(prompt / (budget - decodes))
    return Card(
        f"A prompt of {prompt} tokens is read in pieces: a step has a budget of {budget} tokens, of which "
        f"{decodes} requests that are writing take one each, and takes {milliseconds} ms. After how many ms is "
        "its first token there?",
        steps * milliseconds,
        "ms",
        (
            "a step reads budget - decodes tokens of it; the last of them gives the first token",
            f"ceil({prompt} / ({budget} - {decodes})) * {milliseconds}",
        ),
        0.0,
    )
