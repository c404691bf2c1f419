"""`minipar exercise` and `minipar museum`, with the functions that draw their pictures."""

from minipar.cli.report import draw_exercise, draw_losses
from minipar.learn.exercises.command import exercise_command
from minipar.learn.museum.command import museum_command

exercise = exercise_command(draw_exercise)
museum = museum_command(draw_losses)
