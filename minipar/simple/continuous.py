"""Continuous batching: sequences enter and leave the batch at every step.

A fixed batch runs until its longest sequence is done; by then the rows of all other sequences are padding. Here a step has

    first    decodes: one token of each running sequence whose prompt has been processed
    then     chunks of prompts, which fit what the decodes leave of the step's budget of tokens

so no sequence waits for a long one to end, and no decode waits for a long prompt. Sequences take blocks as they grow. When
none is free, the sequence that arrived last gives up all its blocks. It keeps its tokens, which are processed again at the
same positions when there are blocks, so it continues unchanged. The first sequence in the queue never gives up blocks, so
it is always finished.

In the library: minipar.inference, scheduler.py and engine.py, which add other orders, shared prefixes, drafts and metrics.
Source: Orca, OSDI 2022, section 4; Sarathi-Serve, arXiv:2403.02310.
"""

from .generate import whole_logits
from .paged import Pool, read


class Text:
    """An unfinished sequence: its tokens, how many of them are in the blocks of its table, and its length when finished."""

    def __init__(self, prompt, num_tokens):
        self.tokens, self.end = list(prompt), len(prompt) + num_tokens
        self.table, self.num_read = [], 0

    @property
    def unread(self):
        return self.tokens[self.num_read :]


def serve(groups, model, requests, num_blocks, block_size, budget):
    """Continue each request, a (prompt, num_tokens); return their new tokens, and the number of tokens in each step."""
    pool, texts, steps = Pool(model, num_blocks, block_size), [Text(*request) for request in requests], []
    if max(text.end for text in texts) > num_blocks * block_size:
        raise ValueError(f"{num_blocks} blocks of {block_size} cannot hold the longest text; minipar.inference "
                         "refuses that one and serves the others")  # fmt: skip
    while waiting := [text for text in texts if len(text.tokens) < text.end]:
        pieces = plan(pool, waiting, budget)
        steps.append(sum(len(tokens) for _, tokens in pieces))
        logits = read(model, pool, [(tokens, text.num_read, text.table) for text, tokens in pieces])
        advance(pool, pieces, whole_logits(groups, logits).argmax(-1).tolist())
    return [text.tokens[len(prompt) :] for text, (prompt, _) in zip(texts, requests)], steps


def plan(pool, waiting, budget):
    """Choose a step's pairs (sequence, tokens to process), and take blocks. `waiting`: unfinished sequences, in order."""
    pieces = []
    # Decodes first; otherwise in order of arrival.
    for text in sorted(waiting, key=lambda text: len(text.unread) > 1):
        tokens = text.unread[:budget]
        if tokens and room_for(pool, text, len(tokens), waiting, [other for other, _ in pieces]):
            pieces.append((text, tokens))
            budget -= len(tokens)
    return pieces


def room_for(pool, text, num_tokens, waiting, reading):
    """Take blocks for the next tokens. If too few are free, later sequences give up all of theirs, the latest first."""
    while not pool.grow(text.table, text.num_read + num_tokens):
        later = waiting[waiting.index(text) + 1 :]
        victims = [other for other in later if other.table and other not in reading]
        if not victims:
            return False
        pool.release(victims[-1].table)
        victims[-1].num_read = 0
    return True


def advance(pool, pieces, chosen):
    """Count processed tokens. A sequence without unread tokens appends the chosen one; a finished one frees its blocks."""
    for (text, tokens), token in zip(pieces, chosen):
        text.num_read += len(tokens)
        if not text.unread:
            text.tokens.append(token)
        if len(text.tokens) == text.end:
            pool.release(text.table)
