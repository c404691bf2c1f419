"""The site: README, docs, lessons, exercises, museum, interview book, API, and pages that run minipar's own Python.

answers.py          answers for the interactive pages, as functions from plain values to plain values; imports no torch
puzzles.py          the puzzles' texts, and their verdicts as plain values; no torch
recorded.py         collectives, recorded on real ranks when the site is built
lesson_pictures.py  what the lessons' explorables show, for every choice of the reader
explorables.py      the explorables' HTML, and where a lesson's page has one
gather.py           the pages of the site from the files of the checkout
bundle.py           minipar for the browser, as a zip
public_names.py     the page of public names
build.py            `make site`: gather, run MkDocs, draw the first pictures, add Python for the browser
prerender.mjs       draws the first picture of each page when the site is built, so that it is there without JavaScript
offline-worker.js   keeps what was seen, and all texts, for reading without a network
lighthouse.py       `make lighthouse`: its scores of the built site
editor.html         the puzzles' editor
pages/              texts of the interactive pages
assets/             scripts and style; scripts ask and draw, and compute nothing. drawing.mjs and pictures.mjs are pure:
                    from values to text, in a browser and in prerender.mjs alike
"""
