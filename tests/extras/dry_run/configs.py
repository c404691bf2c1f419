"""Small runs, for dry runs and for real ranks beside them."""

from dataclasses import replace

from minipar.config.model_config import ModelConfig
from minipar.config.train_config import TrainConfig

TINY = ModelConfig(dim=32, num_layers=2, num_heads=4, num_kv_heads=2, max_seq_len=16)
DEEP = replace(TINY, num_layers=4)
MIXTURE = replace(TINY, num_layers=1, num_experts=4, top_k=2, moe_every=1)
RUN = TrainConfig(model=TINY, batch_size=4, seq_len=16, steps=2, warmup=1, dtype="float64", trace_steps=0)
