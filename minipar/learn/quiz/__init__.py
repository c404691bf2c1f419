"""The interview book, and a quiz from it. In reading order:

book.toml    the questions, their spoken answers, and a proof of each answer
book.py      reads the book
progress.py  which questions were missed, kept in the user's data folder
ask.py       the quiz in the terminal: questions of the book to answer aloud, and numeric ones with random numbers
command.py   `minipar quiz`
"""
