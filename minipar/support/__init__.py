"""Small parts that every other package uses. What `--help` needs imports no torch. In reading order:

errors.py        error messages for invalid requests; RankError for a failed rank
registry.py      settings that a run chooses by name, and the extras that add choices
options.py       fields of a configuration with their help, and type checks
environment.py   whether this process is one of torchrun's ranks, a rank of a local pool, or neither
chunks.py        chunk sizes, split as torch.chunk does
atomic_files.py  files that are written completely or not at all
trace.py         spans of compute, communicate and wait time
live_bytes.py    live and peak tensor bytes on a CPU
staging.py       copies to a GPU for which the host does not wait
"""
