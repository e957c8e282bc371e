"""The tree keeps the house rules, and each rule is shown to catch code that breaks it."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests import structure
from tests.structure import Source

ROOT = Path(__file__).parent.parent
SOURCES = structure.python_files(ROOT)
SHIPPED = structure.in_packages(SOURCES)
RUNTIME = ROOT / "requirements" / "runtime.txt"
DEV = ROOT / "requirements" / "dev.txt"


def assert_none(findings: list[str]) -> None:
    assert not findings, "\n".join(["", *findings])


def check_all(check, sources: list[Source]) -> None:
    assert_none([finding for source in sources for finding in check(source)])


# --- the tree ------------------------------------------------------------------------------------


def test_the_tree_is_read():
    paths = {source.path for source in SOURCES}
    assert {"jaxserve/cli.py", "tests/structure.py", "scripts/generate_docs"} <= paths
    assert not any("tests/" in source.path for source in SHIPPED)


def test_sizes():
    check_all(structure.too_long, SOURCES)


def test_environment_variables():
    # What orchestrators tell is not for us to choose.
    ours = [source for source in SHIPPED if source.path != "jaxserve/hosts.py"]
    names = structure.environment_variables(ours)
    assert len(names) <= structure.MAX_ENVIRONMENT_VARIABLES
    assert "?" not in names


def test_inheritance():
    assert_none(structure.deep_inheritance(SHIPPED))


def test_dependencies_point_one_way():
    check_all(structure.wrong_imports, SHIPPED)


def test_no_hidden_errors_no_pickle_no_future():
    check_all(structure.banned, SOURCES)


def test_arrays_have_shapes():
    check_all(structure.untyped_arrays, SHIPPED)


def test_no_machine_and_no_registry_is_named():
    found = [
        f for path, text in structure.text_files(ROOT) for f in structure.machine_names(path, text)
    ]
    assert_none(found)


def test_imports_are_the_declared_dependencies():
    declared = set(structure.declared_distributions(ROOT))
    assert structure.imported_distributions(SHIPPED) == declared - structure.NOT_IMPORTED


def test_tests_import_what_dev_installs():
    tests = [source for source in SOURCES if source.path.startswith("tests/")]
    installed = set(structure.locked_versions(DEV)) | {"tests"}
    assert structure.imported_distributions(tests) <= installed


def test_locks_fit_each_other_and_the_project():
    runtime, dev = structure.locked_versions(RUNTIME), structure.locked_versions(DEV)
    assert runtime.items() <= dev.items()
    for lock, extras in ((runtime, ()), (dev, ("dev",))):
        for name, text in structure.declared_distributions(ROOT, *extras).items():
            assert lock[name] in Requirement(text).specifier, text
    assert "torch" not in dev


def test_ci_runs_the_test_command_and_nothing_else():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'exec "${BASH_SOURCE[0]%/*}/../scripts/test"'
    ]


def test_what_needs_no_device_imports_no_jax():
    modules = [
        source.module
        for source in SHIPPED
        if source.path.startswith("jaxserve/")
        and not source.path.startswith(("jaxserve/worker/", "jaxserve/models/"))
        and source.module != "jaxserve.__main__"
    ]
    assert len(modules) > 10
    program = (
        "import importlib, json, sys\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
        "print(json.dumps(sorted({m.partition('.')[0] for m in sys.modules})))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert not {"jax", "jaxlib", "torch", "transformers"} & set(json.loads(done.stdout))


# --- each check catches what it is for -----------------------------------------------------------


def broken(check, text: str, path: str = "jaxserve/worker/x.py") -> int:
    """How often `check` finds fault with `text`."""
    return len(check(Source(path, text)))


def function(num_lines: int, parameters: str = "x: int") -> str:
    return f"def f({parameters}):\n" + "    x = 1\n" * (num_lines - 1)


@pytest.mark.parametrize(
    ("text", "path", "expected"),
    [
        ("x = 1\n" * 600, "tests/x.py", 0),
        ("x = 1\n" * 601, "tests/x.py", 1),
        (function(80), "jaxserve/x.py", 0),
        (function(81), "jaxserve/x.py", 1),
        ("async " + function(81), "jaxserve/x.py", 1),
        (function(150, "q_ref, o_ref"), "pallas_kernels/x.py", 0),
        (function(151, "q_ref, o_ref"), "pallas_kernels/x.py", 1),
        (function(81, "q_ref, o_ref"), "jaxserve/x.py", 1),
        (function(81), "pallas_kernels/x.py", 1),
        ("class A:\n" + "".join(f"  def f{i}(self): ...\n" for i in range(12)), "jaxserve/x.py", 0),
        ("class A:\n" + "".join(f"  def f{i}(self): ...\n" for i in range(13)), "jaxserve/x.py", 1),
        (
            "class A:\n" + "".join(f"  def _f{i}(self): ...\n" for i in range(13)),
            "jaxserve/x.py",
            0,
        ),
    ],
)
def test_too_long_catches(text, path, expected):
    assert broken(structure.too_long, text, path) == expected


@pytest.mark.parametrize(
    "text",
    [
        'os.environ["A"]',
        'os.environ.get("A", "")',
        'os.environ.setdefault("A", "")',
        'environ.pop("A")',
        'os.getenv("A")',
        'getenv("A")',
        '"A" in os.environ',
        '"A" not in os.environ',
    ],
)
def test_environment_variables_are_seen(text):
    assert structure.environment_variables([Source("jaxserve/x.py", text)]) == {"A"}
    other = [Source("jaxserve/x.py", text.replace('"A"', "name"))]
    assert structure.environment_variables(other) == {"?"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("class A(Exception): ...\nclass B(A): ...", 0),
        ("class A(Protocol): ...\nclass B(m.A[int], Protocol): ...", 0),
        ("class A(Exception): ...\nclass B(A): ...\nclass C(B): ...", 1),
        ("class A: ...\nclass B: ...\nclass C(A, B): ...", 1),
        ("class C(AMixin): ...", 1),
    ],
)
def test_deep_inheritance_catches(text, expected):
    assert len(structure.deep_inheritance([Source("jaxserve/x.py", text)])) == expected


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        ("pallas_kernels/a/b.py", "from jaxserve.config import replace", 1),
        ("jaxserve/server/a.py", "import jax.numpy as jnp", 1),
        ("jaxserve/server/a.py", "import jaxtyping", 0),
        ("jaxserve/engine/core.py", "def f():\n    from jaxserve import worker", 1),
        ("jaxserve/engine/__init__.py", "from jaxserve.server.app import App", 1),
        ("jaxserve/worker/worker.py", "from jaxserve.engine.core import EngineCore", 1),
        ("jaxserve/worker/worker.py", "from jaxserve.engine.executor import ring_buffer", 0),
        ("jaxserve/models/llama.py", "from jaxserve.worker.step import step", 1),
        ("jaxserve/checkpoint/gguf.py", "import jaxserve.engine.core", 1),
        ("jaxserve/messages.py", "from jax import Array", 1),
        ("jaxserve/server/a.py", "from jaxserve.engine.async_llm import AsyncLLM", 0),
    ],
)
def test_wrong_imports_catches(path, text, expected):
    assert broken(structure.wrong_imports, text, path) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", 0),
        ("x = 1", 1),
        ('"""Doc."""\nfrom __future__ import annotations', 1),
        ('"""Doc."""\ntry: f()\nexcept: raise', 1),
        ('"""Doc."""\ntry: f()\nexcept Exception: pass', 1),
        ('"""Doc."""\ntry: f()\nexcept (OSError, BaseException): ...', 1),
        ('"""Doc."""\ntry: f()\nexcept OSError: pass', 0),
        ('"""Doc."""\ntry: f()\nexcept Exception: raise', 0),
        ('"""Doc."""\nwith contextlib.suppress(Exception): f()', 1),
        ('"""Doc."""\nwith contextlib.suppress(OSError): f()', 0),
        ('"""Doc."""\nimport pickle', 1),
        ('"""Doc."""\nfrom cloudpickle import dumps', 1),
        ('"""Doc."""\nnp.load(f, allow_pickle=True)', 1),
    ],
)
def test_banned_catches(text, expected):
    assert broken(structure.banned, text) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("def f(x): ...", 1),
        ("def f(x: Array) -> int: ...", 1),
        ("def f(x: jax.Array | None): ...", 1),
        ("def f(*x: np.ndarray): ...", 1),
        ("def f() -> tuple[Array, int]: ...", 1),
        ("class A:\n  def f(self, *, x: jnp.ndarray): ...", 1),
        ('def f(x: Float[Array, "T H"]) -> Float[Array, "T"]: ...', 0),
        ('def f(x: Float[Array, "T"] | None) -> tuple[Int[Array, "R"], int]: ...', 0),
        ("def f(x: dict[str, Array]): ...", 0),
        ("def kernel(q_ref, o_ref, *, size: int): ...", 0),
        ("def f(x: int):\n  def g(y): ...", 0),
    ],
)
def test_untyped_arrays_catches(text, expected):
    assert broken(structure.untyped_arrays, text) == expected
    assert broken(structure.untyped_arrays, text, "jaxserve/engine/x.py") == 0


def test_machine_names_catches():
    # Put together here, so that this file does not name them.
    for name in ("root/x", "home/me", "work/main", "Users/me"):
        assert structure.machine_names("x", f'open("/{name}")')
    for host in ("py" + "pi.org", "files.python" + "hosted.org", "registry.npm" + "js.org"):
        assert structure.machine_names("x", f"https://{host}/simple")
    for fine in ("~/.cache/x", "jaxserve/worker/x.py", "http://127.0.0.1:8000/v1", "/tmp"):
        assert structure.machine_names("x", fine) == []


def test_imported_distributions_catches():
    text = "import os, yaml, jaxserve.config\nfrom huggingface_hub.utils import x\nimport tests.a"
    found = structure.imported_distributions([Source("jaxserve/x.py", text)])
    assert found == {"pyyaml", "huggingface-hub"}
