# The public names of this package, imported when asked for: read by lazy_loader, and by type checkers.
from .dispatch import AllToAll as AllToAll
from .shard_experts import expert_parallel as expert_parallel
from .shard_experts import gradient_comm as gradient_comm
from .shard_experts import is_expert as is_expert
from .switch_moe import SwitchMoE as SwitchMoE
