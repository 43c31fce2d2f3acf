"""Files: any of the plain-data types as a JSON document, and back, exactly.

In: a frozen dataclass whose module has a FORMAT_VERSION (Machine, Dataflow, Plan, Timeline, ...).
Out: `{"kind": "dataflow", "format_version": 1, "data": {...}}`. Both ways every field is checked:
what can be saved can be loaded, and what is loaded is what its type says, or a FormatError names
the place. References between names (an op that reads a buffer) are not followed. No torch.

A file called "-" is standard input to what reads, standard output to what writes.
"""

from __future__ import annotations

import json
import os
import stat
import sys
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO, Literal, TypeVar, cast
from uuid import uuid4

from pydantic import BaseModel, ConfigDict, ValidationError, create_model
from pydantic_core import ErrorDetails, PydanticSerializationError

from cotrain_compile.errors import FormatError, OptionError
from cotrain_compile.machine.files import Machine1

T = TypeVar("T")

# Types that are still read as an earlier version has saved them, by kind and version: what is read
# checks itself there, and says by `upgraded()` what it is today.
_OLDER: Mapping[tuple[str, int], type[Machine1]] = {("machine", 1): Machine1}

STANDARD = "-"
# The step of a model of 70 billion parameters has some 100 MB.
LARGEST_FILE_BYTES = 1 << 32

_CONFIG = ConfigDict(
    extra="forbid", strict=True, allow_inf_nan=False, revalidate_instances="always"
)


def save(value: Any, path: str | os.PathLike[str]) -> None:
    """Write `value` to `path`; a reader sees the old file or the whole new one, never a part.

    Raises FormatError when a field of `value` is not what its type says, OSError when the file
    cannot be written.
    """
    write_whole(path, to_json(value, where=f"the value for {path}"))


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write a file; a reader, and a process that dies meanwhile, leave the old or the new one.

    Through links, and to what is no file (a pipe, a device), as `open` does. Raises OSError with
    the name `path` when it cannot be written: then the old file is as it was.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        _write(path, data)
    except OSError as error:
        error.filename, error.filename2 = os.fspath(path), None  # no name that only we know
        raise


def _write(path: str | os.PathLike[str], data: bytes) -> None:
    if str(path) == STANDARD:
        sys.stdout.flush()
        sys.stdout.buffer.write(data)
        sys.stdout.buffer.flush()
        return
    target = Path(os.path.realpath(path))
    if target.exists() and not target.is_file():
        target.write_bytes(data)
        return
    temporary = target.with_name(f".{uuid4().hex}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(data)
            file.flush()
            os.fsync(
                file.fileno()
            )  # else a computer that stops may leave the name of an empty file
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


def load(path: str | os.PathLike[str], type_: type[T]) -> T:
    """The `type_` saved at `path`.

    Raises FormatError when the file is anything else than a whole document of that type and
    version, OSError when it cannot be read.
    """
    return from_json(read_text(path, f"{_kind(type_)} file"), type_, where=str(path))


def kind_of(path: str | os.PathLike[str]) -> str:
    """The kind of document at `path`, "" where it says none; raises as `load` does."""
    document = parsed(read_text(path, "file of ours"), where=str(path))
    kind = document.get("kind") if isinstance(document, dict) else None
    return kind if isinstance(kind, str) else ""


def read_text(path: str | os.PathLike[str], what: str) -> str:
    """What is in `path`, which should be `what`.

    A pipe or a device could be read for ever, so only a regular file is, or standard input, whole.
    """
    try:
        if str(path) == STANDARD:
            return _standard_input(what)
        status = os.stat(path)
        if not stat.S_ISREG(status.st_mode):
            raise FormatError(f"{path} is a folder, pipe or device; give the {what} itself")
        if status.st_size > LARGEST_FILE_BYTES:
            raise FormatError(
                f"{path} has {status.st_size:,} bytes, so it is no {what}; give another"
            )
        return Path(path).read_bytes().decode()
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{path}: not UTF-8 text at byte {error.start}, so it is no {what} or it is corrupted; "
            "restore or make it again"
        ) from None
    except ValueError as error:
        if isinstance(error, FormatError):
            raise
        raise FormatError(
            f"{path!r} cannot be the name of a file ({error}); give another"
        ) from None


