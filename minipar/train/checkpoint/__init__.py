"""Weights and states in files: written sharded, read on any mesh. In reading order:

tensor_file.py      slices of a safetensors file, and tensors written one at a time
manifest.py         which part of which tensor is in which file of a checkpoint
restore.py          find the newest undamaged checkpoint, and read it on any mesh
saver.py            write a sharded checkpoint while training continues
retention.py        which checkpoints are removed
initial_weights.py  a rank's part of the weights that a run starts from: made from the seed, or read from a Llama
export.py           a trained model as one file, or as Hugging Face's Llama
"""
