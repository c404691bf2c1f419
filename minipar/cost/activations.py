"""Bytes that a layer keeps from its forward to its backward, for one microbatch on one rank.

Two kinds of layers are counted. A GPT layer with dropout, stored scores and 16-bit activations, by Korthikanti et al.:

    s b h (10 + 24/t + 5 a s/(h t))        and with sequence parallelism s b h/t (34 + 5 a s/h)

and this library's layer, with e bytes per activation and w = max(4, e), since norms and attention's log-sum-exps are
computed in 32 bits or more:

    s b (2 (w + 2 e) h + 2 w + (e (2 h + 2 h_kv + 4 F) + w a)/t)

Activations outside the split matrices are unsharded on every rank, unless sequence parallelism shards them by tokens: it
divides the norms' 2 (w + 2 e) h + 2 w by t, too. In 16 bits these norms, which are not fused, keep 8 h bytes more than
Korthikanti's: float32 inputs, and normalized inputs. Korthikanti's 5 a s/h counts the probabilities, which fused attention
does not keep.

A parallel block has one norm and one dropout, so its term outside the split matrices is half as large.

Megatron Core and torchtitan keep less: their norms and SwiGLU are fused (`fused_layer_bytes`).

With recomputation, each of these layers keeps

    selective   everything except the attention scores (if attention stores no scores, except its log-sum-exps)
    full        only the layer's input
    every:N     only the input of every N-th layer; the backward recomputes N layers at a time

and some programs recompute parts of a layer:

    acts        the outputs of norms and activation functions (Megatron Core, --recompute-modules layernorm moe_act)
    ops         everything except attention's output and every second product (torchtitan, selective by operation)

Source: arXiv:2205.05198, section 4 and table 2; arXiv:1604.06174, section 4.
"""

from __future__ import annotations

from math import ceil

from minipar.cost.models import ModelShape


def gpt_layer_bytes(
    s: int,
    b: int,
    h: int,
    a: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    recompute: str = "none",
    *,
    ffn: int | None = None,
    keys: int | None = None,
    e: int = 2,
    dropout: bool = True,
    norms: int = 2,
) -> float:
    """Return the bytes that a GPT layer keeps. The defaults give Korthikanti's layer.

    ffn   width of the MLP, if not 4 h         keys  tokens that a query attends to, if not s
    e     bytes of an activation               a dropout mask takes one byte per element
    norms 2, or 1 in a parallel block

    Bytes per element of [s, b, h]:

    outside the split matrices   4 e + 2: the inputs of two norms and of two matrices, and two masks
    inside, divided by tp        q, k, v, and the input of o: 4 e; the MLP 2 e ffn/h; stored scores (2 e + 1) a keys/h
    """
    split = tp if sequence_parallel else 1
    if recompute == "full":
        return e * s * b * h / split
    outside = norms * s * b * h * (2 * e + dropout) / split
    scores = (e + (e + 1) * dropout) * a * (keys or s) if recompute == "none" else 0
    return outside + s * b * (4 * e * h + 2 * e * (ffn or 4 * h) + scores) / tp


