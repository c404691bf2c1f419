"""Inference: for a given model, request and seed, every batch, block size and mesh generates the same text.

That holds in float32, up to ties of rounding; in bfloat16 with `one_by_one`. See paged_model.py.

"Text" here is the token sequence of a request: its prompt and the tokens generated so far.

In reading order:

request.py           a request, and the distribution of its next token (the choice itself: model/sampling.py)
blocks.py            blocks of the KV cache: which request holds which block, and the memory behind them
quantized_blocks.py  blocks whose keys and values are quantized when they are full
quantized_weights.py the layers' weights quantized to 8 or 4 bits
streamed_weights.py  layers that are loaded from disk or CPU memory while other layers compute
prefix.py            prefix cache: blocks of earlier texts, found by chained hashes
split_keys.py        context parallelism: the tokens of every text, and their KV cache, split over ranks
expert_shares.py     expert parallelism: the experts split over ranks
paged_model.py       the model over a paged cache: one forward for new tokens of many requests
policy.py            which request goes first: first come, shortest remaining, multi-level feedback
rotation.py          several steps in flight in a pipeline, and their virtual time
scheduler.py         continuous batching: tokens and blocks of the next step
speculative.py       drafts, and the two rules by which they are verified
stages.py            a forward on a mesh of ranks
draft_choice.py      the draft that the command line names
transfer.py          sends a KV cache, head by head, to ranks with another tp
apart.py             prefill and decode on different ranks
events.py            the log: what happened to each request, and when
engine.py            the engine: requests in, texts out
metrics.py           queueing, latencies and throughput, computed from the log
static.py            the same requests in static batches, for comparison
text.py              the text of an answer as its tokens come, and its stop strings
requests_file.py     requests in a file, and results in another
serve.py             the work of `minipar serve`
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
