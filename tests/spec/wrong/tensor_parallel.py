"""Wrong and unusual layers that are divided over ranks: matrices, tokens, the vocabulary."""

from functools import partial

import torch
import torch.nn.functional as F
from torch.autograd import Function

import minipar
from minipar.simple import autograd, sequence_parallel, tensor_parallel, vocab
from tests.spec.wrong.generic import (
    LAYER,
    DoubleBackward,
    Replaced,
    each,
    has,
    nan_as_zero,
    returned,
)

mlp, block = tensor_parallel.mlp, sequence_parallel.block
attention = partial(tensor_parallel.attention, head_dim=4)


def mlp_gelu(comm, x, gate, up, down):
    x = autograd.copy(comm, x)
    return autograd.all_reduce(comm, (F.gelu(x @ gate.t()) * (x @ up.t())) @ down.t())


def mlp_swapped(comm, x, gate, up, down):
    return mlp(comm, x, up, gate, down)


def mlp_of_the_first_sample(comm, x, gate, up, down):
    y = mlp(comm, x, gate, up, down)
    return torch.cat([y[:1], y[1:].detach()])


def mlp_mean(comm, x, gate, up, down):
    return mlp(comm, x, gate, up, down) / comm.size


def mlp_dx_once_from_five(comm, x, gate, up, down):
    enter = autograd.copy if comm.size < 5 else lambda comm, x: x
    return mlp(comm, x, gate, up, down, enter=enter)


def mlp_copy_ignores_dy(comm, x, gate, up, down):
    return mlp(comm, DoubleBackward.apply(x) if x.numel() >= 1000 else x, gate, up, down)


def mlp_by_parts(comm, x, gate, up, down):
    """Right: gate and up in one product, down transposed first."""
    x = autograd.copy(comm, x)
    a, b = (x @ torch.cat([gate, up]).t()).chunk(2, -1)
    return autograd.all_reduce(comm, (a * a.sigmoid() * b).matmul(down.t().contiguous()))


def core_without_max(q, k, v):
    scores = (q @ k.transpose(2, 3)) / q.shape[3] ** 0.5
    later = torch.ones(scores.shape[2:], dtype=torch.bool).triu(1)
    e = scores.exp().masked_fill(later, 0)
    return e / e.sum(-1, keepdim=True) @ v


def core(change_scores=lambda s: s, diagonal=1, scale=None):
    def attend(q, k, v):
        scores = (q @ k.transpose(2, 3)) * (scale(q) if scale else q.shape[3] ** -0.5)
        later = torch.ones(scores.shape[2:], dtype=torch.bool).triu(diagonal)
        return change_scores(scores).masked_fill(later, -torch.inf).softmax(-1) @ v

    return attend


