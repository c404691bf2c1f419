"""Pictures of schedules, timelines and losses.

pipeline.py          a pipeline's timelines, simulated or measured, as PNG and SVG
pipeline_text.py     the same as a grid of text
pipeline_command.py  what `minipar timeline` does
"""
