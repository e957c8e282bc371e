"""The scripts of a fresh machine, run in a copy of the project with a Python that only pretends."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SCRIPTS = ("setup", "serve", "check", "test", "check_kernels", "with_compilers")
TOOLS = ("bash", "env", "mkdir", "rm", "touch", "cp", "chmod", "cat", "sleep", "nice")

# Calls itself suitable, runs every other `-c` with a real Python, and of the rest only writes down
# what was asked. fail-X makes module X fail.
FAKE_PYTHON = f"""#!/usr/bin/env bash
case "$*" in
  *sys.executable*) echo "ok $0" && exit ;;
  *" -c "*) exec {sys.executable} "$@" ;;
esac
[[ $1 == -I ]] && shift
echo "$*" >>log
if [[ -e fail-$2 ]]; then exit 1; fi
if [[ $2 == venv ]]; then
  mkdir -p .venv/bin
  cp "$0" .venv/bin/python
  printf '#!/usr/bin/env bash\\necho "$$ $*"\\nexit 5\\n' >.venv/bin/jaxserve
  chmod +x .venv/bin/jaxserve
fi
if [[ $2 == pip && -e slow ]]; then sleep 0.5; fi
if [[ $1 == show ]]; then printf '%s\\n' "$$" "$PYTHONPATH" "$PATH" "$JAX_PLATFORMS"; fi
if [[ $* == *" --target "* ]]; then mkdir .cache/kernel-compilers; fi
exit 0
"""
VENV = "-m venv .venv"
PIP = "-m pip install --quiet --no-input"
PROJECT = f"{PIP} --no-deps --editable ."
DEMO = "-m jaxserve.checkpoint.demo"
RUNTIME = [f"{PIP} -r requirements/runtime.txt", PROJECT, DEMO]
DEV = [f"{PIP} -r requirements/dev.txt", PROJECT, DEMO]
COMPILERS = f"{PIP} --no-deps --target .cache/kernel-compilers -r requirements/kernels.txt"


class Machine:
    """A folder with the scripts, a home, and a PATH that holds only what a test puts there."""

    def __init__(self, folder: Path):
        self.root = folder / "a project"
        self.home = folder / "home"
        self.path = folder / "bin"
        self.environment = {"HOME": str(self.home), "PATH": str(self.path)}
        self.home.mkdir()
        self.path.mkdir()
        (self.root / "scripts").mkdir(parents=True)
        (self.root / "requirements").mkdir()
        for name in SCRIPTS:
            shutil.copy(ROOT / "scripts" / name, self.root / "scripts" / name)
        for kind in ("runtime", "dev", "kernels"):
            (self.root / "requirements" / f"{kind}.txt").write_text("one")
        (self.root / "pyproject.toml").write_text("one")
        for tool in TOOLS:
            self.path.joinpath(tool).symlink_to(shutil.which(tool) or tool)

    def put(self, path: Path | str, text: str) -> None:
        """Writes an executable; a bare name goes on PATH."""
        path = self.path / path
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        path.chmod(0o755)

    def start(self, script: str, *argv: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [f"scripts/{script}", *argv],
            cwd=self.root,
            env=self.environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            stdin=subprocess.DEVNULL,
            text=True,
        )

    def run(self, script: str, *argv: str) -> tuple[int, str, str]:
        """(exit code, stdout, stderr)"""
        process = self.start(script, *argv)
        out, err = process.communicate(timeout=30)
        return process.returncode, out, err

    def take_log(self) -> list[str]:
        """What was asked of the pretending Python since the last call."""
        log = self.root / "log"
        lines = log.read_text().splitlines() if log.exists() else []
        log.unlink(missing_ok=True)
        return lines


@pytest.fixture
def bare(tmp_path: Path) -> Machine:
    """No Python at all."""
    return Machine(tmp_path)


@pytest.fixture
def machine(bare: Machine) -> Machine:
    """A suitable Python on PATH."""
    bare.put("python3", FAKE_PYTHON)
    return bare


@pytest.mark.parametrize("script", [*(f"scripts/{s}" for s in SCRIPTS), ".ci/run"])
def test_syntax_and_mode(script):
    assert subprocess.run(["bash", "-n", ROOT / script], check=False).returncode == 0
    assert os.access(ROOT / script, os.X_OK)


# --- which Python --------------------------------------------------------------------------------


@pytest.mark.parametrize("script", SCRIPTS)
def test_two_lines_without_a_suitable_python(bare, script):
    bare.put("python3", "#!/usr/bin/env bash\necho 'Python 3.11'\n")
    code, out, err = bare.run(script)
    problem, fix = err.splitlines()
    assert (code, out) == (2, "")
    assert problem == (
        "error: jaxserve needs Python 3.12, 3.13 or 3.14; "
        f"found Python 3.11 ({bare.path / 'python3'})."
    )
    assert fix.startswith("fix: ") and "pyenv install" in fix and "uv python install" in fix
    assert not (bare.root / ".venv").exists()


def test_two_lines_without_any_python(bare):
    code, _, err = bare.run("setup", "python")
    assert code == 2 and len(err.splitlines()) == 2 and "found no Python" in err


@pytest.mark.parametrize(
    "where",
    ["PATH/python3.13", "PATH/python3.12", "PYENV_ROOT", "HOME", "SHIMS", "PYENV_BIN", "UV"],
)
def test_a_python_is_found(bare, where):
    """PATH holds an old python3 and a python3.12 that is a pyenv shim for a version not chosen."""
    bare.put("python3", "#!/usr/bin/env bash\necho 'Python 3.11'\n")
    bare.put("python3.12", "#!/usr/bin/env bash\necho 'pyenv: not found' >&2; exit 127\n")
    good = '#!/usr/bin/env bash\necho "ok $0"\n'
    versions = bare.home.parent / "pyenv"
    python = versions / "versions" / "3.13.0" / "bin" / "python3"
    match where.split("/"):
        case ["PATH", name]:
            python = bare.path / name
        case ["PYENV_ROOT"]:
            bare.environment["PYENV_ROOT"] = str(versions)
        case ["HOME"]:
            python = bare.home / ".pyenv" / "versions" / "3.12.1" / "bin" / "python3"
        case ["SHIMS"]:
            bare.environment["PATH"] += f":{versions}/shims"
        case ["PYENV_BIN"]:
            bare.put(versions / "bin" / "pyenv", "#!/usr/bin/env bash\n")
            bare.environment["PATH"] += f":{versions}/bin"
        case ["UV"]:
            python = bare.home / "uv" / "python3"
            bare.put("uv", f"#!/usr/bin/env bash\n[[ $2 == find ]] && echo '{python}'\n")
    bare.put(python, good)
    assert bare.run("setup", "python") == (0, f"{python}\n", "")


def test_uv_installs_a_python_when_there_is_none(bare):
    python = bare.home / "python3"
    bare.put(python, FAKE_PYTHON)
    bare.put(
        "uv",
        "#!/usr/bin/env bash\n"
        f'[[ $2 == install ]] && touch "{bare.home}/done" && exit\n'
        f'[[ $2 == find && -e "{bare.home}/done" ]] && echo "{python}"\n',
    )
    assert bare.run("setup", "python") == (0, f"{python}\n", "")
    bare.put("uv", "#!/usr/bin/env bash\nexit 1\n")
    assert bare.run("setup", "python")[0] == 2


@pytest.mark.parametrize(
    ("version", "text", "implementation", "answer"),
    [
        ((3, 11, 9), "3.11.9", "cpython", "Python 3.11"),
        ((3, 12, 0), "3.12.0", "cpython", f"ok {sys.executable}"),
        ((3, 14, 2), "3.14.2", "cpython", f"ok {sys.executable}"),
        ((3, 15, 0), "3.15.0", "cpython", "Python 3.15"),
        ((3, 13, 0), "3.13.0 experimental free-threading build", "cpython", "Python 3.13 of anoth"),
        ((3, 12, 0), "3.12.0", "pypy", "Python 3.12 of another kind"),
        ((2, 7, 18), "2.7.18", "cpython", "Python 2.7"),
    ],
)
def test_what_is_asked_of_a_python(capsys, monkeypatch, version, text, implementation, answer):
    script = (ROOT / "scripts" / "setup").read_text()
    probe = script.partition("probe='")[2].partition("'\n")[0]
    monkeypatch.setattr(sys, "version_info", version)
    monkeypatch.setattr(sys, "version", text)
    monkeypatch.setattr(sys.implementation, "name", implementation)
    exec(probe, {})
    assert capsys.readouterr().out.startswith(answer)


# --- what is installed, and when -----------------------------------------------------------------


def test_once_and_then_nothing(machine):
    assert machine.run("setup")[0] == 0
    assert machine.take_log() == [VENV, *RUNTIME]
    assert machine.run("setup") == (0, "", "")
    assert machine.take_log() == []


def test_dev_holds_all_of_runtime(machine):
    machine.run("setup", "runtime")
    machine.take_log()
    machine.run("setup", "dev")
    assert machine.take_log() == DEV
    assert machine.run("setup", "runtime") == (0, "", "")
    assert machine.run("setup", "dev") == (0, "", "")
    assert machine.take_log() == []


@pytest.mark.parametrize("name", ["requirements/runtime.txt", "pyproject.toml"])
def test_a_changed_lock_is_installed(machine, name):
    machine.run("setup")
    machine.take_log()
    (machine.root / name).write_text("two")
    assert machine.run("setup")[0] == 0
    assert machine.take_log() == RUNTIME
    assert machine.run("setup") == (0, "", "")


def test_a_moved_project_is_installed_again(machine, tmp_path):
    machine.run("setup")
    machine.root = machine.root.rename(tmp_path / "moved")
    machine.take_log()
    machine.run("setup")
    assert machine.take_log() == RUNTIME


def test_a_broken_venv_is_made_again(machine):
    machine.run("setup")
    machine.take_log()
    (machine.root / ".venv" / "bin" / "python").unlink()
    (machine.root / ".venv" / "rest").touch()
    code, _, err = machine.run("setup")
    assert code == 0 and all(line.startswith("jaxserve setup: ") for line in err.splitlines())
    assert machine.take_log() == [VENV, *RUNTIME]
    assert not (machine.root / ".venv" / "rest").exists()


def test_an_installation_that_failed_is_made_again(machine):
    failure = machine.root / "fail-pip"
    failure.touch()
    code, _, err = machine.run("setup")
    assert code == 1
    assert err.splitlines()[-2].startswith("error: pip") and err.splitlines()[-1].startswith("fix:")
    machine.take_log()
    failure.unlink()
    assert machine.run("setup")[0] == 0
    assert machine.take_log() == [VENV, *RUNTIME]


def test_a_lock_that_failed_and_is_taken_back_is_installed_again(machine):
    """What the failed lock brought may lie there, so the old one's stamp must not count."""
    lock = machine.root / "requirements" / "runtime.txt"
    machine.run("setup")
    lock.write_text("two")
    (machine.root / "fail-pip").touch()
    machine.run("setup")
    (machine.root / "fail-pip").unlink()
    lock.write_text("one")
    machine.take_log()
    machine.run("setup")
    assert machine.take_log() == [VENV, *RUNTIME]


