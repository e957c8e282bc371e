"""The rules on the shape of the code that a program can check; a check returns what breaks it."""

import ast
import functools
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

MAX_FILE_LINES = 600
MAX_FUNCTION_LINES = 80
MAX_KERNEL_LINES = 150
MAX_PUBLIC_METHODS = 12
MAX_ENVIRONMENT_VARIABLES = 6

PACKAGES = ("jaxserve", "pallas_kernels")
ARRAY_CODE = ("jaxserve/worker/", "jaxserve/models/", "pallas_kernels/")
TEXT_FOLDERS = (*PACKAGES, "tests", "scripts", "configs", "docs", "requirements", ".ci")
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# Who must not import whom, by the beginning of the module's name.
_TOP = ("jaxserve.llm", "jaxserve.cli", "jaxserve.doctor", "jaxserve.chat_client")
FORBIDDEN_IMPORTS = {
    "pallas_kernels": ("jaxserve",),
    "jaxserve.models": ("jaxserve.worker", "jaxserve.engine", "jaxserve.server", *_TOP),
    "jaxserve.worker": ("jaxserve.engine", "jaxserve.server", *_TOP),
    "jaxserve.engine": (
        *("jaxserve.server", "jaxserve.worker", "jaxserve.models", "pallas_kernels", "jax"),
        *_TOP,
    ),
    "jaxserve.server": ("jaxserve.worker", "jaxserve.models", "pallas_kernels", "jax", *_TOP),
    "jaxserve.checkpoint": (
        *("jaxserve.engine", "jaxserve.server", "jaxserve.worker", "jaxserve.models"),
        *("pallas_kernels", "jax"),
        *_TOP,
    ),
    "jaxserve.messages": ("jaxserve.engine", "jaxserve.server", "jaxserve.worker", "jax", *_TOP),
    "jaxserve.config": ("jaxserve.engine", "jaxserve.server", "jaxserve.worker", "jax", *_TOP),
}
# The two ends of the wire between engine core and worker stand together.
ALLOWED_IMPORTS = (("jaxserve.worker", "jaxserve.engine.executor"),)

# Import name -> distribution name, where they differ by more than - and _.
DISTRIBUTIONS = {"yaml": "pyyaml", "zmq": "pyzmq"}
# Loaded by uvicorn, by name.
NOT_IMPORTED = {"httptools"}

_PICKLES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve"}
# Compiled programs are code whatever they are wrapped in, and jax pickles them itself.
_MAY_PICKLE = "jaxserve/worker/program_store.py"
_MACHINE = re.compile(
    r"(?<![\w.~-])/(?:root|home|work|Users)/[\w.]"
    r"|\b(?:pypi[.]org|pythonhosted[.]org|npmjs[.](?:org|com)|deb[.]debian[.]org)"
)


