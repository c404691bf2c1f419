# The public names of this package, imported when asked for: read by lazy_loader, and by type checkers.
from .dispatch import AllToAll as AllToAll
from .once_per_node import OncePerNode as OncePerNode
from .shadow_placement import break_even_rows as break_even_rows
from .shadow_placement import choose_shadowed as choose_shadowed
from .shadowed_experts import ShadowedAllToAll as ShadowedAllToAll
from .shard_experts import expert_parallel as expert_parallel
from .shard_experts import gradient_comm as gradient_comm
from .shard_experts import is_expert as is_expert
from .switch_moe import SwitchMoE as SwitchMoE