def test_a_demo_model_that_did_not_come_is_asked_for_again(machine):
    failure = machine.root / "fail-jaxserve.checkpoint.demo"
    failure.touch()
    assert machine.run("setup")[0] == 1
    machine.take_log()
    failure.unlink()
    assert machine.run("setup")[0] == 0
    assert machine.take_log() == RUNTIME


def test_compilers_come_once_and_lie_beside_the_venv(machine):
    assert machine.run("setup", "kernels")[0] == 0
    assert machine.take_log() == [VENV, *RUNTIME, COMPILERS]
    assert machine.run("setup", "kernels") == (0, "", "")
    machine.run("setup", "dev")
    machine.take_log()
    assert machine.run("setup", "kernels") == (0, "", "")
    (machine.root / "requirements" / "kernels.txt").write_text("two")
    assert machine.run("setup", "dev") == (0, "", "")
    assert machine.run("setup", "kernels")[0] == 0
    assert machine.take_log() == [COMPILERS]


def test_compilers_that_did_not_come_are_asked_for_again(machine):
    machine.run("setup", "dev")
    machine.take_log()
    (machine.root / "fail-pip").touch()
    assert machine.run("setup", "kernels")[0] == 1
    (machine.root / "fail-pip").unlink()
    assert machine.run("setup", "kernels")[0] == 0
    assert machine.take_log() == [COMPILERS, COMPILERS]


