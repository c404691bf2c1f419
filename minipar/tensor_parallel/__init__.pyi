# The public names of this package, imported when asked for: read by lazy_loader, and by type checkers.
from .by_plan import Column as Column
from .by_plan import Divided as Divided
from .chunked import gather_matmul as gather_matmul
from .chunked import matmul_scatter as matmul_scatter
from .column import ShardedWeight as ShardedWeight
from .column import column_parallel as column_parallel
from .gather_shards import full_state_dict as full_state_dict
from .parallel_linear import ColumnParallelLinear as ColumnParallelLinear
from .parallel_linear import RowParallelLinear as RowParallelLinear
from .split_model import tensor_parallel as tensor_parallel
from .vocab import VocabParallelEmbedding as VocabParallelEmbedding
from .vocab import vocab_parallel_cross_entropy as vocab_parallel_cross_entropy
