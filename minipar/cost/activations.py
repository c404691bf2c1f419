"""Bytes that a layer keeps from its forward to its backward, for one microbatch on one rank.

Two layers are counted. A GPT layer with dropout, stored scores and 16-bit activations, by Korthikanti et al.:

    s b h (10 + 24/t + 5 a s/(h t))        and with sequence parallelism s b h/t (34 + 5 a s/h)

and this library's layer, by `minipar.tensor_parallel.activation_memory`, with e bytes an activation:

    e s b ((6 h + 2) + (2 h + 2 h_kv + a + 4 F)/t)        with sequence parallelism the first term over t, too

A parallel block, with one norm and one dropout, has half of what is outside the split matrices: 10 or 6 h + 2.

Recomputation keeps, of either: "selective" all but the scores; "full" the layer's input alone; "every:N" that of every N-th
layer, and N layers are recomputed at once.
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
    """Return the bytes of a GPT layer; by default Korthikanti's.

    ffn   width of the MLP, if not 4 h         keys  tokens that a query sees, if not s
    e     bytes of an activation               a mask of dropout has one byte an element
    norms 1 in a parallel block

    outside the split matrices   4 e + 2 per element of [s, b, h]: inputs of two norms and of two matrices, two masks
    inside, over tp              q, k, v and o's input 4 e, the MLP's 2 e ffn/h; scores (2 e + 1) a keys/h, if stored
    """
    split = tp if sequence_parallel else 1
    if recompute == "full":
        return e * s * b * h / split
    outside = norms * s * b * h * (2 * e + dropout) / split
    scores = (e + (e + 1) * dropout) * a * (keys or s) if recompute == "none" else 0
    return outside + s * b * (4 * e * h + 2 * e * (ffn or 4 * h) + scores) / tp


def llama_layer_bytes(
    shape: ModelShape, s: int, b: int, tp: int, sequence_parallel: bool, scores: int, e: int, experts: bool
) -> float:
    """Return the bytes of this library's layer without recomputation.

    scores   keys whose scores are stored for each query; 0 for flash attention
    experts  the layer has a mixture: of each of top_k * capacity_factor rows a token, what goes in, comes out, and 4 F
    """
    split = tp if sequence_parallel else 1
    kv_heads = max(1, shape.num_kv_heads // tp)
    heads = shape.num_heads // tp
    outside = shape.norms_per_layer * ((3 * shape.dim + 1) * e + shape.dim * shape.dropout)
    if scores:
        attention = 4 * heads * shape.head_dim + heads * scores
    else:
        attention = (2 * heads + 2 * kv_heads) * shape.head_dim + heads
    mlp = 4 * shape.hidden_dim / tp
    if experts:
        rows = shape.top_k * shape.capacity_factor
        mlp = rows * (mlp + 2 * shape.dim) + 4 * shape.shared_dim / tp
    positions = (
        s * shape.head_dim * e + s * scores
    )  # rotary cosines and sines, whatever the batch; a mask of bytes
    return s * b * (outside / split + (attention + mlp) * e) + positions


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
) -> float:
    """Return the bytes of a layer of either kind: s tokens of each of b samples on this rank; dense: scores are stored."""
    stored = recompute if dense or recompute == "full" else "selective"
    if not shape.gated or stored == "full":
        options = dict(
            ffn=shape.hidden_dim, keys=keys, e=e, dropout=shape.dropout, norms=shape.norms_per_layer
        )
        return gpt_layer_bytes(s, b, shape.dim, shape.num_heads, tp, sequence_parallel, stored, **options)
    scores = keys if stored == "none" else 0
    return llama_layer_bytes(shape, s, b, tp, sequence_parallel, scores, e, experts)


def bytes_of_units(num_layers: int, every: int, layer: float, layer_input: float) -> tuple[float, float]:
    """Return (kept, most) for layers recomputed in units of `every`: kept by the forward, and at most in the backward.

    layer        bytes of one layer without recomputation      layer_input  those of its input alone

    kept = ceil(L/N) layer_input        most = kept + N layer        every=1 is recompute="full"
    """
    kept = ceil(num_layers / every) * layer_input
    return kept, kept + min(every, num_layers) * layer
