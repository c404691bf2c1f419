"""The site: README, lessons, exercises, museum, interview book, names, API, and pages that run minipar's own Python.

answers.py   answers to the interactive pages, as functions from plain values to plain values; imports no torch
recorded.py  collectives, recorded on real ranks when the site is built
gather.py    the pages of the site from the files of the checkout
build.py     `make site`: gather, run MkDocs, add Python for the browser
pages/       texts of the interactive pages
assets/      their scripts and style; they draw and ask, and compute nothing
"""
