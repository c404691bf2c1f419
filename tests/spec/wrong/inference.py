"""Wrong and unusual pieces of inference: a cache, a paged cache, accepting guesses, a scheduler's step.

WORDS: what the report says of a mistake, by specification.
"""

from types import SimpleNamespace

import torch
import torch.nn.functional as F

from minipar.inference.blocks import BlockPool
from minipar.model.attention import plain_attention
from minipar.simple import continuous, paged, speculative
from tests.spec.library import SchedulerOfTheLibrary
from tests.spec.wrong.generic import nan_as_zero, rounded, with_dense_strides

# A cache of keys and values ---------------------------------------------------------------


class Cache:
    """Right: to be made wrong in one method."""

    def __init__(self):
        self.k = self.v = None

    def keep(self, k, v):
        if self.k is not None:
            k, v = torch.cat((self.k, k), 2), torch.cat((self.v, v), 2)
        self.k, self.v = k, v

    def __call__(self, q, k, v):
        self.keep(k, v)
        return self.attend(q, self.k, self.v)

    def attend(self, q, k, v):
        return plain_attention(q, k, v)

    def cut(self, length):
        self.k, self.v = self.k[:, :, :length], self.v[:, :, :length]


def attending(attend):
    return type("Wrong", (Cache,), {"attend": lambda self, q, k, v: attend(q, k, v)})


def cutting(cut):
    return type("Wrong", (Cache,), {"cut": cut})


def changing(change):
    class Wrong(Cache):
        def __call__(self, q, k, v):
            return super().__call__(*map(change, (q, k, v)))

    return Wrong


class KeepsOnePiece(Cache):
    def keep(self, k, v):
        self.k, self.v = k, v


class KeepsSixtyFourTokens(Cache):
    def __call__(self, q, k, v):
        out = super().__call__(q, k, v)
        self.k, self.v = self.k[:, :, -64:], self.v[:, :, -64:]
        return out


class KeepsKeysTwice(Cache):
    def keep(self, k, v):
        super().keep(k, k)


class KeepsEveryVersion(Cache):
    def __init__(self):
        super().__init__()
        self.versions = []

    def keep(self, k, v):
        super().keep(k, v)
        self.versions.append((self.k, self.v))


class ScalesInPlace(Cache):
    def attend(self, q, k, v):
        return plain_attention(q.mul_(2), k, v) if q.shape[2] == 1 else plain_attention(q, k, v)


class FailsOnNothing(Cache):
    def __call__(self, q, k, v):
        q[:, :, 0]  # IndexError where the piece is empty
        return super().__call__(q, k, v)


def shared_by_all():
    """All caches have one memory, as class attributes do that are never set on the object."""
    kept = []

    class Wrong(Cache):
        def keep(self, k, v):
            if kept and kept[0].shape[:2] == k.shape[:2] and kept[0].shape[3] == k.shape[3]:
                k, v = torch.cat((kept[0], k), 2), torch.cat((kept[1], v), 2)
            kept[:] = k, v
            self.k, self.v = k, v

        def cut(self, length):
            super().cut(length)
            kept[:] = self.k, self.v

    return Wrong


def top_left(q, k, v):
    seen = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).tril()
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)


def without_a_maximum(q, k, v):
    T, S = q.shape[2], k.shape[2]
    weights = (q @ k.transpose(2, 3) / q.shape[3] ** 0.5).exp() * torch.ones(T, S, dtype=q.dtype).tril(S - T)
    return weights / weights.sum(3, keepdim=True) @ v


class InABuffer(Cache):
    """Right: a buffer that doubles."""

    def __init__(self):
        self.buffer, self.length = None, 0

    def __call__(self, q, k, v):
        new = torch.stack((k, v))
        end = self.length + k.shape[2]
        if self.buffer is None or end > self.buffer.shape[3]:
            shape = (*new.shape[:3], max(1, 2 * end), new.shape[4])
            larger = new.new_zeros(shape)
            if self.buffer is not None:
                larger[:, :, :, : self.length] = self.buffer[:, :, :, : self.length]
            self.buffer = larger
        self.buffer[:, :, :, self.length : end] = new
        self.length = end
        return plain_attention(q, *self.buffer[:, :, :, :end])

    def cut(self, length):
        self.length = length