def _standard_input(what: str) -> str:
    data = _whole(sys.stdin.buffer)
    if len(data) > LARGEST_FILE_BYTES:
        raise FormatError(f"standard input has more than {LARGEST_FILE_BYTES:,} bytes: no {what}")
    return data.decode()


@lru_cache(maxsize=1)
def _whole(stream: BinaryIO) -> bytes:
    """All that `stream` has, for whoever asks again: for its kind first, then for what is in it."""
    return stream.read(LARGEST_FILE_BYTES + 1)


def to_json(value: Any, where: str = "the value") -> str:
    """`value` as the text of a document, ending in a newline; FormatError as for `save`."""
    kind = _kind(type(value))
    version = _version(type(value))
    try:
        model = _document(type(value), kind, version)
        document = model(kind=kind, format_version=version, data=value)
        return document.model_dump_json() + "\n"
    except ValidationError as error:
        place, problem = _first(error.errors(include_url=False, include_context=False))
        raise FormatError(f"{where} cannot be saved: {place}: {problem}; mend it first") from None
    except PydanticSerializationError as error:
        raise FormatError(f"{where} cannot be saved as JSON: {error}; mend it first") from None


def parsed(text: str, where: str = "the text") -> Any:
    """What the JSON `text` says; FormatError where it is not whole, or contradicts itself.

    It does where an object has one key twice: some readers take the first, some the last.
    """
    try:
        return json.loads(text, object_pairs_hook=_each_key_once)
    except _KeyTwice as error:
        raise FormatError(
            f"{where}: an object has the key {str(error)[:60]!r} twice; make the file again"
        ) from None
    except (ValueError, RecursionError) as error:
        raise FormatError(
            f"{where}: not a whole JSON document ({error}); it is another kind of file, truncated "
            "or corrupted: give another, or make it again"
        ) from None


class _KeyTwice(Exception):
    """The key that one object has twice."""


def _each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise _KeyTwice(next(key for key in keys if keys.count(key) > 1))
    return found


def from_json(text: str, type_: type[T], where: str = "the text") -> T:
    """The `type_` in the document `text`; `where` names the source in a FormatError."""
    parsed(text, where)
    kind = _kind(type_)
    try:
        document: Any = _document(type_, kind, _version(type_)).model_validate_json(text)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        if (version := _older_version(details, kind)) is None:
            raise FormatError(_complaint(details, type_, where)) from None
        return cast(T, _read_older(text, kind, version, where))
    value: T = document.data
    if verify := getattr(value, "verify_read", None):
        try:
            verify()
        except ValueError as error:
            raise FormatError(f"{where}: data: {error}; make the file again") from None
    return value


def _older_version(details: Sequence[ErrorDetails], kind: str) -> int | None:
    """The version of a document that is not today's, where that is still read."""
    by_place = {error["loc"]: error for error in details}
    found = by_place.get(("format_version",))
    version = None if found is None or ("kind",) in by_place else found["input"]
    return version if isinstance(version, int) and (kind, version) in _OLDER else None


def _read_older(text: str, kind: str, version: int, where: str) -> object:
    older = _OLDER[kind, version]
    try:
        document: Any = _document(older, kind, version).model_validate_json(text)
    except ValidationError as error:
        details = error.errors(include_url=False, include_context=False)
        raise FormatError(_complaint(details, older, where)) from None
    return document.data.upgraded()


def _document(type_: type, kind: str, version: int) -> type[BaseModel]:
    """The model of a whole document; its strictness holds for the dataclasses inside as well."""
    fields: dict[str, Any] = {
        "kind": (Literal[kind], ...),
        "format_version": (Literal[version], ...),
        "data": (type_, ...),
    }
    return create_model("Document", __config__=_CONFIG, **fields)


