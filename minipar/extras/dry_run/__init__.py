"""A dry run: find what every rank would hold and send, and whether all that is sent is received, without starting any rank.

Two words are used throughout. A tensor without values has a shape and a dtype, but no contents. The ranks of a kind are
those that run the same program by symmetry, such as all ranks of a stage along dp. In reading order:

tensors.py         tensors without values
shapes.py          a cache of the shapes that operations return
assumed.py         the values that are assumed where the library reads a tensor (`.item()`, `.tolist()`)
reads.py           the methods of torch that answer otherwise in a dry run, such as `.item()`
record.py          a rank's program, recorded: messages and collectives
transport.py       a transport that records what a rank would send, and sends nothing
turns.py           threads of one process as ranks, of which one runs at a time
matching.py        checks that the recorded programs of all ranks fit each other
programs.py        runs and records the programs of ranks
run.py             runs the trainer's program on every rank, or on one of each kind; compares it with the planner's figures
links.py           the time of recorded programs if every rank has a link of its own
report.py          formats a dry run as text
choices.py         `minipar train --dry-run` and its flags; imports no torch
command.py         runs `minipar train --dry-run`
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "run": ["DryRun", "dry_run"],
        "programs": ["run_ranks"],
    },
)
