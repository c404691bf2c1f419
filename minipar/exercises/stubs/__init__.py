"""The files that `minipar exercise start` copies: a signature, its shapes, the formula it is held to, and a hole."""
