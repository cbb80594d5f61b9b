"""Functions and classes that a user names as `path/to/file.py:name`: checked by parsing the file, and imported.

A reward's file is imported in the workers that call it and nowhere else: it may load models, open connections or take long.
Before a run starts its text alone is looked at.
"""

from __future__ import annotations

import ast
import difflib
import importlib.util
import inspect
import os
import resource
import symtable
import sys
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import cloudpickle

LONGEST_TEXT = 500
"""Characters of an error's own text that are passed on: a user's code may put anything there."""
VERL_ARGUMENTS = frozenset(("data_source", "solution_str", "ground_truth"))
"""Parameters by which a reward with verl's signature is known."""
GIVEN_ARGUMENTS = frozenset(
    ("prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric", "environments")
)
"""Arguments of a reward with TRL's signature that do not come from the data."""
WITHHELD = "TBA_WITHHELD"
"""Environment variable of a reward's process with the names of those that it did not get."""
PASS_ON = "search.reward_environment=[NAME]"


def check_reward_function(specification: str | Callable[..., Any]) -> list[str]:
    """Refuse a reward that cannot be used, without importing its file; returns the columns of the data that it needs. Names
    that the file defines, imports or assigns at its top level are accepted; whether an imported or assigned one is a
    function, and what it needs, shows when a worker imports it."""
    if not isinstance(specification, str):
        _check_picklable(specification, "reward")
        try:
            parameters = inspect.signature(specification).parameters.values()
        except (TypeError, ValueError):  # of a function in C
            return []
        variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
        has_default = {own.name: own.default is not own.empty for own in parameters if own.kind not in variable}
        return _columns(has_default, f"reward {getattr(specification, '__name__', type(specification).__name__)!r}")
    what = f"reward {specification!r}"
    file, name = _split(specification, what=what, kind="function")
    tree = _defined(file, name, what=what, kind="function")
    found = [statement for statement in tree.body if getattr(statement, "name", None) == name]
    stored = (own.id for own in ast.walk(tree) if isinstance(own, ast.Name) and isinstance(own.ctx, ast.Store))
    if len(found) != 1 or name in stored:  # bound by more than its definition, it may have other parameters
        return []
    [function] = found
    if isinstance(function, ast.ClassDef):  # it can be called, and returns an object instead of rewards
        raise ValueError(f"{what}: {name} is a class: name a function, or an object of it, such as score = {name}().")
    if not isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)) or function.decorator_list:
        return []  # a decorator may give it other parameters
    # ast aligns defaults with the last positional parameters; kw_defaults has None for none.
    own = function.args
    positional, named = [*own.posonlyargs, *own.args], zip(own.kwonlyargs, own.kw_defaults)
    first_default = len(positional) - len(own.defaults)
    has_default = {parameter.arg: index >= first_default for index, parameter in enumerate(positional)}
    return _columns(has_default | {parameter.arg: default is not None for parameter, default in named}, what)


def check_code(place: str | Callable[..., Any]) -> None:
    """Refuse an environment, tool or agent that cannot be used, without importing its file."""
    if isinstance(place, str):
        what = f"environment, tool or agent {place!r}"
        file, name = _split(place, what=what, kind="name")
        _defined(file, name, what=what, kind="class or function")
    else:
        _check_picklable(place, "environment, tool or agent")


