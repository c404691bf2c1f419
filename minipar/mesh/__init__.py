"""The mesh of ranks, and placements: the part of a global tensor that each rank holds. In reading order:

mesh.py            rank <-> coordinates, and one Comm per axis
nodes.py           axes whose groups span several nodes
regions.py         Box and Piece: axis-aligned regions of a tensor
placement.py       Placement: the part of a global tensor that a local tensor holds, as pieces
shard_gradient.py  ShardGradient: the gradient of a part of a tensor, which has no norm
assemble.py        gather: a global tensor from its parts
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
