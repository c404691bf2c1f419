"""The files that `minipar exercise start` copies: each has a signature, its shapes, what is checked, and a hole."""
