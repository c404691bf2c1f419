"""The draft that a command-line argument names: ngram, layers:K, or the folder of a run with a smaller model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from minipar.comm import Comm
from minipar.config.check_paths import CHECKPOINTS
from minipar.config.model_config import ModelConfig
from minipar.inference.speculative import Draft, ModelDraft, NGramDraft
from minipar.mesh import Mesh
from minipar.train.checkpoint.restore import Checkpoint, newest_whole
from minipar.train.state import BUFFER, PARAMETER
from minipar.train.text_generation import load_stage


@dataclass(frozen=True)
class DraftChoice:
    """A draft by its name. Call `check` before any rank starts, and `load` on every rank, since all ranks make the guesses.

    ngram     repeats what followed the text's last two tokens where they occurred before
    layers:K  the first K layers of the model itself, with its last norm and its output layer
    FOLDER    the model of the newest checkpoint of another run
    """

    word: str = "ngram"

    @property
    def num_layers(self) -> int | None:
        """Return K of layers:K, or None for any other draft. Raises ValueError if K is not a number."""
        kind, colon, count = self.word.partition(":")
        if kind != "layers" or not colon:
            return None
        if not count.isdecimal() or int(count) < 1:
            raise ValueError(f"draft={self.word!r}; use layers:K with a whole number K of 1 or more")
        return int(count)

    def check(self, run_folder: Path, config: ModelConfig) -> None:
        """Raise ValueError if there is no such draft, or if its vocabulary differs from that of the model of `config`."""
        if self.word == "ngram":
            return
        if self.num_layers is not None:
            if self.num_layers > config.num_layers:
                raise ValueError(
                    f"draft={self.word!r}: the model has num_layers={config.num_layers}; use at most so many"
                )
            return
        theirs, ours = self._open(), _newest(run_folder)
        assert ours is not None
        vocab_size = theirs.extra["model"]["vocab_size"]
        if vocab_size != config.vocab_size:
            raise ValueError(
                f"draft={self.word} has vocab_size={vocab_size}, and {run_folder} has {config.vocab_size}; "
                "use a run of the same vocabulary"
            )
        codecs = [extra.get("codec", "bytes") for extra in (theirs.extra, ours.extra)]
        if codecs[0] != codecs[1]:
            raise ValueError(
                f"draft={self.word} was trained on tokens of {codecs[0]}, and {run_folder} on those of {codecs[1]}; "
                "use a run with the same tokenizer"
            )

    def load(self, world: Comm, checkpoint: Checkpoint) -> Draft:
        """Return the draft for the model of `checkpoint`; it is not sharded, so each rank loads all of it."""
        if self.word == "ngram":
            return NGramDraft()
        alone = Mesh(world.subgroup([world.rank], "draft"))
        if self.num_layers is None:
            return ModelDraft(load_stage(self._open(), alone, world.device))
        model = load_stage(checkpoint, alone, world.device)
        for later in range(self.num_layers, model.config.num_layers):
            del model.layers[str(later)]
        return ModelDraft(model)

    def _open(self) -> Checkpoint:
        if (checkpoint := _newest(Path(self.word))) is None:
            raise ValueError(
                f"draft={self.word!r} is no run with a whole checkpoint; use ngram, layers:K or the folder of a run"
            )
        return checkpoint


def _newest(folder: Path) -> Checkpoint | None:
    path = newest_whole(folder / CHECKPOINTS, {PARAMETER, BUFFER})
    return None if path is None else Checkpoint(path)
