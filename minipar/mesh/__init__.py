"""Ranks in a mesh, and the parts of tensors that they hold. In reading order:

mesh.py        rank <-> coordinates, and one Comm per axis
nodes.py       which axes cross from machine to machine
placement.py   Placement: the part of a global tensor that a local tensor holds
assemble.py    a global tensor from its parts
regions.py     axis-aligned regions of a tensor, of which every part is made
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
