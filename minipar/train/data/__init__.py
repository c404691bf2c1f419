"""The batch of a step, as a function of (seed, step). In reading order:

token_file.py  a file of token ids, or of bytes, mapped into memory
tokenizer.py   codecs: text to token ids and back
epoch.py       sampling without replacement, computed from seed and step
text.py        a run's token ids, held-out text, and the batch of a step
prefetch.py    makes the next batches on a thread
"""
