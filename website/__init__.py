"""The site: README, docs, lessons, exercises, museum, interview book, API, and pages that run minipar's own Python.

answers.py   answers for the interactive pages, as functions from plain values to plain values; imports no torch
recorded.py  collectives, recorded on real ranks when the site is built
gather.py    the pages of the site from the files of the checkout
bundle.py    minipar for the browser, as a zip
build.py     `make site`: gather, run MkDocs, add Python for the browser
pages/       texts of the interactive pages
assets/      scripts and style of the interactive pages; scripts ask and draw, and compute nothing
"""
