"""From the command line to frozen options: every error of a file at once, with its place and the nearest known key."""

import argparse
import importlib.util
import logging
import os
import sys
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from options import basicsr_alias, check, remarks, schema, stages, yaml_file
from options.errors import OptionsError
from options.overrides import apply_overrides, report
from options.registry import (
    ARCHS,
    DATASETS,
    LOSSES,
    METRICS,
    MODELS,
    OPTIMIZERS,
    SCHEDULERS,
    AlreadyRegistered,
    nearest,
    takes_options_dict,
    wrong_arguments,
)

logger = logging.getLogger("pellucid")

GIVEN_TO_DATASETS = ("phase", "scale", "seed", "name")
GIVEN_TO_METRICS = ("img", "img2", "data_range")
PHASES = ("train", "val", "test")


def parse(argv: Sequence[str] | None = None, *, program: str) -> argparse.Namespace:
    """Read the command line of train.py or test.py; the BasicSR spellings work."""
    parser = argparse.ArgumentParser(
        prog=program, description="Options come from a YAML file; key.sub=value overrides."
    )
    parser.add_argument("-opt", "--opt", required=True, type=Path, metavar="FILE.yml", help="the option file")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="options to change, typed like YAML")
    parser.add_argument("--force_yml", nargs="+", default=[], metavar="key:sub=value", help="the same, BasicSR's way")
    parser.add_argument("--launcher", choices=("none", "pytorch", "slurm"), default="none", help="process launcher")
    parser.add_argument("--local_rank", "--local-rank", type=int, default=0, help="set by launchers; not needed")
    training = program == "train.py"
    # BasicSR's test.py takes it too, so scripts may name it
    resume = "continue the run's newest saved state" if training else "taken as BasicSR's test.py does, of no effect"
    parser.add_argument("--auto_resume", action="store_true", help=resume)
    parser.add_argument("--dry_run", action="store_true", help="check everything, print the plan, create nothing")
    debug = "; log every step, validate and save every 8" if training else ""
    parser.add_argument("--debug", action="store_true", help=f"put debug_ before the name{debug}")
    return parser.parse_intermixed_args(argv)


def load(path: Path, overrides: Sequence[str] = (), *, training: bool = True, debug: bool = False) -> schema.Options:
    """Read, override, check and freeze the options of one run.

    Args:
        path: the YAML file.
        overrides: ``key.sub=value`` or ``key:sub=value``.
        training: a training run needs ``train`` and a training set; a test run needs a set to test on.
        debug: short intervals, and ``debug_`` before the name.

    Raises:
        OptionsError: with one line for each thing that is wrong, all of them at once.
    """
    raw, lines = yaml_file.read(path)
    raw = apply_overrides(raw, overrides)
    if debug:
        raw = _debug(raw)
    if basicsr_alias.is_wanted(raw.get("basicsr_alias")):
        basicsr_alias.install()
    import_components(raw.get("import_paths"), Path(path).parent)
    problems, options = _validate(raw, training)
    if problems:
        raise OptionsError(report(path, problems, lines, overrides))
    for place, why in inert_keys(options):
        logger.warning(f"{place} has no effect: {why}")
    for remark in remarks.of(options) if training else ():
        logger.warning(remark)
    return options.model_copy(update={"file": Path(path)})


def import_components(paths: Any, base: Path) -> None:
    """Import files, or all files of folders, whose classes register themselves.

    Relative paths count from the current folder, or else from the option file's. PELLUCID_IMPORT (separated as PATH is)
    adds further ones.
    """
    if paths is not None and not (isinstance(paths, list) and all(isinstance(name, str) for name in paths)):
        raise OptionsError(f"import_paths must be a list of files or folders, got {paths!r}")
    named = list(paths or [])
    named += [part for part in os.environ.get("PELLUCID_IMPORT", "").split(os.pathsep) if part]
    for name in named:
        path = next((p for p in (Path(os.path.expanduser(name)), base / name) if p.exists()), None)
        if path is None or not (path.is_dir() or path.suffix == ".py"):
            raise OptionsError(f"import_paths: there is no folder or .py file {name}")
        for file in sorted(path.glob("*.py")) if path.is_dir() else [path]:
            _import_file(file.resolve())


