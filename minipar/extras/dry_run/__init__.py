"""A dry run: what every rank would hold and send, and who would wait for ever, without starting any. In reading order:

tensors.py         tensors without numbers
shapes.py          the shapes of results, remembered
assumed.py         what is taken for granted where the core reads a number
record.py          what a rank does, as steps
transport.py       a transport that records what a rank would send, and sends nothing
turns.py           ranks as threads of one process that run one at a time
matching.py        whether the recorded programs of all ranks fit each other
programs.py        runs and records the programs of ranks
run.py             the trainer's program on every rank, beside the planner's figures
report.py          a dry run as text
choices.py         `minipar train --dry-run` and its flags; imports no torch
command.py         what that flag does

With one rank of each kind for all:

kinds.py           what follows by symmetry, and what is checked
kind_transport.py  the record of a rank that stands for its kind
call.py            a collective as all its ranks call it
prove.py           a collective run by itself
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "run": ["DryRun", "dry_run"],
        "programs": ["run_ranks"],
    },
)