def _defined(file: Path, name: str, *, what: str, kind: str) -> ast.Module:
    """The file's syntax tree; refuses one whose top level does not bind the name."""
    try:
        tree = ast.parse(file.read_bytes(), filename=str(file))
    except SyntaxError as error:
        where = file if error.lineno is None else f"{file}:{error.lineno}"
        raise ValueError(f"{what}: {where} is not valid Python: {error.msg}. Python files are text in UTF-8.") from None
    except (ValueError, OSError, RecursionError) as error:
        raise ValueError(f"{what}: {file} cannot be read: {describe(error)}.") from None
    _refuse_missing_imports(tree, file, what)
    # symtable knows what the top level binds by loops, with, walrus and imports, without running it.
    source = importlib.util.decode_source(file.read_bytes())
    symbols = symtable.symtable(source, str(file), "exec").get_symbols()
    bound = {own.get_name(): own.is_namespace() for own in symbols if own.is_assigned() or own.is_imported()}
    imports_all = any(isinstance(own, ast.ImportFrom) and own.names[0].name == "*" for own in ast.walk(tree))
    # A module's __getattr__ or a star import may provide any name, so absence proves nothing.
    if name not in bound and "__getattr__" not in bound and not imports_all:
        raise ValueError(_no_such(what, file, kind, name, [key for key, is_own in bound.items() if is_own]))
    return tree


def _columns(has_default: Mapping[str, bool], what: str) -> list[str]:
    """Columns of the data without which a reward cannot be called: its parameters without a default, but for those that it
    is always given."""
    given = VERL_ARGUMENTS - {"ground_truth"} if set(has_default) >= VERL_ARGUMENTS else GIVEN_ARGUMENTS
    if not has_default.get("prompt", True):  # no column of the data reaches a reward by this name
        raise ValueError(
            f"{what} has the parameter `prompt`, which no reward gets: write `prompts`, a list with one for each completion."
        )
    return [name for name, has in has_default.items() if not has and name not in given]


def load_reward_function(specification: str | Callable[..., Any]) -> Callable[..., Any]:
    """The function that `path/to/file.py:name` names; a function given as a Python object is returned as it is."""
    if not isinstance(specification, str):
        return specification
    return load_named(specification, what=f"reward {specification!r}", kind="function", fits=callable)


def load_named(specification: str, *, what: str, kind: str, fits: Callable[[Any], bool]) -> Any:
    """The function or class that `path/to/file.py:name` names. `what` begins the error messages, `kind` says what is looked
    for, `fits` whether an object is one."""
    file, name = _split(specification, what=what, kind=kind)
    module = load_module(file.resolve(), what)
    if not fits(getattr(module, name, None)):
        # Those that the file imports from elsewhere are not meant.
        own = [key for key, value in vars(module).items() if getattr(value, "__module__", "") == module.__name__]
        raise ValueError(_no_such(what, file, kind, name, [key for key in own if fits(getattr(module, key))]))
    return getattr(module, name)


def describe(error: BaseException, *, limit: int = LONGEST_TEXT) -> str:
    """`KeyError: 'answer'`: kind and text of an error, of which the beginning is kept."""
    try:
        text = str(error)
    except Exception:  # a user's class: its text may fail too
        text = "(its text cannot be made)"
    hint = ""
    if isinstance(error, MemoryError):
        used = resource.getrlimit(resource.RLIMIT_DATA)[0] / 2**30
        hint = f" (a reward worker may use {used:.3g} GB, half of the memory there is: have the reward keep less)"
    for name in filter(None, os.environ.get(WITHHELD, "").split(",")):
        if name in text:
            hint = f" (rewards do not get {name}: {PASS_ON.replace('NAME', name)} passes it on)"
    return (f"{type(error).__name__}: {shortened(text, limit)}" if text else type(error).__name__) + hint


def shortened(text: str, limit: int = LONGEST_TEXT) -> str:
    """The beginning of a text in one line, with the number of characters left out."""
    # Half a character ("\\ud83d") has no UTF-8: no log or terminal would take it.
    message = " ".join(text[:limit].split()).encode(errors="backslashreplace").decode()
    return message if len(text) <= limit else f"{message}... ({len(text) - limit} more characters)"


def line_in(file: str, error: BaseException) -> int | None:
    """Line of a file at which an error came about, the innermost; None = the file has no part in it."""
    if isinstance(error, SyntaxError) and error.filename == file:
        return error.lineno
    # The innermost frame of the user's file, not of the library that it called.
    own = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
    return own[-1] if own else None


