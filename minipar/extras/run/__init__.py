"""Runs whose number of ranks changes, and the calibration of the planner for this machine.

elastic.py            when a node is lost, chooses a mesh for the remaining ranks, and continues the run
calibrate.py          measures this machine, and writes a machine file for `minipar plan`
calibrate_command.py  the command `minipar calibrate`
choices.py            declares `--membership elastic`, which configurations it refuses, and `minipar calibrate`
"""