@dataclass(frozen=True)
class Source:
    """A Python file. path: relative to the repository, with slashes."""

    path: str
    text: str

    @functools.cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, self.path)

    @property
    def module(self) -> str:
        """Its dotted name."""
        return self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")

    def at(self, node: ast.AST, message: str) -> str:
        """A finding: where, and what."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {message}"


def python_files(root: Path) -> list[Source]:
    """Every Python file of the project."""
    paths = [p for folder in TEXT_FOLDERS for p in sorted((root / folder).rglob("*.py"))]
    paths.append(root / "scripts" / "generate_docs")
    return [Source(p.relative_to(root).as_posix(), p.read_text(encoding="utf-8")) for p in paths]


def in_packages(sources: Iterable[Source]) -> list[Source]:
    """Those that are shipped."""
    return [s for s in sources if s.path.startswith(tuple(f"{p}/" for p in PACKAGES))]


def text_files(root: Path) -> Iterator[tuple[str, str]]:
    """(path, text) of every text file of the project."""
    paths = [p for p in sorted(root.iterdir()) if p.is_file()]
    paths += [p for folder in TEXT_FOLDERS for p in sorted((root / folder).rglob("*"))]
    for path in paths:
        if path.is_file() and "__pycache__" not in path.parts:
            try:
                yield path.relative_to(root).as_posix(), path.read_text(encoding="utf-8")
            except UnicodeDecodeError:
                continue


def too_long(source: Source) -> list[str]:
    """Files, functions and classes past their budget."""
    found = []
    num_lines = len(source.text.splitlines())
    if num_lines > MAX_FILE_LINES:
        found.append(f"{source.path}:1: {num_lines} lines in a file, at most {MAX_FILE_LINES}")
    for node in ast.walk(source.tree):
        if isinstance(node, FUNCTIONS):
            is_kernel = source.path.startswith("pallas_kernels/") and any(
                arg.arg.endswith("_ref") for arg in _parameters(node)
            )
            limit = MAX_KERNEL_LINES if is_kernel else MAX_FUNCTION_LINES
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > limit:
                found.append(source.at(node, f"{node.name} has {length} lines, at most {limit}"))
        if isinstance(node, ast.ClassDef) and not source.path.startswith("tests/"):
            names = {n.name for n in node.body if isinstance(n, FUNCTIONS)}
            count = sum(not name.startswith("_") for name in names)
            if count > MAX_PUBLIC_METHODS:
                message = f"{node.name} has {count} public methods, at most {MAX_PUBLIC_METHODS}"
                found.append(source.at(node, message))
    return found


def environment_variables(sources: Iterable[Source]) -> set[str]:
    """Names read or set in os.environ; "?" stands for one that is not a literal."""
    names = set()
    for source in sources:
        for node in ast.walk(source.tree):
            key = _environment_key(node)
            if key is not None:
                names.add(str(key.value) if isinstance(key, ast.Constant) else "?")
    return names


def _environment_key(node: ast.AST) -> ast.expr | None:
    match node:
        case ast.Subscript(value=value, slice=key) if _is_environ(value):
            return key
        case ast.Call(func=ast.Attribute(value=value), args=[key, *_]) if _is_environ(value):
            return key
        case ast.Call(func=ast.Attribute(attr="getenv") | ast.Name(id="getenv"), args=[key, *_]):
            return key
        case ast.Compare(left=key, ops=[ast.In() | ast.NotIn()], comparators=[value]) if (
            _is_environ(value)
        ):
            return key
    return None


def _is_environ(node: ast.expr) -> bool:
    return _last_name(node) == "environ"


def deep_inheritance(sources: Iterable[Source]) -> list[str]:
    """Mixins, and classes that derive from a class of ours that itself derives from one."""
    classes = [
        (source, node)
        for source in sources
        for node in ast.walk(source.tree)
        if isinstance(node, ast.ClassDef)
    ]
    own = {node.name for _, node in classes}
    bases = {node.name: {_last_name(b) for b in node.bases} & own for _, node in classes}
    found = []
    for source, node in classes:
        real = [b for b in map(_last_name, node.bases) if b not in ("Protocol", "Generic")]
        if len(real) > 1 or any(str(base).endswith("Mixin") for base in real):
            found.append(source.at(node, f"{node.name} mixes {', '.join(map(str, real))}"))
        for base in bases[node.name]:
            if bases[str(base)]:
                found.append(source.at(node, f"{node.name} derives from {base}, itself derived"))
    return found


def wrong_imports(source: Source) -> list[str]:
    """Imports against the direction of dependencies, wherever in the file they stand."""
    forbidden = next((f for m, f in FORBIDDEN_IMPORTS.items() if _within(source.module, m)), ())
    found = []
    for node, name in imports(source):
        if any(_within(name, f) for f in forbidden) and not any(
            _within(source.module, who) and _within(name, whom) for who, whom in ALLOWED_IMPORTS
        ):
            found.append(source.at(node, f"{source.module} must not import {name}"))
    return found


def imports(source: Source) -> Iterator[tuple[ast.stmt, str]]:
    """(statement, dotted name) of every import; `from a import b` counts as a.b."""
    for node in ast.walk(source.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node, f"{node.module}.{alias.name}"


def banned(source: Source) -> list[str]:
    """What no file may hold: hidden errors, pickle, postponed annotations, no first sentence."""
    found = []
    if source.text.strip() and not ast.get_docstring(source.tree):
        found.append(f"{source.path}:1: no docstring says what the module owns")
    for node in ast.walk(source.tree):
        match node:
            case ast.ImportFrom(module="__future__"):
                found.append(source.at(node, "no __future__ imports"))
            case ast.ExceptHandler(type=None):
                found.append(source.at(node, "a bare except hides errors"))
            case ast.ExceptHandler(type=kind, body=[ast.Pass() | ast.Expr(ast.Constant())]) if (
                _catches_all(kind)
            ):
                found.append(source.at(node, "except Exception: pass hides errors"))
            case ast.Call(func=func, args=args) if _last_name(func) == "suppress":
                if any(_catches_all(arg) for arg in args):
                    found.append(source.at(node, "suppress(Exception) hides errors"))
            case ast.keyword(arg="allow_pickle", value=ast.Constant(value=True)):
                found.append(source.at(node.value, "no pickle"))
    for node, name in imports(source):
        if name.partition(".")[0] in _PICKLES and source.path != _MAY_PICKLE:
            found.append(source.at(node, "no pickle"))
    return found


def _catches_all(kind: ast.expr | None) -> bool:
    kinds = kind.elts if isinstance(kind, ast.Tuple) else [kind]
    return any(k is not None and _last_name(k) in ("Exception", "BaseException") for k in kinds)


def untyped_arrays(source: Source) -> list[str]:
    """In array code: parameters without annotation, and arrays without shape."""
    if not source.path.startswith(ARRAY_CODE):
        return []
    found = []
    tree = source.tree
    owners = [tree, *(n for n in ast.walk(tree) if isinstance(n, ast.ClassDef))]
    for function in (f for owner in owners for f in owner.body if isinstance(f, FUNCTIONS)):
        for arg in _parameters(function):
            if arg.arg in ("self", "cls") or arg.arg.endswith("_ref"):
                continue
            if arg.annotation is None:
                found.append(source.at(arg, f"{function.name}: {arg.arg} has no annotation"))
            elif _is_bare_array(arg.annotation):
                found.append(source.at(arg, f"{function.name}: {arg.arg} has no shape"))
        if function.returns is not None and _is_bare_array(function.returns):
            found.append(source.at(function, f"{function.name}: its result has no shape"))
    return found


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> list[ast.arg]:
    args = function.args
    named = [*args.posonlyargs, *args.args, *args.kwonlyargs]
    return named + [arg for arg in (args.vararg, args.kwarg) if arg is not None]


def _is_bare_array(annotation: ast.expr) -> bool:
    match annotation:
        case ast.BinOp(left=left, right=right):
            return _is_bare_array(left) or _is_bare_array(right)
        case ast.Subscript(value=value, slice=inner) if _last_name(value) in ("tuple", "list"):
            items = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return any(_is_bare_array(item) for item in items)
    return _last_name(annotation) in ("Array", "ndarray", "ArrayLike") and not isinstance(
        annotation, ast.Subscript
    )


def machine_names(path: str, text: str) -> list[str]:
    """Folders of somebody's machine, and hosts of package registries."""
    return [
        f"{path}:{number}: {match.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        for match in _MACHINE.finditer(line)
    ]


def imported_distributions(sources: Iterable[Source]) -> set[str]:
    """Distribution names of everything imported that is neither ours nor Python's."""
    ours = {*PACKAGES, "tests"} | sys.stdlib_module_names
    names = {name.partition(".")[0] for source in sources for _, name in imports(source)}
    return {DISTRIBUTIONS.get(name, name).replace("_", "-").lower() for name in names - ours}


def declared_distributions(root: Path, *extras: str) -> dict[str, str]:
    """Name -> requirement, of pyproject.toml's dependencies and these extras."""
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    requirements = list(project["dependencies"])
    for extra in extras:
        requirements += project["optional-dependencies"][extra]
    return {
        re.split(r"[\[<>=!~ ;]", text, maxsplit=1)[0].replace("_", "-").lower(): text
        for text in requirements
    }


def locked_versions(path: Path) -> dict[str, str]:
    """Name -> version, of a lock file."""
    lines = path.read_text().splitlines()
    pins = [line.partition(";")[0].strip().split("==") for line in lines if "==" in line]
    return {name: version for name, version in pins if not name.startswith("#")}


def _within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def _last_name(node: ast.expr) -> str | None:
    if isinstance(node, ast.Subscript):
        return _last_name(node.value)
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else None
