"""Pictures of runs, collectives, layouts and schedules. In reading order:

style.py             the colours, axes and file writing that all pictures share
trace.py             what each rank did and when
memory.py            bytes that a rank holds, by kind
training.py          the loss of a run, and of a reference
meshes.py            the loss on several meshes, and how far each is from one process
collectives.py       a ring all-reduce step by step, and the time that all-reduces take
ring_animation.py    a ring all-reduce as an animation
tensor_parallel.py   what a rank holds at each point of a layer, and what each cut of a matrix costs
context.py           which rank computes which attention scores, and its share of the work
expert.py            tokens kept and dropped by experts, and the experts' loads
capacity.py          loss and dropped choices of a mixture, by capacity factor
pipeline_text.py     a pipeline's timeline as a grid of text
pipeline.py          a simulated or measured timeline as PNG and SVG
pipeline_command.py  the work of `minipar timeline`
verify.py            the sweep of `minipar verify --all`
routing.py           loss, drops and bytes of mixtures of experts, by routing option
strategies.py        what a rank holds and sends under each strategy alone
mesh.py              groups of a mesh, the bytes that its axes send, and what a step waits for
cost.py              a plan: memory, the parts of a step, time against memory, scaling
checkpoint.py        days with failures, a tensor's parts, a resumed run, goodput
serving.py           requests over time, cache blocks in use, and static batches beside continuous ones
serving_plan.py      time per token and tokens per second, against the batch size
explore.py           the built site, served to a browser: `minipar explore`
source.py            source code in a notebook
"""
