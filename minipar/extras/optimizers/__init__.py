"""Optimizers whose update of an element depends on other elements: LAMB and Muon. In reading order:

lamb.py              LAMB, which needs norms of whole parameters, and all-reduces them
muon.py              Muon, which needs whole matrices
whole_parameters.py  ZeRO whose shards are whole parameters, for Muon
families.py          LAMB and Muon over any mesh
choices.py           the choices of --optimizer, and which configurations they refuse
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__, submod_attrs={"lamb": ["Lamb"], "muon": ["Muon"], "whole_parameters": ["WholeParameterZero"]}
)
