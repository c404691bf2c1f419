"""Train a byte-level model on text, on any mesh, and prove the run equal to one process. In reading order:

train_config.py       a run's configuration: model, batch, optimizer, mesh
check_config.py       which meshes, models and batches fit each other, checked before any rank starts
check_experts.py      the same of experts, and of the ways in which rows get to them
slicing.py            where samples are cut into slices
check_paths.py        which files and folders can be read and written, checked before torch is imported
compression_config.py  what `--compress` can be, what each method serves, and what is refused
toml_config.py        a configuration as a TOML file
token_file.py         a file of token ids, or of bytes, mapped into memory
tokenizer.py          text to token ids and back
epoch.py              samples without replacement, computed from seed and step
text.py               a run's token ids, held-out text, and the batch of step k as a function of (seed, k)
made_ahead.py         the next batch, made on a thread
initial_weights.py    the weights that a run starts from, a rank's own: from the seed, or from a Llama
optim.py              parameter groups, learning rate, gradient norm over any mesh
recompute.py          activation checkpointing; activations partitioned over tp or offloaded to the CPU
master_weights.py     float32 master weights of a half precision model
compression.py        gradients compressed, or sent more rarely: what compresses, and its state in checkpoints
parallelize.py        the recipe: which transformation is applied in which order
metrics.py            metrics of a step besides its loss: throughput, and the routing of the experts
step.py               one training step on one rank
reference.py          the same steps in one process, and the largest differences
provenance.py         which steps of the recipe made a rank's part of a tensor
rounded_reference.py  one process in half precision, one step at a time from a mesh's own weights
verification.py       any mesh against one process, tensor by tensor
legal_configs.py      the meshes, ZeRO stages and schedules that `minipar verify --all` compares
atomic_files.py       files that are written completely or not at all
log.py                metrics, written after every step
tensor_file.py        slices of a safetensors file, and tensors written one at a time
manifest.py           which part of which tensor is in which file of a checkpoint
restore.py            find the newest undamaged checkpoint, and read it on any mesh
old_checkpoints.py    which checkpoints are removed
checkpoint.py         write a sharded checkpoint while training continues
state.py              the state of a run, to a checkpoint and back
resume.py             what a run is not continued from, and what is said to differ
internode_traffic.py  which axes cross nodes, and the bytes that tp then sends between them
planned.py            what a run is to the planner
elastic.py            another mesh for the ranks that are left when a node is lost
trainer.py            the loop, and the run around it
export.py             a trained model as one file, or as Hugging Face's Llama
calibrate.py          this machine, measured, as a machine file of `minipar plan`
text_generation.py    text from a trained model, on any mesh of tp and pp ranks
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
