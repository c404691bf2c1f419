"""Asynchronous pipelines.

pipedream.py  PipeDream with stale, stashed, delayed or predicted weights
"""