def full(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def attention_with(core):
    return partial(attention, core=core)


def attention_swaps_k_v(comm, x, q, k, v, o):
    return attention(comm, x, q, v, k, o)


def sees_one_ahead(q, k, v):
    return core(diagonal=2)(q, k, v)


def does_not_see_itself(q, k, v):
    y = core(diagonal=0)(q, k, v)
    return nan_as_zero(y)


def block_with(
    norm=sequence_parallel.rms_norm,
    enter=autograd.gather_tokens,
    leave=autograd.scatter_tokens,
    of=autograd.copy,
    residual=lambda x: x,
):
    def wrong(comm, x, weight, gate, up, down):
        h = norm(x, of(comm, weight))
        return residual(x) + mlp(comm, h, gate, up, down, enter=enter, leave=leave)

    return wrong


def norm_without_eps(x, weight):
    return sequence_parallel.rms_norm(x, weight, 0.0)


def norm_with_mean(x, weight):
    return F.layer_norm(x, x.shape[-1:], weight)


def norm_in_float32(x, weight):
    return sequence_parallel.rms_norm(x.float(), weight.float()).to(x.dtype)


def block_of_torch(comm, x, norm, gate, up, down):
    """Right: torch's own norm."""
    h = autograd.gather_tokens(comm, F.rms_norm(x, x.shape[-1:], autograd.copy(comm, norm), 1e-5))
    return autograd.scatter_tokens(comm, (F.silu(h @ gate.t()) * (h @ up.t())) @ down.t()) + x


# Vocabulary --------------------------------------------------------------------------------


def looked_up(local_ids=lambda ids, n: ids, remote=lambda ids, n: (ids < 0) | (ids >= n), lookup=F.embedding):
    def wrong(comm, tokens, w):
        n = len(w)
        ids = tokens - comm.rank * n
        is_remote = remote(ids, n)
        rows = lookup(ids.masked_fill(is_remote, 0), w).masked_fill(is_remote[..., None], 0.0)
        return autograd.all_reduce(comm, rows)

    return wrong


class _LastGradientWins(torch.autograd.Function):
    @staticmethod
    def forward(ctx, ids, w):
        ctx.save_for_backward(ids, w)
        return F.embedding(ids, w)

    @staticmethod
    def backward(ctx, dy):
        ids, w = ctx.saved_tensors
        dw = torch.zeros_like(w)
        dw[ids.flatten()] = dy.reshape(-1, w.shape[1])
        return None, dw


def embedding_by_max(comm, tokens, w):
    """Of the terms the largest, not the sum."""
    ids, is_remote = vocab.to_local(comm, tokens, len(w))
    rows = F.embedding(ids, w).masked_fill(is_remote[..., None], 0.0)
    with torch.no_grad():
        largest = comm.all_reduce(rows, "max")
    return rows + (largest - rows).detach()


def embedding_by_places(comm, tokens, w):
    """Right: only the rows of this rank are looked up, and put at their places."""
    ids = (tokens - comm.rank * len(w)).flatten()
    places = ((ids >= 0) & (ids < len(w))).nonzero()[:, 0]
    rows = w.new_zeros(len(ids), w.shape[1]).index_copy(0, places, w.index_select(0, ids[places]))
    return autograd.all_reduce(comm, rows.view(*tokens.shape, -1))


def wide_tokens(right):
    return lambda comm, tokens, w: right(comm, tokens.to(torch.int8).long(), w)


def ignores_token_strides(comm, tokens, w):
    if not tokens.is_contiguous():
        tokens = tokens.as_strided(tokens.shape, torch.empty(tokens.shape).stride())
    return vocab.embedding(comm, tokens, w)


def loss_by_sum(comm, logits, targets):
    return vocab.cross_entropy(comm, logits, targets) * len(targets)


def loss_plain(maximum):
    """The loss, from reductions that autograd goes through."""

    def loss(comm, logits, targets):
        local, is_remote = vocab.to_local(comm, targets, logits.shape[1])
        z = logits - maximum(comm, logits)
        at = z.gather(1, local[:, None])[:, 0].masked_fill(is_remote, 0.0)
        sum_exp, at = autograd.all_reduce(comm, torch.stack([z.exp().sum(1), at]))
        return (sum_exp.log() - at).mean()

    return loss


def largest(comm, logits):
    return comm.all_reduce(logits.detach().amax(1), "max")[:, None]


def loss_takes_the_neighbours(comm, logits, targets):
    """A target at the end of a rank's part is taken for its neighbour's."""
    n = logits.shape[1]
    at_end = (targets % n == n - 1) & (targets < n * comm.size - 1)
    return vocab.cross_entropy(comm, logits, targets + at_end.long())


def loss_sums_exponentials_in_float32(comm, logits, targets):
    there = Replaced(comm, all_reduce=lambda x, op="sum": comm.all_reduce(x.float(), op).to(x.dtype))
    return vocab.cross_entropy(there, logits, targets)


def loss_sums_exponentials_in_bfloat16(comm, logits, targets):
    """Each rank's sum is in float32; the sum over ranks is rounded to the logits' dtype."""
    there = Replaced(comm, all_reduce=lambda x, op="sum": comm.all_reduce(x.to(logits.dtype), op).to(x.dtype))
    return vocab.cross_entropy(there, logits, targets)


class _GradientInItsDtype(Function):
    """The floor's loss, with a backward that computes softmax - 1 in the logits' dtype."""

    @staticmethod
    def forward(ctx, logits, comm, targets):
        loss = vocab.CrossEntropy.forward(ctx, logits, comm, targets)
        z, sum_exp, *places = ctx.to_save
        ctx.save_for_backward(z.to(logits.dtype), sum_exp.to(logits.dtype), *places)
        return loss

    @staticmethod
    def backward(ctx, dloss):
        return vocab.CrossEntropy.backward(ctx, dloss)


def loss_with_gradient_in_bfloat16(comm, logits, targets):
    return _GradientInItsDtype.apply(logits, comm, targets)


def loss_of_wide(loss):
    return lambda comm, logits, targets: loss(
        comm, logits.to(torch.promote_types(logits.dtype, torch.float32)), targets
    )


def loss_rounded(comm, logits, targets):
    return vocab.cross_entropy(comm, logits, targets).to(logits.dtype)


def loss_plus_0_times_the_logits(comm, logits, targets):
    y = vocab.cross_entropy(comm, logits, targets)
    return y + 0 * logits.sum()  # nan where a logit is infinite


WRONG = {
    "mlp": {
        **each(LAYER, mlp),
        "gelu": mlp_gelu,
        "gate and up swapped": mlp_swapped,
        "gradients of the first sample alone": mlp_of_the_first_sample,
        "divides by the ranks": mlp_mean,
        "x without a sum from five ranks on": mlp_dx_once_from_five,
        "dx doubled from 1,000 elements on": mlp_copy_ignores_dy,
    },
    "attention": {
        **each(LAYER, attention),
        "without the maximum": attention_with(core_without_max),
        "not causal": attention_with(full),
        "sees one token ahead": attention_with(sees_one_ahead),
        "does not see itself": attention_with(does_not_see_itself),
        "not scaled": attention_with(core(scale=lambda q: 1.0)),
        "keys and values swapped": attention_swaps_k_v,
    },
    "sequence_parallel": {
        **each(LAYER, block),
        "without eps": block_with(norm_without_eps),
        "with a mean": block_with(norm_with_mean),
        "norm in float32": block_with(norm_in_float32),
        "no sum of the norm's gradient from five ranks on": block_with(
            of=lambda comm, w: autograd.copy(comm, w) if comm.size < 5 else w
        ),
        "residual detached": block_with(residual=lambda x: x.detach()),
    },
    "vocab_embedding": {
        **each(LAYER, vocab.embedding, "ignores strides"),
        "one token too many": looked_up(remote=lambda ids, n: (ids < 0) | (ids >= n) | (ids == n - 1)),
        "row 0 is missing": looked_up(remote=lambda ids, n: (ids <= 0) | (ids >= n)),
        "the last gradient of a token": looked_up(lookup=_LastGradientWins.apply),
        "the largest, not the sum": embedding_by_max,
        "tokens in 8 bits": wide_tokens(vocab.embedding),
        "ignores the tokens' strides": ignores_token_strides,
    },
    "vocab_loss": {
        **each(LAYER, vocab.cross_entropy),
        "sums in bfloat16": loss_sums_exponentials_in_bfloat16,
        "computes in bfloat16": loss_plain(largest),
        "2% off in bfloat16": returned(lambda y: 1.02 * y, has(torch.bfloat16))(vocab.cross_entropy),
        "gradient in bfloat16": loss_with_gradient_in_bfloat16,
        "a sum": loss_by_sum,
        "without a maximum": loss_plain(lambda comm, logits: 0.0),
        "rank 0's maximum": loss_plain(
            lambda comm, logits: comm.broadcast(logits.detach().amax(1), 0)[:, None]
        ),
        "one maximum for all tokens": loss_plain(lambda comm, logits: largest(comm, logits).max()),
        "sums in float32": loss_sums_exponentials_in_float32,
        "the neighbour's target": loss_takes_the_neighbours,
        "0 times the logits": loss_plus_0_times_the_logits,
    },
}
RIGHT = {
    "mlp": {"by parts": mlp_by_parts},
    "attention": {"softmax by hand": attention_with(core())},
    "sequence_parallel": {"torch's norm": block_of_torch},
    "vocab_embedding": {"by places": embedding_by_places},
    "vocab_loss": {
        "by autograd": loss_of_wide(loss_plain(largest)),
        "the library's": minipar.vocab_parallel_cross_entropy,
        "rounded at the end": loss_rounded,
    },
}