def inert_keys(options: BaseModel, path: str = "") -> list[tuple[str, str]]:
    """The keys that the user set and that change nothing here, each with the reason."""
    found = []
    for key in options.model_fields_set:
        value = getattr(options, key)
        field = type(options).model_fields.get(key)
        extra = (field.json_schema_extra or {}) if field else {}
        if "inert" in extra and value is not None:
            found.append((f"{path}{key}", extra["inert"]))
        sections = value if isinstance(value, dict) else {"": value}
        for name, section in sections.items():
            if isinstance(section, BaseModel):
                found += inert_keys(section, f"{path}{key}.{name}." if name else f"{path}{key}.")
    return sorted(found)


def _import_file(file: Path) -> None:
    name = f"pellucid_import_{file.stem}_{abs(hash(str(file)))}"
    if name in sys.modules:
        return
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    imported = False
    try:
        spec.loader.exec_module(module)
        imported = True
    except (SyntaxError, ImportError, AlreadyRegistered) as error:
        way_out = basicsr_alias.way_out(error)
        raise OptionsError(f"import_paths: {file} cannot be imported: {error}{way_out}") from error
    finally:
        if not imported:
            del sys.modules[name]


def _debug(raw: dict[str, Any]) -> dict[str, Any]:
    if not isinstance(raw.get("name"), str):
        return raw
    changes = ["val.val_freq=8", "logger.print_freq=1", "logger.save_checkpoint_freq=8", "logger.use_tb_logger=false"]
    return apply_overrides(raw, [f"name=debug_{raw['name']}", *changes])


def _validate(raw: dict[str, Any], training: bool) -> tuple[list[check.Problem], schema.Options | None]:
    raw, problems = _write_out(raw)
    filled, found = _fill_datasets(raw)
    problems += found
    problems += [(("file",), "unknown option")] if "file" in raw else []
    problems += _components(raw)
    options = None
    try:
        options = schema.Options.model_validate(filled)
    except ValidationError as error:
        problems += _schema_problems(error)
    else:
        told = any(place[:2] == ("train", "scheduler") for place, _ in problems)
        problems += _contradictions(options, training, schedule=not told)
    return _without_echoes(problems), options


def _write_out(raw: dict[str, Any]) -> tuple[dict[str, Any], list[check.Problem]]:
    """Keys of data sets that stand for others, written out."""
    if not isinstance(raw.get("datasets"), Mapping):
        return raw, []
    sets, problems = {}, []
    for key, section in raw["datasets"].items():
        if isinstance(section, Mapping) and isinstance(section.get("geometric_augs"), bool):
            section, found = stages.expand_geometric_augs(section, _takes_flips(section.get("type")))
            problems += [(("datasets", key, name), text) for name, text in found]
        sets[key] = section
    return {**raw, "datasets": sets}, problems


def _takes_flips(kind: Any) -> bool:
    # a type that is not known is told elsewhere
    if not isinstance(kind, str) or kind not in DATASETS:
        return True
    entry, flips = DATASETS.get(kind, quiet=True), ("use_hflip", "use_rot")
    return takes_options_dict(entry) or not any(name in flips for name, _ in wrong_arguments(entry, flips))


