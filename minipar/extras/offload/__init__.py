"""Optimizer states and master weights outside the device's memory. In reading order:

memories.py             host memory, or a file that is read and written in the background
scratch_file.py         a file without a name, for tensors that are not needed in memory
offloaded_optimizer.py  an optimizer of FSDP's shards, with its states in that memory
places.py               host memory and the file, for `--offload`
choices.py              the choices of --offload, and which configurations they refuse
"""