def layer_activation_bytes(
    shape: ModelShape,
    s: int,
    b: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    e: int = 4,
    scores: int = 0,
    experts: bool = False,
) -> dict[str, float]:
    """Return the bytes that each part of this library's layer keeps per rank, without recomputation.

    e        bytes of an activation; w = max(4, e) where 16-bit activations are converted to 32 bits
    scores   number of keys whose scores are stored for each query; 0: none, as with fused and flash attention
    experts  whether it is an MoE layer. F_s is its shared expert's width; it has R = top_k * capacity_factor rows per token

    Bytes per token:

        norms      2 ((w + 2 e) D + w)   input and inverse root mean square, the normalized input, and its product with the
                                         weight (the input of q, k and v, or of gate and up)    unsharded, or tokens / tp
        dropouts   2 D             a mask after attention, one after the MLP                    unsharded, or tokens / tp
        attention  (e (2 D + 2 D_kv) + w H)/tp   q, k after RoPE, v, the output (o's input), log-sum-exp       heads / tp
                   e (4 D + H S)/tp              with scores: q, repeated keys and values, the output, S probabilities
                   ((w + e)(D + D_kv) + w (H + H_kv))/tp   with norms of q and k, which keep what a norm of latents does
        latents    (w + e) c + w   latent attention only: kv_norm's input, normalized input and inverse root mean square,
                                   unsharded, or tokens / tp
                   e (c + r)       the latents with rotary keys. q, k, v and the core's output are d + r wide, o's input is
                                   a copy of d: `attention` has H (e (5 d + 4 r) + w)/tp, with scores e H (4 d + 3 r + S)/tp
        mlp        4 e F/tp        gate, silu(gate), up, and the product, which is down's input             features / tp
                   e R (2 F/tp + 2 D)    experts: their rows' inputs and outputs, gate and up; 4 e F_s/tp
                   (3 w + 8) E     router: probabilities, for the choice and for two losses, and the experts in order
                   w D             router's input, of all tokens; in 16 bits a shared expert keeps its own input, e D. The
                                   norm's product, e D, is not kept if no other operation reads it
        positions  RoPE's cosines and sines, once for the whole batch; with scores, also the causal mask, if s > 1

    A key/value head that several ranks share is counted on each of them. A parallel block has one norm and one dropout.
    Of a router, the few numbers per choice are not counted.
    """
    tokens, wide = s * b, max(4, e)
    outside = tokens // tp if sequence_parallel else tokens
    heads, kv_heads = shape.num_heads // tp, max(1, shape.num_kv_heads // tp)
    attention = e * (2 * heads + 2 * kv_heads) * shape.head_dim + wide * heads
    if scores:
        attention = e * (4 * heads * shape.head_dim + heads * scores)
    if shape.qk_norm:
        attention += (heads + kv_heads) * ((wide + e) * shape.head_dim + wide)
    latents = 0
    if shape.kv_latent_dim:
        attention += e * heads * (3 * shape.rope_dim + (0 if scores else shape.core_head_dim))
        latents = e * (shape.kv_latent_dim + shape.rope_dim) * tokens
        latents += ((wide + e) * shape.kv_latent_dim + wide) * outside
    if shape.q_latent_dim:
        # A compressed query, which this library does not have, keeps the same of its latent, without rotary features.
        latents += e * shape.q_latent_dim * tokens + ((wide + e) * shape.q_latent_dim + wide) * outside
    mlp: float = 4 * e * shape.dense_width // tp
    router = 0
    if experts:
        rows = shape.top_k * shape.capacity_factor
        mlp = e * (rows * (2 * shape.hidden_dim // tp + 2 * shape.dim) + 4 * shape.shared_dim // tp)
        router = (3 * wide + 8) * shape.num_experts * tokens + _moe_inputs(shape, tokens, outside, e)
    return {
        "norms": shape.norms_per_layer * ((wide + 2 * e) * shape.dim + wide) * outside,
        "attention": attention * tokens,
        "latents": latents,
        "mlp": mlp * tokens + router,
        "dropouts": shape.norms_per_layer * shape.dim * outside if shape.dropout else 0,
        "positions": s * (shape.rope_dim or shape.head_dim) * e + (s * scores if s > 1 else 0),
    }


def _moe_inputs(shape: ModelShape, tokens: int, outside: int, e: int) -> int:
    """Return the bytes of the inputs of the router and the shared expert, without the norm's product if it is not kept."""
    widths = {max(4, e)} | ({e} if shape.shared_dim else set())
    product_is_kept = shape.parallel_block and (outside < tokens or e not in widths)
    return shape.dim * (sum(widths) * tokens - (0 if product_is_kept else e * outside))


def fused_layer_bytes(
    shape: ModelShape,
    s: int,
    b: int,
    tp: int = 1,
    sequence_parallel: bool = False,
    e: int = 2,
    recompute: str = "none",
    experts: bool = False,
) -> float:
    """Return the bytes that a layer with fused norms, fused SwiGLU and flash attention keeps.

        norms      2 (2 D)     input and output: acts keeps the input alone             unsharded, or tokens / tp
        attention  (2 D + 2 D_kv + H w/e)/tp   q, k, v, the output, log-sum-exps of w = max(4, e) bytes
                   (D + D_kv)/tp   the inputs of the norms of q and k, if it has these
        mlp        3 F/tp      gate, up, and their product: acts keeps gate and up
        ops        2 D, and (D + D + D_kv + F + H w/e)/tp: the layer's input, down's output; q, v, gate, attention's output

    With experts, F counts each routed row, and rows' inputs and outputs, 2 D each, are kept, too (ops: the outputs).
    """
    tokens = s * b
    outside = tokens // tp if sequence_parallel else tokens
    heads, kv_heads = shape.num_heads // tp, max(1, shape.num_kv_heads // tp)
    width, core = shape.dense_width / tp, shape.core_head_dim
    rows = shape.top_k * shape.capacity_factor if experts else 0.0
    if experts:
        width = (rows * shape.hidden_dim + shape.shared_dim) / tp
    latents = 2 * (shape.kv_latent_dim + shape.q_latent_dim) + shape.rope_dim
    log_sum_exps = heads * max(4, e) / e
    if recompute == "ops":
        whole = 2 * shape.dim * outside
        split = (2 * heads + kv_heads) * core + log_sum_exps + width + rows * shape.dim + latents / 2
        return e * (whole + split * tokens)
    acts = recompute == "acts"
    whole = shape.norms_per_layer * (1 if acts else 2) * shape.dim * outside
    split = (
        (2 + shape.qk_norm) * (heads + kv_heads) * core
        + log_sum_exps
        + (2 if acts else 3) * width
        + 2 * rows * shape.dim
        + latents
    )
    return e * (whole + split * tokens)


def layer_bytes(
    shape: ModelShape,
    s: int,
    b: int,
    tp: int,
    sequence_parallel: bool,
    recompute: str,
    keys: int,
    dense: bool,
    e: int,
    experts: bool = False,
    fused: bool = False,
) -> float:
    """Return the bytes that a layer keeps: this library's layer, a fused one or, if the MLP is not gated, a GPT layer.

    s, b   tokens per sample and samples on this rank
    dense  attention stores its scores
    """
    if fused and shape.gated and not dense and recompute in ("none", "acts", "ops"):
        return fused_layer_bytes(shape, s, b, tp, sequence_parallel, e, recompute, experts)
    stored = recompute if dense or recompute == "full" else "selective"
    if not shape.gated or stored == "full":
        return gpt_layer_bytes(
            s, b, shape.dim, shape.num_heads, tp, sequence_parallel, stored,
            ffn=shape.hidden_dim, keys=keys, e=e, dropout=shape.dropout, norms=shape.norms_per_layer,
        )  # fmt: skip
    scores = keys if stored == "none" else 0
    kept = sum(layer_activation_bytes(shape, s, b, tp, sequence_parallel, e, scores, experts).values())
    # The core's log-sum-exps and, of latent attention, its output: o has a narrower copy.
    spared = max(4, e) + (e * shape.core_head_dim if shape.kv_latent_dim else 0)
    return kept - (recompute == "selective") * spared * (shape.num_heads // tp) * s * b


def bytes_of_units(num_layers: int, every: int, layer: float, layer_input: float) -> tuple[float, float]:
    """Return (kept, most) for layers recomputed in units of `every`: bytes after the forward, and the backward's peak.

    layer        bytes of one layer without recomputation      layer_input  bytes of its input

    kept = ceil(L/N) layer_input        most = kept + N layer        every=1 is recompute="full"
    """
    kept = ceil(num_layers / every) * layer_input
    return kept, kept + min(every, num_layers) * layer
