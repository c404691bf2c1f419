"""The comparison of any mesh with one process. In reading order:

verify.py             compares every tensor, and names the first that diverges
provenance.py         which strategies split a tensor, and how they made a rank's part of it
rounded_reference.py  the reference in half precision: one process repeats each step from the mesh's own weights
lossy_reference.py    the reference with lossy compression: one process also computes each step's averages, from the
                      tensors that every rank gave to the compressor
legal_configs.py      the configurations that `minipar verify --all` compares
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "verify": ["Verification", "table", "verify"],
    },
)
