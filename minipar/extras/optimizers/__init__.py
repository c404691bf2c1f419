"""Optimizers whose update of an element depends on other elements: LAMB and Muon. In reading order:

tensor_lists.py     optimizer arithmetic on lists of tensors, one kernel for a whole list
lamb.py              LAMB, which needs the norms of unsharded parameters, and all-reduces them
muon.py              Muon, which needs unsharded matrices
whole_parameters.py  a ZeRO optimizer whose shards are complete parameters, for Muon
families.py          LAMB and Muon on any mesh
choices.py           the choices of --optimizer, and which configurations they refuse
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"lamb": ["Lamb"], "muon": ["Muon"], "whole_parameters": ["WholeParameterZero"]}
)
