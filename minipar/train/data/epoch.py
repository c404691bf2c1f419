"""Sampling without replacement, computed from the seed and the step, with nothing stored.

Each of the N samples of a text is drawn once per epoch, in an order that differs between epochs. If all epochs are laid end
to end, step k has the samples k*B to k*B + B - 1, so a step may end one epoch and begin the next.
"""

from __future__ import annotations

import hashlib
from typing import NamedTuple

import torch

from minipar.model.counter_dropout import mix

ROUNDS = 8


class EpochPlace(NamedTuple):
    """The position of a run in its data before a step: the epoch, and the number of its samples drawn so far."""

    epoch: int
    samples: int


def num_samples(num_tokens: int, seq_len: int) -> int:
    """Return the number of samples in a text. A sample also needs the token after its last one, as a target."""
    return (num_tokens - 1) // seq_len


def place_of_step(num_tokens: int, step: int, batch_size: int, seq_len: int) -> EpochPlace:
    return EpochPlace(*divmod(step * batch_size, num_samples(num_tokens, seq_len)))


def starts_of_step(num_tokens: int, seed: int, step: int, batch_size: int, seq_len: int) -> torch.Tensor:
    """Return the positions in the text at which the samples of a step begin, [batch_size] int64."""
    count, drawn = num_samples(num_tokens, seq_len), step * batch_size + torch.arange(batch_size)
    epochs, places = drawn // count, drawn % count
    for epoch in range(int(epochs[0]), int(epochs[-1]) + 1):
        now = epochs == epoch
        places[now] = shuffled(places[now], count, f"epoch {seed} {epoch}")
    return places * seq_len


def shuffled(places: torch.Tensor, count: int, key: str) -> torch.Tensor:
    """Return the elements at positions `places` of a random permutation of range(count), which depends only on `key`.

    The permutation is never stored: a Feistel network permutes all integers with as many bits as `count` needs, rounded up
    to an even number of bits. Results outside the range are permuted again, fewer than 4 times on average. Takes memory
    proportional to `places`, not to `count`.
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