def _split(specification: str, *, what: str, kind: str) -> tuple[Path, str]:
    """File and name of a specification; a ValueError where it is none or the file does not exist."""
    path, colon, name = specification.rpartition(":")
    if path == "<python>":
        raise ValueError(
            f"reward {name!r} was a Python function given to TBATrainer, which the config cannot hold: name it again with "
            "task.rewards=[{function: file.py:name}]."
        )
    file = Path(path).expanduser()
    if not colon or not name or not path:
        raise ValueError(f"{what}: write file.py:{kind}.")
    if not file.is_file():
        found = "is a folder" if file.is_dir() else "does not exist"
        raise ValueError(f"{what}: file {path} {found}. Give a Python file, relative to {Path.cwd()} or in full.")
    if file.suffix != ".py":
        raise ValueError(f"{what}: {path} cannot be imported: it must be a .py file.")
    return file, name


def _no_such(what: str, file: Path, kind: str, name: str, known: list[str]) -> str:
    close = difflib.get_close_matches(name, known, n=3, cutoff=0.4) or known
    return f"{what}: {file} has no {kind} {name!r}; it has {', '.join(close) or 'none'}."


def _check_picklable(function: Callable[..., Any], what: str) -> None:
    """Refuse a function that cannot be sent to a worker: an error at its first use would come from deep inside the run."""
    name = getattr(function, "__name__", type(function).__name__)
    try:
        # By cloudpickle, as WorkerProcess sends them: it takes lambdas and functions of __main__ by value.
        cloudpickle.dumps(function)
    except Exception as error:  # whatever the function holds may fail to be pickled, each in its own way
        raise ValueError(
            f"{what} {name!r} cannot be sent to a worker process ({describe(error)}): make connections, locks, files and "
            "models inside the function, at its first call, or put it in a file and name it file.py:function."
        ) from None


def _refuse_missing_imports(tree: ast.Module, file: Path, what: str) -> None:
    """Refuse modules that are not installed, among the imports that a file begins with. What comes after anything that is
    called may be found by it (sys.path), and so may what a neighbour of the file imports."""
    for statement in tree.body:
        if isinstance(statement, ast.Import):
            names = [alias.name.partition(".")[0] for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom) and statement.module and not statement.level:
            names = [statement.module.partition(".")[0]]
        elif any(isinstance(node, (ast.Call, ast.Try, ast.If)) for node in ast.walk(statement)) and not isinstance(
            statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
        ):
            return
        else:
            continue
        for name in names:
            # A neighbour runs at its import and may change sys.path, so nothing after it is known.
            if (file.parent / f"{name}.py").is_file() or (file.parent / name).is_dir():
                return
            if name not in sys.modules and importlib.util.find_spec(name) is None:
                raise ValueError(
                    f"{what}: {file}:{statement.lineno} imports {name!r}, which is not installed here ({sys.executable}): "
                    f"install it, or put {name}.py beside the file."
                )


def load_module(file: Path, what: str) -> Any:
    """Import a file under a name of its own; its folder is on the path, so that it may import its neighbours."""
    if str(file.parent) not in sys.path:
        # Appended, not put first: a neighbour called json.py must not hide the standard library's.
        sys.path.append(str(file.parent))
    spec = importlib.util.spec_from_file_location(f"tba_file_{file.stem}", file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    # Before exec: dataclasses and pickle look a class's module up there while the file still runs.
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException as error:  # a user's file: anything may come, with file and line
        line = line_in(str(file), error)
        place = f"{file}:{line}" if line is not None else str(file)
        hint = (
            ': put what runs it as a script under `if __name__ == "__main__":`' if isinstance(error, SystemExit) else ""
        )
        raise ValueError(f"{what}: importing {place} failed: {describe(error)}{hint}.") from error
    return module
