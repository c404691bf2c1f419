"""Expert parallelism: the model's mixture of experts with its experts sharded over ranks. In reading order:

overlapped_all_to_all.py  an all-to-all that overlaps computation; in one level or in two
dispatched_rows.py        rows on their way to the ranks of their experts: all at once, or in chunks beside the products
dispatch.py               `AllToAll`: dispatch rows to the ranks of their experts, and combine: send the results back
once_per_node.py          `OncePerNode`: a token goes to a node once, and is copied there to its experts
shadow_placement.py       which experts are hot enough to be replicated on all ranks for a step
shadowed_experts.py       `ShadowedAllToAll`: rows of hot experts stay, and the experts' weights come to them
shard_experts.py          `expert_parallel`: shards the model's experts; which gradients are summed over which ranks
switch_moe.py             `SwitchMoE`, a mixture of experts that takes a Comm
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
