"""Runs whose number of ranks changes, and the measurement of this machine.

elastic.py            another mesh for the ranks that are left when a node is lost
calibrate.py          measures this machine, and writes a machine file for `minipar plan`
calibrate_command.py  `minipar calibrate`
choices.py            the choice of --membership, the command, and which configurations are refused
"""