def _fill_datasets(raw: dict[str, Any]) -> tuple[dict[str, Any], list[check.Problem]]:
    """Give every data set its phase, scale, seed and a name."""
    problems: list[check.Problem] = []
    filled = dict(raw)
    sets = raw.get("datasets")
    if not isinstance(sets, Mapping):
        return filled, problems
    filled["datasets"] = {}
    scale = raw.get("scale", 1)
    for key, dataset in ((str(key), dataset) for key, dataset in sets.items()):
        phase = schema.phase_of(key)
        if phase not in PHASES:
            hint = nearest(phase, PHASES) or "; sections are called train, val, val_1 .., test, test_1 .."
            problems.append((("datasets", key), f"unknown phase {phase}{hint}"))
            continue
        if isinstance(dataset, Mapping):
            taken = [name for name in ("phase", "seed") if name in dataset]
            problems += [(("datasets", key, name), "is set by the program; remove it") for name in taken]
            # as the schema converts them; what it refuses is told there, once
            own = {"scale": _whole(scale, 1) or 1, "seed": _whole(raw.get("manual_seed"), 0), "phase": phase}
            if _whole(dataset.get("scale", own["scale"]), 0) != own["scale"]:
                text = f"is {dataset['scale']}, but the run's scale is {own['scale']}; remove it here"
                problems.append((("datasets", key, "scale"), text))
            dataset = {"name": key, **dataset, **own}
        filled["datasets"][key] = dataset
    return filled, problems


def _whole(value: Any, default: int) -> int:
    """5, 5.0 and "5" are 5; ``default`` for what is no whole number from 0 on."""
    try:
        number = value if isinstance(value, int) else float(value)
    except (TypeError, ValueError):
        return default
    return int(number) if number >= 0 and number == number // 1 else default


def _components(raw: Mapping[str, Any]) -> list[check.Problem]:
    problems = check.component(ARCHS, raw.get("network_g"), ("network_g",))
    problems += [] if problems else check.network(ARCHS, raw.get("network_g"), scale=_whole(raw.get("scale", 1), 0))
    if isinstance(raw.get("model_type"), str) and raw["model_type"] not in MODELS:
        hint = nearest(raw["model_type"], MODELS) or "."
        text = f"unknown model {raw['model_type']}{hint} Known: {', '.join(MODELS.names())}"
        problems.append((("model_type",), text))
    train, val = raw.get("train"), raw.get("val")
    if isinstance(train, Mapping):
        problems += check.component(OPTIMIZERS, train.get("optim_g"), ("train", "optim_g"), ("params",))
        problems += check.component(SCHEDULERS, train.get("scheduler"), ("train", "scheduler"))
        for key in ("pixel_opt", "fft_loss_opt"):
            problems += check.component(LOSSES, train.get(key), ("train", key))
        for key, loss in _items(train.get("losses")):
            problems += check.component(LOSSES, loss, ("train", "losses", key))
    for key, metric in _items(val.get("metrics") if isinstance(val, Mapping) else None):
        problems += _metric(key, metric)
    for key, dataset in _items(raw.get("datasets")):
        if isinstance(dataset, Mapping):
            problems += _dataset(str(key), dataset, _whole(raw.get("scale", 1), 1))
    return problems


def _dataset(key: str, dataset: Mapping[str, Any], scale: int) -> list[check.Problem]:
    loader_keys = [name for name in schema.DatasetOptions.model_fields if name not in (*GIVEN_TO_DATASETS, "type")]
    own = {k: v for k, v in dataset.items() if k == "type" or k not in schema.DatasetOptions.model_fields}
    problems = check.component(DATASETS, own, ("datasets", key), GIVEN_TO_DATASETS, also=loader_keys)
    phase = schema.phase_of(key)
    if problems or phase not in PHASES:
        return problems
    return check.dataset_arguments(DATASETS, own, ("datasets", key), phase=phase, scale=scale or 1)


def _metric(label: Any, metric: Any) -> list[check.Problem]:
    if not isinstance(metric, Mapping):
        return []
    place, own_keys = ("val", "metrics", label), [k for k in schema.MetricOptions.model_fields if k != "type"]
    if "data_range" in metric:
        return [((*place, "data_range"), "is set by the program; quantize says whether pictures are rounded")]
    own = {k: v for k, v in metric.items() if k not in own_keys}
    return check.component(METRICS, own, place, GIVEN_TO_METRICS, also=own_keys)


def _items(section: Any) -> list[tuple[Any, Any]]:
    return list(section.items()) if isinstance(section, Mapping) else []


