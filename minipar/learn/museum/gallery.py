"""All exhibits: their stories, from gallery.toml, joined with the faulty code.

An exhibit that needs an extra is left out if the extra is not installed.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from importlib.resources import files
from typing import Any, get_args

from minipar.config.choices import CHOSEN
from minipar.config.train_config import VERIFY_DEFAULTS
from minipar.inference import Options
from minipar.learn.facts import quote
from minipar.learn.museum import drawing, floor_faults, mesh_faults, serving_faults
from minipar.learn.museum.drawing import DrawingExhibit
from minipar.learn.museum.exhibit import Exhibit, FloorExhibit, MeshExhibit, Symptom
from minipar.learn.museum.serving import ServingExhibit
from minipar.support.errors import one_of

CONFIG = replace(VERIFY_DEFAULTS, steps=3)
EXPERTS = replace(CONFIG.model, num_experts=4, group_tokens=16, capacity_factor=1.0, tie_embeddings=False)
SYMPTOMS: tuple[str, ...] = get_args(Symptom)
SERVING = Options(block_size=4, num_blocks=9, token_budget=9, prefix_cache=False)


def _exhibits() -> Iterator[Exhibit]:
    rows = tomllib.loads((files(__package__) / "gallery.toml").read_text(encoding="utf-8"))["exhibit"]
    for row in quote(rows):
        if _is_installed(row.get("config", {})):
            yield exhibit_of(row)


def exhibit_of(row: Mapping[str, Any]) -> Exhibit:
    """Return the exhibit of a row of gallery.toml. Raises ValueError, with the exhibit's name, for a row with a mistake."""
    kinds: dict[str, Callable[..., Exhibit]] = {
        "config": _of_a_mesh,
        "serving": _of_the_engine,
        "specification": _of_the_floor,
        "drawing": _drawn,
    }
    try:
        (make,) = (make for field, make in kinds.items() if field in row)
    except ValueError:
        raise _mistake(row, f"has not exactly one of {', '.join(kinds)}") from None
    if row.get("symptom") not in SYMPTOMS:
        raise _mistake(row, f"has symptom={row.get('symptom')!r}; use {one_of(SYMPTOMS)}")
    try:
        return make(**row)
    except (AttributeError, ImportError, TypeError, ValueError) as error:
        raise _mistake(row, f"cannot be made: {error}") from error


def _mistake(row: Mapping[str, Any], what: str) -> ValueError:
    return ValueError(f"exhibit={row.get('name')!r} of gallery.toml {what}")


def _is_installed(config: Mapping[str, Any]) -> bool:
    return all(config[field] in kind for field, kind in CHOSEN.items() if field in config)


def _of_a_mesh(
    *, fault: str, config: dict[str, Any], experts: dict[str, Any] | None = None, **told: Any
) -> Exhibit:
    model = CONFIG.model if experts is None else replace(EXPERTS, **experts)
    return MeshExhibit(
        config=replace(CONFIG, model=model, **config), fault=getattr(mesh_faults, fault), **told
    )


def _of_the_engine(*, fault: str, serving: dict[str, Any], **told: Any) -> Exhibit:
    options = replace(SERVING, **serving)
    return ServingExhibit(options=options, fault=getattr(serving_faults, fault), **told)


def _of_the_floor(*, fault: str, right: str, **told: Any) -> Exhibit:
    module, _, name = right.partition(".")
    kept = getattr(import_module(f"minipar.simple.{module}"), name)
    return FloorExhibit(wrong=getattr(floor_faults, fault), right=kept, **told)


def _drawn(*, right: str, **told: Any) -> Exhibit:
    wrong = told.pop("drawing")
    return DrawingExhibit(wrong=getattr(drawing, wrong), right=getattr(drawing, right), **told)


GALLERY = tuple(_exhibits())
EXHIBITS = {exhibit.name: exhibit for exhibit in GALLERY}


def find(name: str) -> Exhibit:
    """Return the exhibit of this name. Raises ValueError, with the most similar name, if there is none."""
    if name not in EXHIBITS:
        raise ValueError(f"exhibit={name!r} is unknown; use {one_of(EXHIBITS, near=name)}")
    return EXHIBITS[name]
