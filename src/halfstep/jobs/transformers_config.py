"""The text after `transformers:`, read into a configuration: WHERE[,key=value...].

    path/to/folder          a folder with a config.json
    path/to/config.json     the file itself
    GPT2Config              a configuration class of transformers with its defaults
    gpt2                    a model type of transformers with its defaults

Values are JSON (`2`, `0.1`, `true`, `null`, `[1,1]`) or plain text. Keys are the settings of the configuration, and two
of the job: `head` and `length`. Nothing is downloaded, so the name of a model on the hub is not a place.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from halfstep.errors import MissingError, SettingError, nearest, unknown
from halfstep.jobs.failures import error_text

__all__ = ["PREFIX", "Reading", "outside_vocabulary", "read_config", "reserved_ids"]

PREFIX = "transformers:"
FILE = "config.json"
_FORMS = "Write transformers:FOLDER, transformers:config.json, transformers:GPT2Config or transformers:gpt2, then ,key=value for each setting."
_JOB_KEYS = ("head", "length")
# Settings that every configuration has and that a job of random weights cannot use, with what to do instead.
_REJECTED = {
    "architectures": "choose the model with head=NAME",
    "auto_map": "code that comes with a checkpoint is never run",
    "dtype": "weights are built in fp32, and --precision decides the rest",
    "model_type": "name the type before the first comma",
    "quantization_config": "a model with random weights has nothing to quantize",
    "torch_dtype": "weights are built in fp32, and --precision decides the rest",
    "trust_remote_code": "code that comes with a checkpoint is never run",
    "use_cache": "it is always false in training",
}


@dataclass(frozen=True)
class Reading:
    """A configuration, what the text sets for the job, and the same text in a form that any folder can load."""

    config: Any
    head: str | None
    length: int | None
    source: str


def read_config(library: Any, text: str) -> Reading:
    """Read a target, `transformers:` included; `library` is the imported transformers."""
    where, *items = _split(text.removeprefix(PREFIX))
    overrides = _parse(items, text)
    head, length = (overrides.pop(key, None) for key in _JOB_KEYS)
    if length is not None and not isinstance(length, int):
        raise SettingError(f"length={length!r} in {text!r} is not an integer.")
    place, config_class, settings = _locate(library, where)
    source = ",".join([f"{PREFIX}{place}", *items])
    config = _build(config_class, settings, overrides, text)
    return Reading(config, None if head is None else str(head), length, source)


def _split(text: str) -> list[str]:
    """The items between commas, except for commas inside brackets, braces and quotes."""
    items, depth, quoted = [""], 0, False
    for char in text:
        quoted ^= char == '"'
        depth += 0 if quoted else (char in "[{") - (char in "]}")
        if char == "," and depth <= 0 and not quoted:
            items.append("")
        else:
            items[-1] += char
    return [item.strip() for item in items]


def _parse(items: list[str], text: str) -> dict[str, Any]:
    overrides: dict[str, Any] = {}
    for item in items:
        key, equals, value = (part.strip() for part in item.partition("="))
        if not key:
            raise SettingError(f"The target {text!r} has an empty setting; remove the stray comma. {_FORMS}")
        if not equals or not value:
            raise SettingError(f"The target {text!r} has no value for {key!r}; write {key}=VALUE or leave it out.")
        if key in overrides:
            raise SettingError(f"The target {text!r} has {key!r} twice; remove one.")
        overrides[key] = _value(value)
    return overrides


def _value(text: str) -> Any:
    """JSON, or else the text itself; NaN and Infinity are not JSON."""

    def reject(constant: str) -> Any:
        raise ValueError(constant)

    try:
        return json.loads(text, parse_constant=reject)
    except ValueError:
        return text


def _locate(library: Any, where: str) -> tuple[str, Any, dict[str, Any]]:
    """The place in a form that any folder can load, the configuration class, and the settings of a file."""
    if not where:
        raise SettingError(f"The target {PREFIX!r} names no configuration. {_FORMS}")
    path = Path(where).expanduser()
    file = path / FILE if path.is_dir() else path
    if file.is_file():
        settings = _read_file(file)
        return str(path.resolve()), _class_of_type(library, settings["model_type"], str(file)), settings
    if where in library.CONFIG_MAPPING:
        return where, _class_of_type(library, where, where), {}
    if where.isidentifier() and where[:1].isupper():
        return where, _class_by_name(library, where), {}
    if path.is_dir():
        raise SettingError(f"The folder {path} has no {FILE}; it has {_contents(path)}. {_FORMS}")
    if re.fullmatch(r"[\w.-]+/[\w.-]+", where) and not path.parent.exists() and path.suffix != ".json":
        raise SettingError(
            f"{where!r} is not a file or folder here and looks like a model on the hub; nothing is downloaded. Download its {FILE} yourself "
            f"and pass {PREFIX}FOLDER with the folder that has it; the weights are not needed."
        )
    if "/" in where or path.suffix == ".json":
        raise SettingError(f"The configuration {path} does not exist. {_FORMS}")
    raise unknown(
        "model type",
        where,
        library.CONFIG_MAPPING.keys(),
        f"Nothing is downloaded: for a model of the hub, pass a folder with its {FILE}. {_FORMS}",
    )


def _read_file(file: Path) -> dict[str, Any]:
    try:
        settings = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingError(f"The configuration {file} cannot be read: {error.strerror}.") from error
    except ValueError as error:  # also for text that is not UTF-8
        raise SettingError(f"The configuration {file} is not valid JSON: {error}.") from error
    if not isinstance(settings, dict) or not isinstance(settings.get("model_type"), str):
        raise SettingError(
            f"The configuration {file} has no model_type, so it is not a configuration that transformers saved."
        )
    if settings.get("auto_map"):
        raise SettingError(
            f"The configuration {file} has an auto_map, so its model is code that comes with the checkpoint, which is never run; "
            "write a job file that imports the model yourself."
        )
    return settings


def _class_of_type(library: Any, model_type: str, where: str) -> Any:
    if model_type not in library.CONFIG_MAPPING:
        raise unknown(
            f"model type in {where}:", model_type, library.CONFIG_MAPPING.keys(), "A newer transformers may have it."
        )
    try:
        return library.CONFIG_MAPPING[model_type]
    except ImportError as error:  # transformers imports the file of a class when the class is used
        raise _missing(model_type, error) from error


def _class_by_name(library: Any, name: str) -> Any:
    try:
        config_class = getattr(library, name, None)
    except ImportError as error:
        raise _missing(name, error) from error
    base = library.PretrainedConfig
    if isinstance(config_class, type) and issubclass(config_class, base) and config_class.__name__ != base.__name__:
        return config_class
    names = [each for each in dir(library) if each.endswith("Config") and each not in {name, base.__name__}]
    if config_class is not None:
        close = nearest(name, names)
        hint = f" Did you mean {close!r}?" if close else ""
        raise SettingError(f"transformers.{name} is not the configuration class of a model.{hint} {_FORMS}")
    raise unknown("configuration class", name, names, _FORMS)


def _missing(name: str, error: ImportError) -> MissingError:
    return MissingError(f"The configuration of {name} cannot be imported ({error}); install what it needs.")


def _build(config_class: Any, settings: dict[str, Any], overrides: dict[str, Any], text: str) -> Any:
    """The configuration with the settings of a file, if there is one, and then those of the text."""
    name = config_class.__name__
    try:
        defaults = config_class().to_dict()
    except Exception as error:  # a configuration class may raise anything
        raise SettingError(f"{name} cannot be built with its defaults ({error_text(error)}); pass a {FILE}.") from error
    aliases = getattr(config_class, "attribute_map", {})
    _check_keys(config_class, {*defaults, *settings, *aliases}, overrides, text)
    overrides = {aliases.get(key, key): value for key, value in overrides.items()}
    outside = outside_vocabulary({**defaults, **settings, **overrides})
    for key in outside:
        if key in overrides:
            raise SettingError(
                f"{key}={overrides[key]} in {text!r} is outside the vocabulary; lower it or increase vocab_size."
            )
        overrides[key] = 0  # an id that no batch has; the class would warn about the old one
    if "num_labels" in overrides:  # the names of other classes would override it
        settings = {key: value for key, value in settings.items() if key not in {"id2label", "label2id"}}
    try:
        return config_class.from_dict({**settings, **overrides})
    except Exception as error:  # transformers raises several classes for values of the wrong type or range
        raise SettingError(f"{name} rejects the settings of {text!r}: {' '.join(str(error).split())}") from error


def _check_keys(config_class: Any, known: set[str], overrides: dict[str, Any], text: str) -> None:
    parameters = inspect.signature(config_class.__init__).parameters.values()
    named = {each.name for each in parameters if each.kind in {each.POSITIONAL_OR_KEYWORD, each.KEYWORD_ONLY}}
    known = (
        (known | named | {"num_labels", "attn_implementation"}) - _REJECTED.keys() - {"self", "transformers_version"}
    )
    for key in overrides:
        if key in _REJECTED:
            raise SettingError(f"The setting {key!r} in {text!r} is not accepted: {_REJECTED[key]}.")
        if key not in known:
            raise unknown(f"setting of {config_class.__name__}:", key, sorted(known | {*_JOB_KEYS}))


def _contents(folder: Path) -> str:
    names = sorted(each.name for each in folder.iterdir())
    return ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "") if names else "nothing"


def reserved_ids(settings: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """The settings of a configuration that reserve ids, such as pad_token_id, with their ids."""
    ids: dict[str, tuple[int, ...]] = {}
    for name, value in settings.items():
        if name.endswith("_token_id"):
            values = value if isinstance(value, list | tuple) else [value]
            ids[name] = tuple(each for each in values if isinstance(each, int))
    return ids


def outside_vocabulary(settings: Mapping[str, Any]) -> list[str]:
    """The settings with reserved ids that the vocabulary does not have; a smaller vocab_size leaves some."""
    size = settings.get("vocab_size")
    if not isinstance(size, int):
        return []
    return [name for name, ids in reserved_ids(settings).items() if any(each >= size for each in ids)]
