"""A KV cache: each token is processed once, and later tokens attend to its keys and values.

    call with 5 tokens -> their outputs        call with 1 token -> its output over 6 tokens        ...
    cut(4): tokens from 4 on, such as wrong guesses, leave the cache; the next token is token 4

    out = softmax(q k^T / sqrt(d)) v      q of the new tokens, k and v of all tokens so far; causal

Checked: the outputs of one forward of the whole sequence, in the dtype of the inputs (float64, float32, bfloat16), for
pieces of any length, including 0, and for scores in the hundreds; two caches are independent; memory for at most twice the
keys and values.
"""


class Cache:
    """The keys and values of one attention layer. Make one: Cache()."""

    def __init__(self):
        raise NotImplementedError

    def __call__(self, q, k, v):
        """Keep k and v of the next T tokens; return their attention over all S tokens so far.   all [B, H, T, d]

        New token i is token S - T + i of the sequence: it attends to tokens 0 ... S - T + i. The inputs may be strided
        views; you may keep them, but must not write to them.
        """
        raise NotImplementedError

    def cut(self, length):
        """Forget all tokens but the first `length`, 0 <= length <= S."""
        raise NotImplementedError
