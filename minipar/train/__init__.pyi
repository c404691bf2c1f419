# The public names of this package, imported when asked for: read by lazy_loader, and by type checkers.
from .optim import clip_grad_norm_ as clip_grad_norm_
from .text_generation import generate_text as generate_text
from .trainer import train as train
from .verification.own_training.verify_training import verify_training as verify_training
from .verification.verify import verify as verify
