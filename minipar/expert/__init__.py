"""Expert parallelism: the model's mixture of experts with its experts spread over ranks.

moe.py        SwitchMoE that takes a Comm
apply.py      the recipe: which parameters are cut, whose gradients are summed where
dispatch.py   rows travel to their experts and back
exchange.py   the all-to-all, while something else is computed; in one level or in two
"""

from minipar.expert.apply import expert_parallel, gradient_comm, is_expert
from minipar.expert.dispatch import AllToAll
from minipar.expert.moe import SwitchMoE

__all__ = ["AllToAll", "SwitchMoE", "expert_parallel", "gradient_comm", "is_expert"]
