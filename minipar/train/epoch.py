"""Samples without replacement: which ones a step has is computed from the seed and the step, and nothing is stored.

A text of N samples gives every one of them once an epoch, in an order of the epoch's own. Step k has the samples k*B to
k*B + B - 1 of all epochs laid end to end, so a step may end one epoch and begin the next.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch

from minipar.model.counter_dropout import mix

ROUNDS = 8


class EpochPlace(NamedTuple):
    """The place of a run in its data before a step: the epoch, and how many of its samples have come."""

    epoch: int
    samples: int


def num_samples(num_tokens: int, seq_len: int) -> int:
    """The number of samples in a text: each has a target after its last token. The rest, below seq_len, is left out."""
    return (num_tokens - 1) // seq_len


def place_of_step(num_tokens: int, step: int, batch_size: int, seq_len: int) -> EpochPlace:
    return EpochPlace(*divmod(step * batch_size, num_samples(num_tokens, seq_len)))


def starts_of_step(num_tokens: int, seed: int, step: int, batch_size: int, seq_len: int) -> torch.Tensor:
    """The places in the text at which the samples of a step begin: [batch_size] int64."""
    count, drawn = num_samples(num_tokens, seq_len), step * batch_size + torch.arange(batch_size)
    epochs, places = drawn // count, drawn % count
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        now = epochs == epoch
        places[now] = shuffled(places[now], count, f"epoch {seed} {epoch}")
    return places * seq_len


def shuffled(places: torch.Tensor, count: int, key: str) -> torch.Tensor:
    """The elements at these places of a random order of range(count), which only `key` decides.

    The order is never made: a Feistel network permutes the numbers of as many bits, an even number, as `count` needs,
    and is applied again to what it maps outside the range, on average less than 4 times. Memory: that of `places`.
    Source: Luby and Rackoff, SIAM J. Comput. 17 (1988); cycle walking: Black and Rogaway, CT-RSA 2002.
    """
    half = max(1, -(-(count - 1).bit_length() // 2))
    digest = hashlib.blake2b(key.encode(), digest_size=4 * ROUNDS).digest()
    keys = [int.from_bytes(digest[i : i + 4]) for i in range(0, len(digest), 4)]

    def permuted(x: torch.Tensor) -> torch.Tensor:
        left, right = x >> half, x & (1 << half) - 1
        for word in keys:
            left, right = right, left ^ mix(word, right) & (1 << half) - 1
        return left << half | right

    found = permuted(places)
    while (outside := found >= count).any():
        found[outside] = permuted(found[outside])
    return found