def test_two_at_once_install_once(machine):
    (machine.root / "slow").touch()
    both = [machine.start("setup"), machine.start("setup")]
    errs = [process.communicate(timeout=30)[1] for process in both]
    assert [process.returncode for process in both] == [0, 0]
    assert machine.take_log() == [VENV, *RUNTIME]
    assert sum("another setup is running" in err for err in errs) == 1


def test_an_unknown_word_is_refused(machine):
    code, _, err = machine.run("setup", "everything")
    assert (code, machine.take_log()) == (2, [])
    assert err == (
        "error: scripts/setup knows no 'everything'.\n"
        "fix: Use scripts/setup runtime, dev, kernels or python.\n"
    )


# --- serve, check, test --------------------------------------------------------------------------


def test_serve_becomes_the_server(machine):
    """The same process, so that signals and the exit code pass through; from any folder."""
    process = machine.start("serve", "--port", "8001", "--served-model-name", "a b")
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 5
    assert out == f"{process.pid} serve smollm2-135m --port 8001 --served-model-name a b\n"
    assert machine.take_log() == [VENV, *RUNTIME]


def test_check_runs_every_step_even_after_one_fails(machine):
    machine.run("setup", "dev")
    machine.take_log()
    assert machine.run("check")[0] == 0
    steps = machine.take_log()
    assert [step.split()[:2] for step in steps] == [
        ["-m", "ruff"],
        ["-m", "ruff"],
        ["-m", "pyright"],
        ["-m", "pytest"],
        ["scripts/generate_docs", "--check"],
    ]
    (machine.root / "fail-ruff").touch()
    (machine.root / "fail---check").touch()
    code, _, err = machine.run("check")
    assert code == 1
    assert machine.take_log() == steps
    assert [line.split(": ")[1].split()[-1] for line in err.splitlines()] == [".", ".", "--check"]


