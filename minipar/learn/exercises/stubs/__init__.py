"""The files that `minipar exercise start` copies: a signature, its shapes, what is checked, and a hole to fill in."""
