"""Pictures of schedules, timelines, collectives and losses.

style.py             the colours and axes they share
trace.py             what each rank did and when
memory.py            what a rank holds, by what it is for
training.py          the loss of a run, and a reference's
collectives.py       the ring step by step, and the time collectives take
ring_animation.py    the ring in motion
pipeline.py          a pipeline's timelines, simulated or measured, as PNG and SVG
pipeline_text.py     the same as a grid of text
pipeline_command.py  what `minipar timeline` does
"""
