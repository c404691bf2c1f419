"""Expert parallelism: the model's mixture of experts with its experts spread over ranks.

moe.py        SwitchMoE that takes a Comm
apply.py      the recipe: which parameters are cut, whose gradients are summed where
dispatch.py   rows travel to their experts and back
exchange.py   the all-to-all, while something else is computed; in one level or in two
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
