"""Tensor parallelism in two and three dimensions. In reading order:

grid.py          linear layers on a grid of ranks: 2D and 2.5D
cube.py          a linear layer on a cube of ranks: 3D
linear_costs.py  communication and memory of a linear layer in 1D, 2D, 2.5D and 3D
grid_layout.py   the block of each activation that a rank of a grid or a cube holds
grid_model.py    `grid_parallel` splits the whole model over a grid or a cube
grid_costs.py    communication of the whole model in a step
limits.py        the grids over which a model can be split
choices.py       the choices of --tp-layout, and which configurations they refuse
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach(
    __name__,
    submod_attrs={
        "cube": ["CubeLinear"],
        "grid": ["SummaLinear"],
        "grid_costs": ["grid_step_elems"],
        "grid_model": ["grid_parallel"],
    },
)
