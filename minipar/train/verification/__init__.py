"""The comparison of any mesh with one process. In reading order:

verify.py             compares every tensor, and names the first that diverges
provenance.py         which strategies split a tensor, and how they made a rank's part of it
rounded_reference.py  the reference in half precision: one process repeats each step from the mesh's own weights
legal_configs.py      the configurations that `minipar verify --all` compares
own_training/         the same for a model and a step of the caller's own, by any library
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "verify": ["Verification", "table", "verify"],
    },
)
