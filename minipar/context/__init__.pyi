# The public names of this package, imported when asked for: read by lazy_loader, and by type checkers.
from .all_gather import all_gather_attention as all_gather_attention
from .attention_ring import ring_attention as ring_attention
from .documents import document_positions as document_positions
from .documents import next_tokens as next_tokens
from .documents import pack_documents as pack_documents
from .parallelize_context import context_parallel as context_parallel
from .token_layout import LocalBatch as LocalBatch
from .token_layout import causal_work as causal_work
from .token_layout import join_local as join_local
from .token_layout import local_batch as local_batch
from .token_layout import local_positions as local_positions
from .token_layout import take_local as take_local
from .ulysses import flash_attention as flash_attention
from .ulysses import ulysses_attention as ulysses_attention
from .usp import split_comm as split_comm
from .usp import usp_attention as usp_attention