class OneByOne:
    """Right: a list of single tokens, and a softmax by hand, token by token."""

    def __init__(self):
        self.tokens = []

    def __call__(self, q, k, v):
        outs = []
        for t in range(q.shape[2]):
            self.tokens.append((k[:, :, t], v[:, :, t]))
            keys, values = (torch.stack(x, 2) for x in zip(*self.tokens))
            scores = (q[:, :, t, None] * keys).sum(3) / q.shape[3] ** 0.5
            outs.append((scores.softmax(2)[..., None] * values).sum(2))
        return torch.stack(outs, 2) if outs else torch.empty_like(q)

    def cut(self, length):
        del self.tokens[length:]


KV_CACHE = {
    "keeps one piece": KeepsOnePiece,
    "keeps 64 tokens": KeepsSixtyFourTokens,
    "keeps keys as values": KeepsKeysTwice,
    "keeps every version": KeepsEveryVersion,
    "no causal mask": attending(lambda q, k, v: plain_attention(q, k, v, causal=False)),
    "as if the first piece": attending(top_left),
    "not scaled": attending(lambda q, k, v: plain_attention(q * q.shape[3] ** 0.5, k, v)),
    "no maximum": attending(without_a_maximum),
    "cut does nothing": cutting(lambda self, length: None),
    "cut from the front": cutting(
        lambda self, length: vars(self).update(k=self.k[:, :, -length:], v=self.v[:, :, -length:])
    ),
    "scales q in place": ScalesInPlace,
    "fails on an empty piece": FailsOnNothing,
    "one memory for all": shared_by_all(),
    "first text of the batch alone": attending(lambda q, k, v: plain_attention(q, k[:1], v[:1]) + 0 * q),
    "float64 as float32": changing(rounded(torch.float64, torch.float32)),
    "wrong in float32": changing(lambda x: 2 * x if x.dtype == torch.float32 else x),
    "ignores strides": changing(with_dense_strides),
    "nan is zero": changing(nan_as_zero),
}

# A paged cache ----------------------------------------------------------------------------


def pages(attention=paged.paged_attention, pool=BlockPool):
    return SimpleNamespace(BlockPool=pool, paged_attention=attention)


def as_if(change):
    """The pass is computed of other arguments."""

    def wrong(memory, size, pieces, q, k, v):
        return paged.paged_attention(*change(memory, size, pieces, q, k, v))

    return wrong


def written(where, values=lambda k, v: (k, v)):
    """Token t of a text is written to the place `where(t, size)`, (number in the table, place in the block)."""

    def wrong(memory, size, pieces, q, k, v):
        row = 0
        right = memory.clone()
        out = paged.paged_attention(right, size, pieces, q, k, v)
        for tokens, begin, table in pieces:
            for t in range(begin, begin + len(tokens)):
                number, place = where(t, size)
                for which, x in enumerate(values(k[row, :, 0], v[row, :, 0])):
                    memory[which, table[number % len(table)], place] = x
                row += 1
        return out

    return wrong


def attends(attend):
    """attend(q [1, H, T, d], keys, values [1, H, blocks * size, d], begin, end) in place of causal attention."""

    def wrong(memory, size, pieces, q, k, v):
        paged.paged_attention(memory, size, pieces, q, k, v)
        outs, row = [], 0
        for tokens, begin, table in pieces:
            keys, values = memory[:, table].flatten(1, 2).transpose(1, 2).unsqueeze(1)
            own = q[row : row + len(tokens)].permute(2, 1, 0, 3)
            outs.append(attend(own, keys, values, begin, begin + len(tokens)).permute(2, 1, 0, 3))
            row += len(tokens)
        return torch.cat(outs)

    return wrong


def reads_a_reshaped_copy(memory, size, pieces, q, k, v):
    """The new tokens are written to memory.reshape(...), which is a copy where the memory is strided."""
    flat = memory.contiguous()
    return paged.paged_attention(flat, size, pieces, q, k, v)


def first_piece_alone_is_written(memory, size, pieces, q, k, v):
    right = memory.clone()
    out = paged.paged_attention(right, size, pieces, q, k, v)
    n = len(pieces[0][0])
    paged.paged_attention(memory, size, pieces[:1], q[:n], k[:n], v[:n])
    return out


def clears_the_unused(memory, size, pieces, q, k, v):
    """Memory that belongs to nobody in this pass is set to zero."""
    held = {block for _, _, table in pieces for block in table}
    for block in set(range(memory.shape[1])) - held:
        memory[:, block] = 0
    return paged.paged_attention(memory, size, pieces, q, k, v)


