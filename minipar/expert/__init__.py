"""Expert parallelism: the experts of the model's MoE layers are sharded over ranks. In reading order:

overlapped_all_to_all.py  an all-to-all that overlaps with computation, in one level or in two
dispatched_rows.py        rows on their way to the ranks of their experts, and back
dispatch.py               `AllToAll`: dispatch rows to the ranks of their experts, and combine: send the results back
shard_experts.py          `expert_parallel`: shards the model's experts; which gradients are summed over which ranks
switch_moe.py             `SwitchMoE`, an MoE layer that takes a Comm
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
