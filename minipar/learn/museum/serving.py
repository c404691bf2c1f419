"""An exhibit of inference: a fault planted in the library's engine, and the texts that it generates with and without."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from unittest import mock

import torch

from minipar.config.model_config import ModelConfig
from minipar.inference import Engine, Options, Request
from minipar.inference.request import distribution
from minipar.learn.museum.exhibit import Change, Exhibit, Finding
from minipar.model.sampling import choose
from minipar.model.transformer import Transformer

VOCAB, LONGEST, LOUD = 13, 24, 20.0
SMALL = ModelConfig(vocab_size=VOCAB, dim=16, num_layers=2, num_heads=4, max_seq_len=LONGEST)
PROMPTS = [tuple((7 * i + i * i * k + k) % VOCAB for i in range(LONGEST)) for k in range(2)]

ServingFault = Callable[[Change], None]


def crowd() -> list[Request]:
    """Return requests that compete for few blocks. The last one's first block equals another request's second block."""
    several = [
        Request(
            PROMPTS[i % 2][: 8 + 4 * (i % 3 == 0)],
            12 - i % 3,
            arrival_s=i // 2,
            temperature=8.0 * (i % 2),
            seed=i,
        )
        for i in range(8)
    ]
    return [*several, Request((*PROMPTS[0][4:8], 1), 6, arrival_s=0.5)]


def loud_model() -> Transformer:
    """Return a model of random weights, large enough that every earlier token affects the next one."""
    model = Transformer(SMALL, dtype=torch.float64)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(LOUD)
    return model.eval()


@torch.no_grad()
def alone(model: Transformer, request: Request) -> list[int]:
    """Return a request's new tokens without cache, batch or blocks: each token takes a forward of the whole text."""
    text = list(request.prompt)
    while len(text) < request.max_tokens:
        logits = model(torch.tensor([text]))[0, -1]
        text.append(choose(distribution(logits, request), request.seed, len(text)))
    return text[len(request.prompt) :]


@dataclass(frozen=True)
class ServingExhibit(Exhibit):
    """A fault in the engine: `fault(change)` calls `change(owner, name, value)` for each attribute to replace."""

    options: Options
    fault: ServingFault

    def run(self, curve: bool = True) -> Finding:
        served, wanted = self._texts(self.fault)
        different = [i for i, (text, want) in enumerate(zip(served, wanted)) if text != want]
        symptom = f"{len(served)} requests, {len(served)} answers of the right length, and no error"
        if not different:
            return Finding(symptom, "nothing")
        i = different[0]
        place = next(n for n, (a, b) in enumerate(zip(served[i], wanted[i])) if a != b)
        proof = (
            f"{len(different)} of {len(served)} requests do not get the text they get alone. Request {i} differs from its "
            f"token {place} on: {_spelled(served[i])}; alone: {_spelled(wanted[i])}"
        )
        rows = [
            f"request {n}  {'same' if text == want else 'OTHER':5}  served {_spelled(text):36} alone {_spelled(want)}"
            for n, (text, want) in enumerate(zip(served, wanted))
        ]
        return Finding(symptom, proof, "\n".join(rows))

    def run_without_fault(self) -> bool:
        served, wanted = self._texts(None)
        return served == wanted

    def _texts(self, fault: ServingFault | None) -> tuple[list[list[int]], list[list[int]]]:
        """Return the new tokens of the requests served together, with the fault, and those of each request served alone."""
        model, requests = loud_model(), crowd()
        with ExitStack() as stack:
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            torch.set_num_threads(1)  # for products this small, threads cost more than they save
            wanted = [alone(model, request) for request in requests]
            if fault is not None:
                fault(lambda *args: stack.enter_context(mock.patch.object(*args)))
            return [result.tokens for result in Engine(model, self.options).run(requests)], wanted


def _spelled(tokens: list[int]) -> str:
    return " ".join(map(str, tokens))
