"""Targets: the job that the TARGET of a command line refers to.

    digits                      the embedded default, also for None
    vit_t_16 ... vit_h_14       a plain ViT on synthetic images, or on --data DIR_OR_SHARDS
    timm:NAME  torchvision:NAME a model of that library, on the same images
    transformers:CONFIG         a model of that library from a local configuration, on synthetic batches
    path/to/file.py             the `job` of a file
    path/to/file.py:name        another Job of the file
    package.module:name         a Job of an importable module

A target's `source` is the same target in a form that another process, in another folder, can load: runs in child
processes send it instead of the job, because lambdas cannot be pickled.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from halfstep.errors import HalfstepError, SettingError, nearest
from halfstep.hardware.torch_build import require_torch
from halfstep.jobs.failures import error_text, user_line
from halfstep.jobs.files import first_on_path, load_file
from halfstep.jobs.job import FIELDS, Job
from halfstep.jobs.transformers_config import PREFIX, read_config

if TYPE_CHECKING:
    from halfstep.jobs.recipes import Recipe

__all__ = ["BUILT_IN", "Target", "load_target"]

DEFAULT = "digits"
BUILT_IN = (DEFAULT, "vit_t_16", "vit_s_16", "vit_b_16", "vit_l_16", "vit_h_14")
LIBRARIES = ("timm", "torchvision")
_FORMS = (
    f"A target is {', '.join(BUILT_IN)}, timm:NAME, torchvision:NAME, transformers:DIR_OR_CONFIG, path/to/file.py, file.py:name or "
    "package.module:name."
)


@dataclass(frozen=True)
class Target:
    """A job, its display name, and the text that loads it in any process."""

    name: str
    job: Job
    source: str
    data_dir: str | None = None
    defaults: tuple[tuple[str, int], ...] = ()  # recommended run settings for this target, as (field, value)
    recipe: str | None = None  # the text of its recipe


def load_target(
    text: str | None = None, *, data_dir: str | os.PathLike[str] | None = None, recipe: Recipe | None = None
) -> Target:
    """Load the job that a command-line target refers to; None is the embedded `digits`.

    `data_dir` is an ImageNet-style folder, or WebDataset shards, for the image models; other targets have their own data.
    `recipe` is one that `read_recipe` returned for the same target.
    """
    text = DEFAULT if text is None else text.strip()
    if recipe is not None and recipe.target != text:
        raise SettingError(
            f"The recipe {recipe.name} was read for {recipe.target}, not for {text}; read it for this target."
        )
    if not text:
        raise SettingError(f"The target is empty. {_FORMS}")
    head, _, tail = text.rpartition(":")
    if text in BUILT_IN or head in LIBRARIES:
        return _built_in(text, data_dir, recipe)
    if data_dir is not None:
        raise SettingError(f"A data folder has no effect on the target {text!r}, whose job has its own data; omit it.")
    if text.startswith(PREFIX):
        return _from_config(text)
    if text.endswith(".py"):
        return _from_file(Path(text), "job")
    if head.endswith(".py") and tail.isidentifier():
        return _from_file(Path(head), tail)
    if tail.isidentifier() and head and all(part.isidentifier() for part in head.split(".")):
        return _from_module(head, tail)
    raise _unusable(text)


def _built_in(text: str, data_dir: str | os.PathLike[str] | None, recipe: Recipe | None) -> Target:
    """A job that ships with Halfstep; only these need torch to be loaded."""
    require_torch(f"The target {text!r}")
    jobs = importlib.import_module("halfstep.jobs.builtin")
    if text == DEFAULT:
        if data_dir is not None:
            raise SettingError(
                "A data folder has no effect on the target 'digits', whose images are embedded; omit it."
            )
        return Target(
            text, jobs.digits_job(), text, defaults=(("batch", jobs.DIGITS_BATCH), ("epochs", jobs.DIGITS_EPOCHS))
        )
    # A pattern of shards may have several parts.
    parts = [] if data_dir is None else os.fspath(data_dir).split("::")
    paths = (part if ":" in part.partition("/")[0] else str(Path(part).expanduser().resolve()) for part in parts)
    root = "::".join(paths) or None
    library, _, name = text.rpartition(":")
    job = jobs.library_job(library, name, root) if library else jobs.vit_job(name, root, recipe)
    return Target(text, job, text, root, (("batch", jobs.IMAGE_BATCH),), None if recipe is None else str(recipe))


def _from_config(text: str) -> Target:
    """A model of transformers with random weights."""
    require_torch(f"The target {text!r}")
    jobs = importlib.import_module("halfstep.jobs.transformers_target")
    reading = read_config(jobs.import_transformers(text), text)
    job = jobs.job_from_config(reading.config, head=reading.head, length=reading.length, name=text)
    return Target(text, job, reading.source, defaults=_defaults(job))


def _from_file(path: Path, name: str) -> Target:
    path = path.expanduser()
    if path.is_dir():
        raise SettingError(f"{path} is a folder, not a job file; name a file in it. {_FORMS}")
    if not path.is_file():
        raise SettingError(f"The job file {path} does not exist{_similar(path)} {_FORMS}")
    absolute = path.resolve()  # before the file is run, which may change the working directory
    try:
        module = load_file(path)
    except (Exception, SystemExit) as error:  # the user's file may raise anything
        raise _failed(f"The job file {path}", error) from error
    job = _pick(vars(module), name, str(path))
    shown = path.name if name == "job" else f"{path.name}:{name}"
    return Target(shown, job, f"{absolute}:{name}", defaults=_defaults(job))


def _from_module(module_name: str, name: str) -> Target:
    try:
        with first_on_path(str(Path.cwd())):  # as under `python -m`
            module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise SettingError(
                f"There is no module {error.name!r} in the current folder or the installed packages, "
                f"so {module_name}:{name} cannot be loaded. {_FORMS}"
            ) from error
        raise _failed(f"The module {module_name}", error) from error
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise _failed(f"The module {module_name}", error) from error
    job = _pick(vars(module), name, module_name)
    return Target(f"{module_name}:{name}", job, f"{module_name}:{name}", defaults=_defaults(job))


def _defaults(job: Job) -> tuple[tuple[str, int], ...]:
    """The run settings that a job's own signatures imply."""
    size = job.default_batch_size()
    return () if size is None else (("batch", size),)


