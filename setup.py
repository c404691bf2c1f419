"""The description of the package: README without what only a checkout shows, its picture and its links to files."""

import re
from pathlib import Path

from setuptools import setup

readme = Path("README.md").read_text(encoding="utf-8")
readme = re.sub(r"!\[[^]]+\]\(docs/\S+\)\n\n\(`python.*draws this picture\.\) ", "", readme)
readme = re.sub(r"\[([^]]+)\]\((?!https?:)[^)]+\)", r"\1", readme)

setup(long_description=readme, long_description_content_type="text/markdown")
