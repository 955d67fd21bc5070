"""What makes a run the run it is, kept in its states, so that a change on the way is told."""

import os
from collections.abc import Mapping
from typing import Any

from options.schema import DatasetOptions, Options, TrainOptions

# other values of these train the same weights
_IDLE = {
    *("train.total_iter", "train.use_checkpointing", "train.nan_guard"),
    *(
        f"datasets.train.{key}"
        for key in ("name", "num_worker_per_gpu", "num_prefetch_queue", "pin_memory", "persistent_workers")
    ),
}
_ABSENT = "none"


def facts(options: Options, world: int) -> dict[str, Any]:
    """The options that decide which weights come out, in plain types: ``network_g.dim`` -> value, ...

    Args:
        world: number of processes.
    """
    training_set = next(iter(options.phase("train").values()), None)
    sections: dict[str, Any] = {
        "network_g": options.network_g.spec(),
        "scale": options.scale,
        "manual_seed": options.manual_seed,
        "processes": world,
    }
    if options.train is not None:
        sections["train"] = _without_inert(options.train, TrainOptions)
    if training_set is not None:
        sections["datasets"] = {"train": _without_inert(training_set, DatasetOptions)}
    return {place: _one_spelling(place, value) for place, value in _flat(sections).items() if place not in _IDLE}


def _one_spelling(place: str, value: Any) -> Any:
    is_path = isinstance(value, str) and place.rpartition(".")[2].startswith(("dataroot", "meta_info"))
    return os.path.realpath(os.path.expanduser(value)) if is_path else value


def describe(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """``network_g.window_sizes [4] -> [8], manual_seed 0 -> 1``; empty where nothing differs."""
    places = [*now, *(place for place in before if place not in now)]
    # what an older state does not know, and what nobody sets, are both none
    known, own = ({k: v for k, v in run.items() if v is not None} for run in (before, now))
    pairs = [(place, known.get(place, _ABSENT), own.get(place, _ABSENT)) for place in places]
    return ", ".join(f"{place} {old} -> {new}" for place, old, new in pairs if old != new)


def _without_inert(section: TrainOptions | DatasetOptions, schema: type) -> dict[str, Any]:
    inert = {key for key, field in schema.model_fields.items() if "inert" in (field.json_schema_extra or {})}
    return section.model_dump(mode="json", exclude=inert)


def _flat(value: Any, place: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {place: list(value) if isinstance(value, tuple) else value}
    found: dict[str, Any] = {}
    for key, entry in value.items():
        found |= _flat(entry, f"{place}.{key}" if place else str(key))
    return found
