"""The parts that few runs use, each a folder that the core finds by name and never imports.

compress      gradients compressed, or averaged less often
optimizers    LAMB and Muon
offload       optimizer states and master weights in CPU memory or in a file
schedules     two directions, waves, V-Half and V-Min, slices of sequences, exact search
pipelines     PipeDream
asynchrony    gradients applied some steps later
tensor_grids  tensor parallelism in two and three dimensions
experts       tokens sent once per node, hot experts replicated, rows sent in chunks
precision     products of 8 and 4-bit floats, stochastic rounding
collectives   double binary tree, Bruck
cost          further views of the planner: stages of unequal meshes, topology, compression, scaling
dry_run       what every rank would hold and send, without starting any
checkpoints   torch's distributed checkpoint format
http          requests over HTTP, in the format of OpenAI's API
run           elastic training, calibration

`minipar.support.registry` says how an extra is found: by the entry points of the group "minipar.extras".
"""