def every_text_reads_the_first_rows(memory, size, pieces, q, k, v):
    out = paged.paged_attention(memory, size, pieces, q, k, v)
    n = len(pieces[0][0])
    return torch.cat([out[:n], *(out[:1].expand(len(p[0]), *out.shape[1:]) for p in pieces[1:])])


def up_to_64_tokens(q, keys, values, begin, end):
    first = max(0, end - 64)
    return plain_attention(q, keys[:, :, first:end], values[:, :, first:end])


class FreesTwice(BlockPool):
    def release(self, block):
        self.holders[block] = 0
        self._free.append(block)


class NeverTakesBack(BlockPool):
    def release(self, block):
        self._require_held(block)
        self.holders[block] = 0


class ReturnsNothing(BlockPool):
    def allocate(self):
        return super().allocate() if self._free else None


class CountsOn(BlockPool):
    """Blocks are numbered as they are taken, and none is used again."""

    def allocate(self):
        block = super().allocate()
        self.count = getattr(self, "count", -1) + 1
        self.holders[self.count % self.num_blocks] = 1
        return min(self.count, self.num_blocks - 1) if self.count >= 0 else block


def one_pool_for_all():
    kept = {}

    class Wrong(BlockPool):
        def __init__(self, num_blocks, block_size):
            super().__init__(num_blocks, block_size)
            vars(self).update(kept.setdefault(num_blocks, vars(self)))

    return Wrong


class InOrder:
    """Right: the block that was released first is taken first; a set of what is held."""

    def __init__(self, num_blocks, block_size):
        self.free, self.held = list(range(num_blocks)), set()

    def allocate(self):
        if not self.free:
            raise RuntimeError("out of blocks")
        block = self.free.pop(0)
        self.held.add(block)
        return block

    def release(self, block):
        if block not in self.held:
            raise RuntimeError(f"block {block} is not held")
        self.held.remove(block)
        self.free.append(block)


