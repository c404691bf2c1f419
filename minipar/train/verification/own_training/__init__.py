"""A training of the caller's own, by any library, compared with the same in one process. In reading order:

verify_training.py  runs it in one process and on a mesh, in a local pool or under torchrun
watch.py            records one process of it, by hooks around the caller's own code
judge.py            compares losses, learning rates, gradients, weights and buffers, and finds what else is wrong
parts.py            the part of a one-process parameter that a rank's tensor is
causes.py           likely causes of a difference, looked for in what the ranks were seen to do
"""
