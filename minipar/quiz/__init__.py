"""The interview book, and a quiz from it. In reading order:

book.toml    the questions, their spoken answers, and what proves each
book.py      read the book
progress.py  which questions were missed, kept in the user's data folder
ask.py       the quiz in the terminal: spoken questions of the book, numeric ones with fresh numbers
boards.py    whiteboard walkthroughs and system designs, with the ground floor's code and the planner's numbers
pages.py     all of it as Markdown: lessons/interview/
"""
