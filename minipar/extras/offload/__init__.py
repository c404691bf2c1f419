"""Optimizer states and master weights outside the device's memory. In reading order:

memories.py             host memory, or a file that is read and written in the background
scratch_file.py         the unnamed file that holds the tensors on disk
offloaded_optimizer.py  an optimizer of FSDP's shards that keeps its states in host memory or in the file
places.py               what `--offload cpu` and `disk` load
choices.py              the choices of --offload, and which configurations they refuse
"""
