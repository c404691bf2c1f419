"""Checkpoint formats of other programs: dcp.py writes and reads torch's distributed checkpoint format."""