def _schema_problems(error: ValidationError) -> list[check.Problem]:
    problems = []
    seen = set()
    for found in error.errors():
        place = _in_file(found["loc"])
        if found["type"] == "extra_forbidden":
            text = f"unknown option{nearest(str(place[-1]), _known_keys(place[:-1]))}"
        else:
            text = check.describe(found)
        # a union reports each of its members; the first says enough
        if (place, found["type"] == "missing") not in seen:
            problems.append((place, text))
        seen.add((place, found["type"] == "missing"))
    return problems


def _known_keys(path: tuple) -> list[str]:
    """The keys that the schema knows at this place."""
    model: Any = schema.Options
    for step in path:
        field = model.model_fields.get(step) if isinstance(model, type) and issubclass(model, BaseModel) else None
        model = _section(field.annotation) if field else model
    filled = {"file", "phase", "seed"}
    return [key for key in getattr(model, "model_fields", {}) if key not in filled]


def _section(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for arg in typing.get_args(annotation) if (found := _section(arg))), None)


def _in_file(loc: tuple) -> tuple:
    """pydantic's location without the names of union members."""
    return tuple(step for step in loc if not (isinstance(step, str) and ("[" in step or step in _UNION_MEMBERS)))


_UNION_MEMBERS = {"int", "bool", "str", "float", "constrained-int"}


def _contradictions(options: schema.Options, training: bool, *, schedule: bool) -> list[check.Problem]:
    problems: list[check.Problem] = []
    if options.val.baseline in ("input", "stretch") and options.scale != 1:
        text = f"{options.val.baseline} is smaller than the ground truth at scale {options.scale}; take bicubic"
        problems.append((("val", "baseline"), text))
    weights = options.path.pretrain_network_g
    if weights is not None and not weights.is_file():
        problems.append((("path", "pretrain_network_g"), f"there is no file {weights}"))
    state = options.path.resume_state
    if state is not None and not state.is_file():
        problems.append((("path", "resume_state"), f"there is no file {state}"))
    if not training:
        if not options.phase("val", "test"):
            problems.append((("datasets",), "there is no set to test on; add a section test or val"))
        return problems
    if options.train is None:
        return [*problems, (("train",), "is missing; training needs it")]
    if not options.phase("train"):
        problems.append((("datasets", "train"), "is missing; training needs it"))
    for key, dataset in options.phase("train").items():
        found = stages.problems(dataset, options.scale)
        problems += [(("datasets", key, name), text) for name, text in found] or _mixup(options.train, dataset)
    if not options.train.loss_specs():
        problems.append((("train", "pixel_opt"), "is missing: give at least one loss"))
    return problems + (_schedule(options.train) if schedule else [])


def _mixup(train: schema.TrainOptions, dataset: schema.DatasetOptions) -> list[check.Problem]:
    if train.mixing_augs is None or not train.mixing_augs.mixup or dataset.loaded_batch > 1:
        return []
    text = "there is nothing to mix in batches of 1; raise datasets.train.batch_size_per_gpu, or set this to false"
    return [(("train", "mixing_augs", "mixup"), text)]


def _schedule(train: schema.TrainOptions) -> list[check.Problem]:
    if train.scheduler is None:
        return []
    try:
        schedule = SCHEDULERS.build(train.scheduler.spec())
    except (ValueError, TypeError) as error:
        return [(("train", "scheduler"), str(error))]
    length = getattr(schedule, "length", None)
    if length is not None and train.total_iter > length:
        text = f"its periods end at iteration {length}, before total_iter {train.total_iter}; make them as long"
        return [(("train", "scheduler", "periods"), text)]
    return []


def _without_echoes(problems: list[check.Problem]) -> list[check.Problem]:
    """One message per mistake: a key that is missing only because it is misspelt is named once, and no place twice."""
    suggested = {
        (*place[:-1], text.split("did you mean ")[1].split("?")[0]) for place, text in problems if "did you" in text
    }
    kept, places = [], set()
    for place, text in problems:
        echo = text.startswith("is missing") and any(place[: len(s)] == s for s in suggested)
        if not echo and place not in places:
            kept.append((place, text))
            places.add(place)
    return kept