def test_test_checks_and_then_tests(machine):
    machine.run("setup", "dev")
    machine.take_log()
    assert machine.run("test", "-k", "a b")[0] == 0
    log = machine.take_log()
    assert log[0] == "-m ruff format --check --quiet ." and log[-1] == "-m pytest -k a b"
    assert machine.run("test")[0] == 0
    *_, first, a, b, c = machine.take_log()
    assert first == "-m pytest --ignore=tests/compile --ignore=tests/kernels"
    assert {a, b, c} == {
        COMPILERS,
        "-m pytest -o faulthandler_timeout=7200 tests/compile --fast",
        "-m pytest tests/kernels",
    }
    (machine.root / "fail-pyright").touch()
    assert machine.run("test")[0] == 1
    assert "-m pytest" not in machine.take_log()


def test_with_compilers_becomes_a_python_that_finds_them(machine):
    machine.environment["PYTHONPATH"] = "mine"
    process = machine.start("with_compilers", "show", "a b")
    out, _ = process.communicate(timeout=30)
    assert machine.take_log() == [VENV, *RUNTIME, COMPILERS, "show a b"]
    compilers = machine.root / ".cache" / "kernel-compilers"
    assert (compilers / ".stamp").exists()
    assert out.splitlines() == [
        str(process.pid),
        f"{compilers}:mine",
        f"{compilers}/nvidia/cuda_nvcc/bin:{machine.path}",
        "cpu",
    ]