def _pick(names: dict[str, Any], name: str, where: str) -> Job:
    """The Job called `name` in a module's namespace."""
    jobs = [key for key, value in names.items() if isinstance(value, Job)]
    available = f"It has these jobs: {', '.join(f'{where}:{job}' for job in jobs)}" if jobs else "It has no Job"
    if name not in names:
        raise SettingError(
            f"{where} has no {name!r}. {available}; write {name} = halfstep.Job(...) or name another one."
        )
    if not isinstance(names[name], Job):
        value, remedy = names[name], f"{name} = halfstep.Job(...)"
        if isinstance(value, dict) and value.keys() & FIELDS:
            remedy = f"{name} = halfstep.Job(**{name}) after it"
        raise SettingError(
            f"{name!r} in {where} is of type {type(value).__name__}, not a halfstep.Job. {available}; write {remedy}."
        )
    job: Job = names[name]
    return job


def _failed(label: str, error: BaseException) -> HalfstepError:
    """An error for user code that raised while it was loaded: type, message and line, without a traceback."""
    if isinstance(error, SyntaxError) and error.filename:
        return SettingError(f"{label} is not valid Python at {error.filename}:{error.lineno}: {error.msg}.")
    if isinstance(error, SyntaxError):  # null bytes have no line
        return SettingError(f"{label} is not valid Python: {error.msg or error}.")
    if isinstance(error, SystemExit):
        return SettingError(
            f"{label} exited while it was loaded{user_line(error)} (exit {error.code!r}); "
            'put code that should run only as a program under `if __name__ == "__main__":`.'
        )
    message = str(error) if isinstance(error, HalfstepError) else error_text(error)
    return SettingError(f"{label} failed while it was loaded{user_line(error)}: {message}")


def _unusable(text: str) -> SettingError:
    """An error for a target that has none of the known forms."""
    path = Path(text).expanduser()
    if path.is_dir():
        files = sorted(p.name for p in path.glob("*.py"))
        contents = f" (it has {', '.join(files[:8])})" if files else ""
        return SettingError(
            f"{text} is a folder{contents}; name a job file in it, such as {path / (files or ['job.py'])[0]}."
        )
    if path.is_file():
        return SettingError(f"{text} is not a Python file; pass a job file, whose name ends in .py.")
    if os.sep in text:
        return SettingError(f"The job file {text} does not exist{_similar(path)} {_FORMS}")
    if "." in text and ":" not in text:
        return SettingError(f"The target {text!r} names a module but not the Job in it; write {text}:job. {_FORMS}")
    file = path.with_name(f"{path.name}.py")
    close = str(file) if file.is_file() else nearest(text, BUILT_IN)
    hint = f" Did you mean {close!r}?" if close else ""
    return SettingError(f"Unknown target {text!r}.{hint} {_FORMS}")


def _similar(path: Path) -> str:
    """A hint with the most similar file name in the same folder."""
    if not path.parent.is_dir():
        return f", nor does its folder {path.parent}."
    close = nearest(path.name, [p.name for p in path.parent.glob("*.py")])
    return f"; did you mean {path.parent / close}?" if close else "."
