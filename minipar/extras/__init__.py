"""The parts of minipar that few runs use. Each is a folder; the library finds it by name, and never imports it directly.

compress      compressed gradients, and gradients or weights averaged less often than once a step
optimizers    LAMB and Muon
offload       optimizer states and master weights in CPU memory or in a file
schedules     pipeline schedules: two directions, V-Min, slices of sequences, offloaded activations, and an exact search
pipelines     PipeDream
asynchrony    gradients applied some steps later
tensor_grids  tensor parallelism in two and three dimensions
experts       dispatch that replicates or moves hot experts, or sends rows in chunks
precision     matmuls in 8-bit and 4-bit floats, stochastic rounding
collectives   double binary tree
cost          further views of `minipar plan`: stages of unequal meshes, topology, compression, scaling
dry_run       finds what every rank would hold and send, without starting any
checkpoints   torch's distributed checkpoint format
http          serves requests over HTTP, in the format of OpenAI's API
run           elastic training, calibration

Extras are found by the entry points of the group "minipar.extras": see `minipar.support.registry`.
"""
