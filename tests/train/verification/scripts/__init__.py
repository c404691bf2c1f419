"""Training scripts as people write them, right and wrong, for a judge of training scripts: `RIGHT` and `WRONG`.

base.py     a script, and the ways to split its work over ranks: ours, torch's wrappers, plain calls of torch.distributed
nanogpt.py  a small GPT: tied weights, padded targets, clipping, weight decay by group, a warm-up
lora.py     a small Llama with a frozen base and low-rank adapters
image.py    a small convolutional net with batch norms, whose statistics are frozen
"""

from tests.train.verification.scripts import image, lora, nanogpt
from tests.train.verification.scripts.base import RIGHT, WRONG

__all__ = ["RIGHT", "WRONG", "image", "lora", "nanogpt"]
