# The public names of this package, imported when asked for: read by lazy_loader, and by type checkers.
from .ddp import DDP as DDP
from .fsdp import FSDP as FSDP
from .loss_scaler import DynamicLossScaler as DynamicLossScaler
from .zero import ZeroOptimizer as ZeroOptimizer
