"""Three hints for each exercise: what to look at, the idea, and nearly the code."""

HINTS: dict[str, tuple[str, str, str]] = {
    "shift": (
        "If every rank first sends and then receives, who receives? With large messages nobody does.",
        "Post both, then wait: comm.exchange(x, to, shape, dtype, source) is one operation that does.",
        "to = (rank + 1) % size, source = (rank - 1) % size. % of a negative number is not negative in "
        "Python.",
    ),
    "broadcast": (
        "Who has x after step k, if every rank that has it sends it once per step? Twice as many as before.",
        "Count places from the root: place = (rank - root) % size. The root is at place 0 and has x.",
        "For distance = ..., 4, 2, 1: who has x sends to place + distance, if there is one; who has not, "
        "and whose place is a multiple of distance, receives from place - distance.",
    ),
    "reduce_scatter": (
        "Follow one chunk: which rank adds to it last, if rank r is to end with chunk r? It must have been "
        "at r+1 first.",
        "In step s = 1 ... p-1, rank r sends the partial sum of chunk r-s and receives that of chunk r-s-1,"
        " to which it adds its own.",
        "Work on clones of the chunks. Chunks: of size ceil(N/p), the last ones shorter or empty: x[i*n : "
        "(i+1)*n].",
    ),
    "all_gather": (
        "In every step, pass on what you received last. In the first, your own.",
        "In step s = 0 ... p-2, rank r sends chunk r-s and receives chunk r-s-1, all modulo p.",
        "Keep a list of p chunks, fill in chunk r-s-1 in each step, torch.cat it at the end.",
    ),
    "all_reduce_in_place": (
        "It is your reduce-scatter, then your all-gather, on views of one flat tensor.",
        "x.view(-1) and slices of it are views: writing to a slice writes to x. No clone is needed.",
        "After the reduce-scatter rank r holds chunk r complete, so the all-gather starts by sending chunk "
        "r. Copy with c.copy_(...).",
    ),
    "halving_doubling": (
        "With p a power of two: exchange halves with the rank at distance p/2, add; then quarters at p/4 "
        "...; then all of it backwards.",
        "The partner at distance d is rank ^ d. The rank whose bit d is set keeps the upper half, its "
        "partner the lower.",
        "Let q be the largest power of two up to p. Ranks r >= q send x to r-q, which adds it; q ranks run "
        "the above on chunks of ceil(N/q); at the end r-q sends the result to r.",
    ),
    "all_to_all": (
        "Your own chunk needs no message. In each of p-1 steps, every rank sends one chunk and receives one.",
        "In step s, send to rank+s and receive from rank-s: no rank gets two messages in one step.",
        "The chunk from rank s has the shape (recv_sizes[s], *x.shape[1:]). torch.cat them by source.",
    ),
    "hierarchical": (
        "What must leave a node? The node's sum, once; and g ranks can each send a g-th part of it.",
        "Three collectives: reduce-scatter in the node, all-reduce of my chunk with the same place in other"
        " nodes, all-gather in the node.",
        "node = comm.subgroup(range(n*g, n*g+g), 'node'), across = comm.subgroup(range(place, size, g), "
        "'across'). Flatten x; pad it with zeros until g divides it, or give all_gather its `sizes`.",
    ),
    "conjugates": (
        "Write the operator as a matrix between the tensors of all ranks; the backward is the transposed "
        "matrix.",
        "copy: y_r = x, so dx is the sum of dy_r. all_reduce: y = sum of x_r, so dx_r = dy. Gather and "
        "reduce-scatter are each other's.",
        "torch.autograd.Function with staticmethods forward(ctx, x, comm) and backward(ctx, dy); tokens are"
        " dim 1, collectives act on dim 0: transpose(0, 1).contiguous() and back. Never write to dy.",
    ),
    "average_gradients": (
        "Every rank has p.grad of its own part of the batch, and wants the mean over ranks.",
        "comm.all_reduce(x, 'mean') returns it. It does not write to x.",
        "for p in module.parameters(): p.grad = ...",
    ),
    "ddp": (
        "When is a gradient ready, and who tells you? p.register_post_accumulate_grad_hook(f) calls f(p) "
        "then.",
        "Fill buckets in the reverse order of parameters(). When all of a bucket's gradients are ready, and"
        " all buckets before it have left, comm.all_reduce(flat, 'mean', async_op=True) and keep the "
        "handle.",
        "Wait for the handles at the end of the backward: in the first hook of a backward, "
        "torch.autograd.Variable._execution_engine.queue_callback(self._finish).",
    ),
    "global_loss": (
        "Two ranks, one with 1 counted token and one with 9: what does the mean of their means weigh?",
        "The loss is a sum over tokens divided by a count. The count is over all ranks, the sum can stay at"
        " home.",
        "F.cross_entropy(..., reduction='sum', ignore_index=-100), and an all-reduce of (targets != "
        "-100).sum().",
    ),
    "zero1": (
        "An elementwise optimizer does not care which elements it is given: give it a p-th part of every "
        "parameter.",
        "step: reduce-scatter each gradient (mean), step on your parts, all-gather the updated parts.",
        "Pad the flat parameter until p divides it: F.pad(x.flatten(), (0, -x.numel() % "
        "p)).chunk(p)[rank].clone() is a part; optimizer_cls(parts, **options); part.grad = ... before the "
        "step.",
    ),
    "zero2": (
        "The whole gradient must not live until step(): cut it as soon as it is there.",
        "p.register_post_accumulate_grad_hook: reduce-scatter p.grad, keep your part, set p.grad = None.",
        "A second backward before the step finds a part already kept: add to it. zero_grad() forgets the "
        "parts.",
    ),
    "fsdp": (
        "Two things must happen around a unit's forward, two around its backward. Which of torch's hooks "
        "are called then?",
        "Forward pre-hook: gather. Forward hook: free, and output.register_hook(gather) for the backward. "
        "Post-accumulate hook: when the unit has all its gradients, reduce-scatter them into shard.grad, "
        "free.",
        "Autograd keeps views of the whole weight, so keep one flat tensor per unit, let p.data be views of"
        " it, and free it by flat.untyped_storage().resize_(0); resize it back and copy_ the all-gather "
        "into it. parameters() must yield the shards.",
    ),
    "mlp": (
        "Which product needs all of its input's features, and which gives only a term of the output?",
        "x meets the sharded gate and up: its gradient is a sum over ranks (copy). down gives a term of y: "
        "all_reduce.",
        "One copy for both products, x = copy(comm, x), or the backward sends twice as much. The pair is in"
        " minipar.simple.autograd.",
    ),
    "vocab_loss": (
        "logsumexp over all of the vocabulary, from parts of it: which numbers per target suffice? Three.",
        "The maximum (all_reduce(..., 'max')), then the sum of exp(z - max) and the target's z - max, which"
        " one rank has: in one message.",
        "Gradient: softmax of my columns, minus 1 at the target on the rank that has it, times dloss / N. "
        "Write an autograd.Function, or all-reduces that do not sum again in the backward.",
    ),
    "sequence_parallel": (
        "Outside the matrices each rank has its tokens; inside, all tokens and some features. What turns "
        "one into the other?",
        "gather_tokens before gate and up, scatter_tokens after down, both from minipar.simple.autograd.",
        "The norm's weight is whole on every rank, but sees only its tokens: its gradient is a term. "
        "copy(comm, norm).",
    ),
    "gpipe": (
        "Rank r runs F(r, 0), ..., F(r, m-1), and then? In which order must the gradients be added to be "
        "one process's?",
        "Action(op, stage, microbatch); one tuple of actions per rank; stage r is on rank r.",
        "Schedule(actions, tuple(range(p)), m, 'gpipe').",
    ),
    "one_f_one_b": (
        "How many forwards can the last rank run before its first backward? One. And the rank before it?",
        "Rank r: p-1-r forwards, then one forward and one backward in turn, then the remaining backwards.",
        "warmup = min(p-1-r, m). Forward number warmup+i is followed by backward number i.",
    ),
    "zb_h1": (
        "I sends a gradient that somebody waits for; nobody waits for W. So where would you put W?",
        "It is 1F1B with B split into I and W, and W later: on rank r, r microbatches later.",
        "After the I of microbatch k comes the W of microbatch k - r, if there is one; the last r W come at"
        " the end.",
    ),
    "pipeline_step": (
        "Write forward(k) and backward(k) of one microbatch first: receive, compute, send; keep (x, y) from"
        " one to the other.",
        "x = recv(...).requires_grad_(); y = module(x); torch.autograd.backward(y, dy); send x.grad to the "
        "left. Divide the loss by m.",
        "Two neighbours that send to each other at once wait for ever: send with async_op=True, wait for "
        "the handles at the end. Activations and gradients each need a subgroup of their own: "
        "comm.subgroup(range(size), 'gradients').",
    ),
    "dispatch": (
        "A receiver must know how much comes: exchange the counts first. What does rank s need to know, all"
        " counts or its own?",
        "comm.all_gather(counts).view(p, p, E/p) is [from, to, expert of `to`]. Sum over experts: the sizes"
        " of the all-to-all.",
        "What arrives is sorted by source, then by expert: split it, and run expert e on pieces e, e + E/p,"
        " ... The way back is the same all-to-all with the sizes swapped. all_to_all of "
        "minipar.simple.autograd has a backward.",
    ),
    "switch": (
        "Which tokens are dropped must not depend on the number of ranks: count places within one sequence.",
        "one_hot(expert).cumsum over tokens gives each token's place among those with its expert; kept: "
        "place < capacity.",
        "capacity = ceil(T/E * capacity_factor), exactly (Fraction). y = p_e * expert_e(x), 0 where "
        "dropped. f and P are means over a group's tokens; your dispatch does the rest.",
    ),
    "ring_forward": (
        "Softmax over a part of the keys is wrong by one factor per query. Which number must you keep to "
        "correct it?",
        "lse = logaddexp(lse, lse of this part's scores); out = exp(old lse - lse) * out + exp(scores - "
        "lse) @ v.",
        "In step s you hold the keys of rank r-s: mask by places in the whole sequence, source * n + i > "
        "rank * n + j. Start with your own block, so that lse is finite. Pass k and v on in p-1 steps.",
    ),
    "ring_backward": (
        "With lse saved, each block's weights are exp(scores - lse): no second pass over the ring is needed"
        " to know them.",
        "delta = (dout * out).sum(-1); dscores = weights * (dout v^T - delta) / sqrt(d); dq += dscores k; "
        "dk = dscores^T q; dv = weights^T dout.",
        "dk and dv belong to the block's owner: let the sum travel behind the block, each rank adding its "
        "term; after p-1 hops it is home, where the owner's own term, which never left, is added.",
    ),
    "ulysses": (
        "Attention is per head. So who could compute some heads, if it had all tokens of them?",
        "[B, H, N/p, d] -> chunk the heads by p -> all-to-all -> cat along tokens: [B, H/p, N, d]. And back"
        " after the attention.",
        "torch.stack(x.chunk(p, 1)) is sent with sizes [1] * p; the result, along dim 0, is by source: "
        "torch.cat(tuple(y), dim=2). Use all_to_all of minipar.simple.autograd.",
    ),
    "mesh": (
        "torch.arange(world).view(pp, dp, cp, tp) is the grid: the last axis varies fastest.",
        "A group along some axes is what remains when the other axes are fixed.",
        "grid.permute(*other axes, *these axes).reshape(-1, size of a group).tolist()",
    ),
    "grad_norm": (
        "A weight that p ranks hold would be counted p times by a sum over ranks.",
        "Let each of its holders count a p-th part of its square.",
        "sqrt(all_reduce(sum of |g|^2 / copies)), in float64: squares of float32 overflow at 1.8e19.",
    ),
    "reshard": (
        "Two boxes meet in a box: from the larger start to the smaller end, along each dim.",
        "The same region is at another place in the file than in the result: subtract the box's own start.",
        "Count the elements that you have written; if some are missing at the end, raise. Call load(i) only"
        " where the regions meet.",
    ),
}