def masked(memory, size, pieces, q, k, v):
    """Right: all slots are written at once, and the unused ones masked instead of cut off, values too."""
    places = [
        (table[t // size], t % size)
        for tokens, begin, table in pieces
        for t in range(begin, begin + len(tokens))
    ]
    blocks, slots = (torch.tensor(x, dtype=torch.int64) for x in (zip(*places) if places else ((), ())))
    memory[:, blocks, slots] = torch.stack((k[:, :, 0], v[:, :, 0]))
    outs, row = [], 0
    for tokens, begin, table in reversed(pieces):
        keys, values = memory[:, table].flatten(1, 2).transpose(1, 2)
        rows = slice(len(q) - row - len(tokens), len(q) - row)
        row += len(tokens)
        scores = q[rows].permute(2, 1, 0, 3)[0] @ keys.transpose(1, 2) / q.shape[3] ** 0.5
        later = torch.arange(keys.shape[1])[None] > torch.arange(begin, begin + len(tokens))[:, None]
        values = values.masked_fill(later.all(0)[:, None], 0)
        outs.append((scores.masked_fill(later, -torch.inf).softmax(2) @ values).transpose(0, 1)[:, :, None])
    return torch.cat(outs[::-1])


def rows_as(change):
    return as_if(lambda memory, size, pieces, *rows: (memory, size, pieces, *map(change, rows)))


PAGED = {
    "the table is sorted": pages(
        as_if(lambda m, size, pieces, *rows: (m, size, [(t, b, sorted(x)) for t, b, x in pieces], *rows))
    ),
    "one place further": pages(written(lambda t, size: (t // size, (t + 1) % size))),
    "keys and values swapped": pages(written(lambda t, size: (t // size, t % size), lambda k, v: (v, k))),
    "first piece alone is written": pages(first_piece_alone_is_written),
    "every text reads the first rows": pages(every_text_reads_the_first_rows),
    "clears the unused": pages(clears_the_unused),
    "reads the unused end": pages(
        attends(lambda q, k, v, begin, end: plain_attention(q, k, v, causal=False))
    ),
    "no causal mask": pages(
        attends(lambda q, k, v, begin, end: plain_attention(q, k[:, :, :end], v[:, :, :end], causal=False))
    ),
    "new tokens alone": pages(
        attends(lambda q, k, v, begin, end: plain_attention(q, k[:, :, begin:end], v[:, :, begin:end]))
    ),
    "not scaled": pages(
        attends(
            lambda q, k, v, begin, end: plain_attention(q * q.shape[3] ** 0.5, k[:, :, :end], v[:, :, :end])
        )
    ),
    "64 tokens at most": pages(attends(up_to_64_tokens)),
    "written to a copy": pages(reads_a_reshaped_copy),
    "float64 as float32": pages(rows_as(rounded(torch.float64, torch.float32))),
    "wrong in float32": pages(rows_as(lambda x: 2 * x if x.dtype == torch.float32 else x)),
    "ignores strides": pages(rows_as(with_dense_strides)),
    "nan is zero": pages(rows_as(nan_as_zero)),
    "block freed twice": pages(pool=FreesTwice),
    "block never taken back": pages(pool=NeverTakesBack),
    "nothing when full": pages(pool=ReturnsNothing),
    "one block for two": pages(pool=CountsOn),
    "one pool for all": pages(pool=one_pool_for_all()),
}

# Accept or resample -----------------------------------------------------------------------


def rule(ratio=None, rest=None, row=None, last=None, in_float32=False):
    """The rule, with one of its formulas replaced."""
    ratio = ratio or (lambda p, q, token: min(1.0, (p[token] / q[token]).item()))
    rest = rest or (lambda p, q: (p - q).clamp_min(0.0) / (p - q).clamp_min(0.0).sum())
    last = last or (lambda p, guesses: p[len(guesses)])
    row = row or (lambda i: i)

    def wrong(p, guesses, dice):
        if in_float32:
            p, guesses = p.float(), [(token, q.float()) for token, q in guesses]
        text = []
        for i, (token, q) in enumerate(guesses):
            if not dice.accepts(i, ratio(p[row(i)], q, token)):
                return [*text, dice.draw(i, rest(p[row(i)], q))]
            text.append(token)
        return [*text, dice.draw(len(guesses), last(p, guesses))]

    return wrong


def never_accepts(p, guesses, dice):
    return [dice.draw(0, p[0])]


def keeps_equal_tokens(p, guesses, dice):
    """The model draws; the guess is right if it is the same token."""
    text = []
    for i, (token, _) in enumerate(guesses):
        text.append(dice.draw(i, p[i]))
        if text[-1] != token:
            return text
    return [*text, dice.draw(len(guesses), p[len(guesses)])]


def no_token_more(p, guesses, dice):
    text = speculative.accept_or_resample(p, guesses, dice)
    return text[: len(guesses)] if guesses else text


def goes_on_after_a_rejection(p, guesses, dice):
    text = []
    for i, (token, q) in enumerate(guesses):
        if dice.accepts(i, min(1.0, (p[i][token] / q[token]).item())):
            text.append(token)
        else:
            rest = (p[i] - q).clamp_min(0.0)
            text.append(dice.draw(i, rest / rest.sum()))
    return [*text, dice.draw(len(guesses), p[len(guesses)])]


def one_index_for_all(p, guesses, dice):
    first = type(
        "First", (), {"accepts": lambda _, i, x: dice.accepts(0, x), "draw": lambda _, i, x: dice.draw(0, x)}
    )
    return speculative.accept_or_resample(p, guesses, first())


def without_dice(p, guesses, dice):
    return speculative.accept_or_resample(p, guesses, speculative.Dice(0))


def subtracts_in_place(p, guesses, dice):
    q_of = [q for _, q in guesses]
    text = speculative.accept_or_resample(p, guesses, dice)
    for i, q in enumerate(q_of):
        p[i].sub_(q).clamp_min_(0.0)
    return text


def counts_tokens_from_the_end(p, guesses, dice):
    """Return the last token as a negative index, which a table of tokens would accept."""
    *text, last = speculative.accept_or_resample(p, guesses, dice)
    return [*text, last - p.shape[1]]


def from_three_guesses_on(p, guesses, dice):
    return (
        speculative.accept_or_resample(p, guesses, dice)
        if len(guesses) < 3
        else never_accepts(p, guesses, dice)
    )


def from_thirty_tokens_on(p, guesses, dice):
    return (rule(rest=lambda p, q: p) if p.shape[1] >= 30 else speculative.accept_or_resample)(
        p, guesses, dice
    )


def accepted_once():
    """The acceptance of a guess is remembered by its index and token."""
    kept = {}
    return rule(
        ratio=lambda p, q, token: kept.setdefault((len(p), token), min(1.0, (p[token] / q[token]).item()))
    )


def asks_for_all_first(p, guesses, dice):
    """Right: all acceptances are asked for first, by logarithms; the residual is p without min(p, q)."""
    accepted = [
        dice.accepts(i, (p[i, x].log() - q[x].log()).exp().item()) for i, (x, q) in enumerate(guesses)
    ]
    num_kept = (accepted + [False]).index(False)
    weights = (
        p[num_kept] - torch.minimum(p[num_kept], guesses[num_kept][1]) if num_kept < len(guesses) else p[-1]
    )
    return [token for token, _ in guesses[:num_kept]] + [dice.draw(num_kept, weights / weights.sum())]


def backwards(p, guesses, dice):
    """Right: by recursion on what is left after an accepted guess."""

    def written(i):
        if i == len(guesses):
            return (dice.draw(i, p[i]),)
        token, q = guesses[i]
        if p[i, token] >= q[token] or dice.accepts(i, p[i, token] / q[token]):
            return (token, *written(i + 1))
        more = torch.where(p[i] > q, p[i] - q, 0.0)
        return (dice.draw(i, more / more.sum()),)

    return written(0)


ACCEPT = {
    "residual not resampled": rule(rest=lambda p, q: p),
    "resampled from q": rule(rest=lambda p, q: q),
    "always accepts": rule(ratio=lambda p, q, token: 1.0),
    "never accepts": never_accepts,
    "keeps equal tokens": keeps_equal_tokens,
    "ratio upside down": rule(ratio=lambda p, q, token: min(1.0, (q[token] / p[token]).item())),
    "accepts with p": rule(ratio=lambda p, q, token: p[token].item()),
    "accepts what p likes better": rule(ratio=lambda p, q, token: float(p[token] >= q[token])),
    "residual not normalised": rule(rest=lambda p, q: (p - q).clamp_min(0.0)),
    "residual of absolute differences": rule(rest=lambda p, q: (p - q).abs() / (p - q).abs().sum()),
    "one row further": rule(row=lambda i: i + 1),
    "last token from the row before": rule(last=lambda p, guesses: p[max(0, len(guesses) - 1)]),
    "no token more": no_token_more,
    "goes on after a rejection": goes_on_after_a_rejection,
    "one index for all": one_index_for_all,
    "without dice": without_dice,
    "in float32": rule(in_float32=True),
    "writes to what is given": subtracts_in_place,
    "counts tokens from the end": counts_tokens_from_the_end,
    "wrong from three guesses on": from_three_guesses_on,
    "wrong from 30 tokens on": from_thirty_tokens_on,
    "remembers": accepted_once(),
}

# A scheduler's step -----------------------------------------------------------------------


def scheduler(plan=continuous.plan, advance=continuous.advance):
    return SimpleNamespace(plan=plan, advance=advance)


def planned(budget=lambda b: b, order=lambda text: len(text.unread) > 1, tokens=lambda text, b: text.unread[:b],
            room=continuous.room_for, stop=False):  # fmt: skip
    """The floor's plan, with one of its parts replaced; `stop`: no prompt overtakes one that finds no room."""

    def plan(pool, waiting, left):
        pieces, left = [], budget(left)
        prompts = [text for text in waiting if len(text.unread) > 1]
        for text in sorted(waiting, key=order):
            new = tokens(text, left)
            if not new:
                continue
            if room(pool, text, len(new), waiting, [other for other, _ in pieces]):
                pieces.append((text, new))
                left -= len(new)
            elif stop and text in prompts:
                break
        return pieces

    return plan


def preempting(victims_of, forget=lambda text: setattr(text, "num_read", 0)):
    """room_for, with other victims, or a victim that forgets other things."""

    def room(pool, text, num_tokens, waiting, reading):
        while not pool.grow(text.table, text.num_read + num_tokens):
            victims = [t for t in victims_of(waiting, text) if t.table and t is not text and t not in reading]
            if not victims:
                return False
            pool.release(victims[-1].table)
            forget(victims[-1])
        return True

    return room


def later(waiting, text):
    return waiting[waiting.index(text) + 1 :]


def forgets_what_was_written(text):
    text.num_read = 0
    del text.tokens[1:]


def takes_from_readers(pool, text, num_tokens, waiting, reading):
    return continuous.room_for(pool, text, num_tokens, waiting, [])


def leaves_the_table(pool, text, num_tokens, waiting, reading):
    """The victim's blocks are free, and in its table, too."""
    while not pool.grow(text.table, text.num_read + num_tokens):
        victims = [t for t in later(waiting, text) if t.table and t not in reading]
        if not victims:
            return False
        pool.free += victims[-1].table
        victims[-1].num_read = 0
    return True


def preempts_early(pool, text, num_tokens, waiting, reading):
    """A block is kept in reserve: the last text gives up its own before the others are used."""
    victims = [t for t in later(waiting, text) if t.table and t not in reading]
    if victims and len(pool.free) < 3:
        pool.release(victims[-1].table)
        victims[-1].num_read = 0
    return continuous.room_for(pool, text, num_tokens, waiting, reading)


def without_blocks(pool, text, num_tokens, waiting, reading):
    return True


def room_for_one_more(pool, text, num_tokens, waiting, reading):
    return continuous.room_for(pool, text, num_tokens + 1, waiting, reading)


def one_text_a_step(pool, waiting, budget):
    return continuous.plan(pool, waiting, budget)[:1]


def planned_for_all_but_read_by_one(pool, waiting, budget):
    """Blocks are taken for texts that then do not read."""
    return continuous.plan(pool, waiting, budget)[-1:]


def pieces_of_before():
    kept = []

    def plan(pool, waiting, budget):
        kept.extend(continuous.plan(pool, waiting, budget))
        return kept

    return plan


def advanced(writes=lambda text: not text.unread, finishes=lambda text: len(text.tokens) == text.end,
             release=lambda pool, text: pool.release(text.table), count=len):  # fmt: skip
    def advance(pool, pieces, chosen):
        for (text, tokens), token in zip(pieces, chosen):
            text.num_read += count(tokens)
            if writes(text):
                text.tokens.append(token)
            if finishes(text):
                release(pool, text)

    return advance


def freed_twice(pool, text):
    pool.free += text.table
    pool.release(text.table)


def by_position(pool, waiting, budget):
    """Right: who gives up its blocks is found from the end of the line, and no prompt overtakes another."""
    prompts = [text for text in waiting if len(text.unread) > 1]
    line = [text for text in waiting if text not in prompts] + prompts
    pieces, reading = [], set()
    for text in line:
        count = min(len(text.unread), budget)
        if text.num_read and not text.table:
            continue
        lacking = -(-(text.num_read + count) // pool.size) - len(text.table) - len(pool.free)
        for other in reversed(waiting):
            if lacking <= 0 or other is text:
                break
            if other.table and id(other) not in reading:
                lacking -= len(other.table)
                pool.release(other.table)
                other.num_read = 0
        if count == 0 or not pool.grow(text.table, text.num_read + count):
            if count and text in prompts:
                break
            continue
        reading.add(id(text))
        pieces.append((text, text.tokens[text.num_read : text.num_read + count]))
        budget -= count
    return pieces


SCHEDULER = {
    "one token beyond the budget": scheduler(planned(budget=lambda b: b + 1)),
    "prompts first": scheduler(planned(order=lambda text: len(text.unread) == 1)),
    "whole prompts only": scheduler(planned(tokens=lambda t, b: t.unread if len(t.unread) <= b else [])),
    "one token a text": scheduler(planned(tokens=lambda t, b: t.unread[: min(b, 1)])),
    "never preempts": scheduler(planned(room=preempting(lambda waiting, text: []))),
    "preempts the first in line": scheduler(planned(room=preempting(lambda waiting, text: waiting[::-1]))),
    "preempts the next in line": scheduler(
        planned(room=preempting(lambda waiting, text: later(waiting, text)[::-1]))
    ),
    "preempts who reads": scheduler(planned(room=takes_from_readers)),
    "preempts early": scheduler(planned(room=preempts_early)),
    "num_read stays after preemption": scheduler(planned(room=preempting(later, lambda text: None))),
    "text lost by preemption": scheduler(planned(room=preempting(later, forgets_what_was_written))),
    "table stays after preemption": scheduler(planned(room=leaves_the_table)),
    "reads without blocks": scheduler(planned(room=without_blocks)),
    "a block too many": scheduler(planned(room=room_for_one_more)),
    "one text a step": scheduler(one_text_a_step),
    "blocks for who does not read": scheduler(planned_for_all_but_read_by_one),
    "pieces of the step before": scheduler(pieces_of_before()),
    "finished text keeps its blocks": scheduler(advance=advanced(finishes=lambda text: False)),
    "finished text frees twice": scheduler(advance=advanced(release=freed_twice)),
    "writes before the prompt is read": scheduler(advance=advanced(writes=lambda text: True)),
    "counts one token a step": scheduler(advance=advanced(count=lambda tokens: 1)),
}

WRONG = {
    "kv_cache": KV_CACHE,
    "paged_attention": PAGED,
    "accept_or_resample": ACCEPT,
    "scheduler_step": SCHEDULER,
}
RIGHT = {
    "kv_cache": {"in a buffer": InABuffer, "one by one": OneByOne},
    "paged_attention": {"masked": pages(masked), "in order": pages(pool=InOrder)},
    "accept_or_resample": {"asks for all first": asks_for_all_first, "by recursion": backwards},
    "scheduler_step": {
        "without overtaking": scheduler(planned(stop=True)),
        "by position": scheduler(by_position),
        "the library's": SchedulerOfTheLibrary(),
    },
}
WORDS = {
    "kv_cache": {
        "keeps one piece": "it sees this piece alone, without the tokens before",
        "keeps every version": "it holds 9633792 bytes; their keys and values are 393216",
        "no causal mask": "queries see later tokens of their piece",
        "as if the first piece": "sees keys 0 to i, as if the piece were the first",
        "not scaled": r"scores are not divided by sqrt\(d\)",
        "no maximum": "with scores of hundreds, has nan",
        "cut does nothing": "it still sees tokens that were cut",
        "scales q in place": "q .* was written to",
        "one memory for all": "another cache, used in turn .each keeps its own tokens",
        "keeps 64 tokens": "of thousands of elements",
    },
    "paged_attention": {
        "the table is sorted": r"the key in block \d at place \d, of token \d of text 1, is wrong",
        "first piece alone is written": "of token 0 of text 1",
        "clears the unused": "block 0 at place 0, of no text, was written to; no new token is due there",
        "reads the unused end": "it sees the unused end of the last block",
        "no causal mask": "queries see later tokens of their piece",
        "new tokens alone": "it sees this pass's tokens alone",
        "64 tokens at most": "of thousands of elements",
        "written to a copy": "not contiguous: the key in block",
        "block freed twice": "it returned None; block . is not held: raise a RuntimeError",
        "block never taken back": "it raised RuntimeError: .*; 1 of . blocks is free",
        "nothing when full": "it returned None; every block is held: raise a RuntimeError",
        "one block for two": "allocate returned block 1, which is held: two texts would write to it",
    },
    "accept_or_resample": {
        "residual not resampled": r"after a rejection it is drawn from p, not from max\(0, p - q\)",
        "resampled from q": "after a rejection it is drawn from q",
        "always accepts": "the guess is kept whatever the model says",
        "never accepts": "the distribution is right, but a pass writes 1 tokens on average",
        "keeps equal tokens": "the distribution is right, but a pass writes 1.56 tokens on average; .* writes 1.915",
        "residual not normalised": r"dice.draw\(0, p\) got numbers that add up to 0.08491",
        "last token from the row before": r"token 0 comes as number 1 after \[0\] with probability",
        "one index for all": "dice.accepts was asked twice for index 0",
        "without dice": "the dice were not asked",
        "in float32": "0.720652223, it should be 0.720652216",
        "writes to what is given": "was written to",
        "counts tokens from the end": "it returned .*-.*; tokens are 0 to",
        "wrong from 30 tokens on": "V = 37, 1 guess",
    },
    "scheduler_step": {
        "one token beyond the budget": "3 tokens are read; the budget is 2",
        "prompts first": "text 0 waits, and text 1 reads before its turn",
        "never preempts": "it needs 1 block more, and 1 could be had",
        "preempts the first in line": "gave up",
        "preempts the next in line": "text 2 gave up its blocks, and text 3, after it in line, kept them",
        "preempts early": "gave up 1 block without need: 1 are free",
        "num_read stays after preemption": "reads nothing, with num_read = 2, and holds 0 blocks; it should hold 1",
        "text lost by preemption": "a text that gives up its blocks keeps its tokens",
        "table stays after preemption": "block 1 is held by text 0 and held by text 1",
        "reads without blocks": "reads up to 1 tokens, and holds 0 blocks; it should hold 1",
        "finished text keeps its blocks": "text 0 is finished, and has num_read = . and 1 block",
        "finished text frees twice": "block 0 is free and free",
        "writes before the prompt is read": "has unread tokens, and has 4; it should have",
    },
}
