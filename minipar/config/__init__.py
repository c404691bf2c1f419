"""The settings of a run and of a model, and every rule of what is legal. Imports no torch. In reading order:

model_config.py    ModelConfig: a model's sizes
moe_config.py      MoEConfig: the options of its MoE layers
choices.py         settings chosen by name, with minipar's own choices
llama_config.py    the sizes in a Hugging Face model's config.json, and its family
mesh_rules.py      which sizes of a mesh are legal, and shares of unequal ranks
context_limits.py  the tokens of each cp rank, and the lengths and heads that cp divides
rules.py           every rule of what fits together: a table that trainer, sweep and planner ask
train_config.py    TrainConfig: model, batch, optimizer, mesh
toml_config.py     a configuration as a TOML file
check_paths.py     which files and folders can be read and written
"""

from minipar.config.model_config import ModelConfig
from minipar.config.train_config import VERIFY_DEFAULTS, TrainConfig

__all__ = ["VERIFY_DEFAULTS", "ModelConfig", "TrainConfig"]