def _kind(type_: type) -> str:
    return type_.__name__.lower()


def _version(type_: type) -> int:
    version: int = sys.modules[type_.__module__].FORMAT_VERSION
    return version


def _usual_name(kind: str) -> str:
    """What a user calls a file of that kind."""
    article = "an" if kind[0] in "aeiou" else "a"
    return {"dataflow": "a step.json", "plan": "a plan.json"}.get(kind, f"{article} {kind} file")


def _complaint(details: Sequence[ErrorDetails], type_: type, where: str) -> str:
    """What is wrong with a document and how to go on, in one line."""
    by_place = {error["loc"]: error for error in details}
    if () in by_place:
        return (
            f"{where}: not a whole JSON document ({by_place[()]['msg']}); it is another "
            "kind of file, truncated or corrupted: give another, or make it again"
        )
    if ("kind",) in by_place:
        found = _shown(by_place[("kind",)])
        return f"{where}: kind is {found}, not '{_kind(type_)}'; give {_usual_name(_kind(type_))}"
    if ("format_version",) in by_place:
        found = _shown(by_place[("format_version",)])
        return (
            f"{where}: format_version is {found}, this program reads {_version(type_)}; make the "
            "file again with this version of the program"
        )
    place, problem = _first(details)
    return f"{where}: {place}: {problem}; correct the field or make the file again"


def _shown(error: ErrorDetails) -> str:
    return "missing" if error["type"] == "missing" else repr(error["input"])[:60]


def _first(details: Sequence[ErrorDetails]) -> tuple[str, str]:
    """Field path and problem of the first error that belongs to the kind of task it is in.

    pydantic reports a bad Transfer | HostRegion once as each; the reading whose `kind` does not
    fit is left out.
    """
    foreign = {
        error["loc"][:-1]
        for error in details
        if error["loc"][-1:] == ("kind",) and error["type"] == "literal_error"
    }
    fitting = [
        error
        for error in details
        if not any(error["loc"][: len(prefix)] == prefix for prefix in foreign)
    ]
    error = (fitting or details)[0]
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "unexpected_keyword_argument":
        message = "unknown field"
    elif error["type"] == "missing":
        message = "missing field"
    elif not isinstance(error["input"], dict | list | tuple):
        message = f"{message}, found {_shown(error)}"
    return _field_path(error["loc"]), message


def _field_path(location: Sequence[int | str]) -> str:
    """`("data", "ops", 3, "reads")` as `ops[3].reads`."""
    path = ""
    for part in location[1:] if location[:1] == ("data",) else location:
        if isinstance(part, str) and part.isidentifier():
            path += f".{part}"
        else:
            path += f"[{part!r}]"
    return path.lstrip(".") or "data"


def refuse_unwritable(path: str | os.PathLike[str], option: str = "--output") -> None:
    """Raise `OptionError` where `save` could not write `path`, before there is anything to save.

    It makes the file beside it that a save would begin with, and takes it away.
    """
    if str(path) == STANDARD:
        return
    target = Path(os.path.realpath(path))
    try:
        if target.is_dir():
            raise IsADirectoryError(0, "it is a folder")
        if target.exists() and not target.is_file():  # to open a pipe would wait for its reader
            if not os.access(target, os.W_OK):
                raise PermissionError(0, "you may not write to it")
            return
        beside = target.with_name(f".{uuid4().hex}.tmp")
        beside.touch(exist_ok=False)
        beside.unlink()
    except (OSError, ValueError) as error:
        told = getattr(error, "strerror", None) or error
        raise OptionError(
            f"{option} {path} cannot be written ({told}); give a file in a folder that is there "
            "and that you may write to"
        ) from None


def refuse_unwritable_folder(folder: Path) -> None:
    """Make `folder` where it is not there; `OptionError` where nothing could be saved in it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (OSError, ValueError) as error:
        told = getattr(error, "strerror", None) or error
        raise OptionError(f"--output {folder} cannot be made ({told}); give another") from None
    refuse_unwritable(folder / f"{uuid4().hex}.json", "--output")
