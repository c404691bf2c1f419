"""Tests mirror the package: tests/<package>/test_x.py holds the claims about minipar/<package>/x.py."""
