"""The comparison of any mesh with one process, and a dry run of any mesh. In reading order:

verify.py             compares every tensor, and names the first that diverges
provenance.py         the steps of the recipe that made a rank's part of a tensor
rounded_reference.py  the reference in half precision: one process repeats each step from the mesh's own weights
lossy_reference.py    the reference with lossy compression: one process also computes each step's averages, from what
                      every rank gave to the compressor
dry_tensors.py        tensors without numbers, and what is assumed where a program reads one
dry_programs.py       runs and records the programs of ranks in threads of one process
dry_kinds.py          one rank of each kind for all: what follows by symmetry, and what is checked
dry_run.py            every rank's program without numbers and messages: what it would hold and send, and what would hang
dry_report.py         a dry run as text
legal_configs.py      the configurations that `minipar verify --all` compares
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "verify": ["Verification", "table", "verify"],
        "dry_run": ["DryRun"],
        "dry_programs": ["run_ranks"],
    },
)
