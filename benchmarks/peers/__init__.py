"""Training steps of other programs beside ours: the same weights, batch and mesh, in turn on the same ranks, on the CPU.

    python -m benchmarks.peers --picotron ../picotron --nanogpt ../nanoGPT

picotron.py  picotron's `train_step` and pipeline, on its own model, over its own process groups
nanogpt.py   the step of nanoGPT's trainer, in one process

The checkouts are the user's; nothing of them is copied. The packages that picotron imports, and does not need on a CPU, are
replaced by empty ones.
"""
