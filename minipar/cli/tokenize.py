"""`minipar tokenize`."""

# No `from __future__ import annotations`: tyro evaluates the annotations.

from functools import partial
from pathlib import Path

import tyro

from minipar.cli.parse import Work
from minipar.config.check_paths import require_readable, require_writable


def tokenize_command(text: tyro.conf.Positional[Path], tokenizer: Path, out: Path) -> Work:
    """Write the token ids of a text to a file for `minipar train --tokens`. The whole text is never in memory at once.

    Args:
        text: a text file in UTF-8.
        tokenizer: a tokenizer.json of the package tokenizers.
        out: the file to write: 16-bit ids, or 32-bit if the vocabulary exceeds 65536; only a .npy file has a header.
    """
    return partial(_tokenize, text, tokenizer, out)


def _tokenize(text: Path, tokenizer: Path, out: Path) -> None:
    require_readable("text", text)
    require_readable("tokenizer", tokenizer)
    if out.is_dir():
        raise ValueError(f"out={out} is a folder; use the name of a file")
    require_writable(out.parent)
    from minipar.support.atomic_files import prepare_folder
    from minipar.train.data.tokenizer import Tokenizer, write_tokens

    codec = Tokenizer(tokenizer)
    prepare_folder(out.parent)
    count = write_tokens(text, codec, out)
    print(f"{count} tokens of a vocabulary of {codec.vocab_size}: minipar train --tokens {out} "
          f"--tokenizer {tokenizer} --model.vocab-size {codec.vocab_size}")  # fmt: skip
