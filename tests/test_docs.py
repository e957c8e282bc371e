"""What the documents name exists: files, identifiers, flags, routes, limits, options, metrics."""

import ast
import functools
import re
from pathlib import Path

import pytest

from jaxserve.checkpoint import load_model_info
from jaxserve.cli import COMMANDS
from jaxserve.cli_flags import all_flags, config_from_flags
from jaxserve.config import EngineConfig, replace, resolve_for_model
from jaxserve.engine.in_proc_client import InProcClient
from jaxserve.metrics import MetricsPage, ServerMetrics
from jaxserve.server.protocol.chat import UNSUPPORTED_IN_CHAT, ChatCompletionRequest
from jaxserve.server.protocol.completions import UNSUPPORTED_IN_COMPLETIONS, CompletionRequest
from jaxserve.server.routes import ROUTES
from jaxserve.worker.sizing import _DEFAULTS
from tests import structure
from tests.fakes import FakeWorker

ROOT = Path(__file__).parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8")
    for path in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted(ROOT.glob("docs/*.md"))]
}
SOURCES = structure.python_files(ROOT)
SHIPPED = structure.in_packages(SOURCES)
FILES = [path for path, _ in structure.text_files(ROOT)]

_FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
_SPAN = re.compile(r"`([^`\n]+)`")
_FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]*")
_OPTION = re.compile(r"(?:add_argument|addoption)\(\s*\"(--[a-z-]+)\"")
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
_COMMAND = re.compile(r"\bjaxserve ([a-z]+)\b")
_PATH = re.compile(r"\.?[\w-]+(/[\w.-]+)*(/|\.(py|md|yaml|toml|txt))")
_SCRIPT = re.compile(r"(scripts|tests)(/\w+)+")
_ROUTE = re.compile(r"(?:(?:GET|POST) )?(/[\w/{}:.]+)")
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*(\[\d\])?(\.\w+)?")
_METRIC = re.compile(r"jaxserve:(\w+)")


# --- what there is -------------------------------------------------------------------------------


@functools.cache
def words() -> set[str]:
    """Every identifier of the shipped code, and every string that looks like one."""
    found = set()
    for source in SHIPPED:
        for node in ast.walk(source.tree):
            for field in ("name", "id", "attr", "arg", "value"):
                value = getattr(node, field, None)
                if isinstance(value, str) and value.isidentifier():
                    found.add(value)
    return found


@functools.cache
def members() -> dict[str, set[str]]:
    """Class name -> its methods and attributes, and module name -> its top level."""
    found: dict[str, set[str]] = {}
    for source in SHIPPED:
        found.setdefault(source.module.rpartition(".")[2], set()).update(_own_names(source.tree))
        for node in ast.walk(source.tree):
            if isinstance(node, ast.ClassDef):
                names = found.setdefault(node.name, set())
                names |= _own_names(node)
                names |= {
                    n.attr
                    for n in ast.walk(node)
                    if isinstance(n, ast.Attribute) and isinstance(n.ctx, ast.Store)
                }
    return found


def _own_names(owner: ast.Module | ast.ClassDef) -> set[str]:
    names = set()
    for node in owner.body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Assign(targets=targets):
                names |= {t.id for t in targets if isinstance(t, ast.Name)}
            case ast.AnnAssign(target=ast.Name(id=name)):
                names.add(name)
    return names


@functools.cache
def external_modules() -> set[str]:
    """First names of what the shipped code imports from elsewhere."""
    names = {name.partition(".")[0] for source in SHIPPED for _, name in structure.imports(source)}
    return names - set(structure.PACKAGES)


@functools.cache
def flags() -> set[str]:
    """Every option of every command, of the scripts and of the compile tests."""
    found = {"--help", "--version"}
    for command in COMMANDS.values():
        found |= set(command.make_parser()._option_string_actions)
    for script in (*ROOT.glob("scripts/*.py"), ROOT / "tests" / "compile" / "conftest.py"):
        found |= set(_OPTION.findall(script.read_text(encoding="utf-8")))
    return found


@functools.cache
def constants() -> dict[str, list[float]]:
    """Numbers that modules name, by name."""
    found: dict[str, list[float]] = {}
    for source in SHIPPED:
        for node in source.tree.body:
            match node:
                case ast.Assign(
                    targets=[ast.Name(id=name)], value=ast.Constant(value=int() | float() as value)
                ):
                    found.setdefault(name, []).append(value)
    return found


def routes() -> set[str]:
    """The paths of the table in server/routes.py."""
    return {route.path for route in ROUTES}


# --- what is wrong with a text -------------------------------------------------------------------


def wrong_span(span: str) -> str | None:
    """Why what stands between backticks names nothing, or None."""
    if _PATH.fullmatch(span) or _SCRIPT.fullmatch(span):
        return _wrong_path(span)
    if (metric := _METRIC.fullmatch(span)) is not None:
        return None if metric[1] in metrics() else "is no metric"
    if (route := _ROUTE.fullmatch(span)) is not None:
        return None if route[1] in routes() else "is no route"
    if _IDENTIFIER.fullmatch(span) is None or span in _LITERALS:
        return None
    first, *rest = re.sub(r"\[\d\]", "", span).split(".")
    if rest and first in structure.PACKAGES:
        return None if _is_module(span) or _is_in_module(span) else "is nowhere"
    if rest and first in external_modules():
        return None
    if rest and first in members() and "[" not in span:
        return None if rest[0] in members()[first] else f"{first} has no {rest[0]}"
    if not rest and first[0].isupper() and not first.isupper():
        return None if first in members() else "is no class"
    missing = [name for name in (first, *rest) if name not in words()]
    return f"{missing[0]} is no name in the code" if missing else None


# JSON's words.
_LITERALS = {"true", "false", "null"}


def _is_module(name: str) -> bool:
    return any(source.module == name for source in SHIPPED)


def _is_in_module(name: str) -> bool:
    module, _, last = name.rpartition(".")
    return _is_module(module) and last in words()


def _wrong_path(path: str) -> str | None:
    """A path from the root, or the end of exactly one; a folder ends with a slash."""
    if path.endswith("/"):
        return None if (ROOT / path).is_dir() else "is no folder"
    if path in FILES:
        return None
    found = [file for file in FILES if file.endswith(f"/{path}")]
    return None if len(found) == 1 else f"is the end of {len(found)} files"


def wrong_spans(text: str) -> list[str]:
    spans = _SPAN.findall(_FENCE.sub("", _COMMENT.sub("", text)))
    return [f"`{span}` {reason}" for span in spans if (reason := wrong_span(span))]


def wrong_flags(text: str) -> list[str]:
    return [flag for flag in _FLAG.findall(_COMMENT.sub("", text)) if flag not in flags()]


def wrong_commands(text: str) -> list[str]:
    code = [body for language, body in _FENCE.findall(text) if not language]
    code += _SPAN.findall(_FENCE.sub("", text))
    return [name for part in code for name in _COMMAND.findall(part) if name not in COMMANDS]


def wrong_links(page: str, text: str) -> list[str]:
    found = []
    for target, anchor in _LINK.findall(_FENCE.sub("", text)):
        if target.startswith("https://"):
            continue
        path = (ROOT / page).parent / target if target else ROOT / page
        if not path.is_file():
            found.append(target)
        elif anchor and anchor not in _anchors(path.read_text(encoding="utf-8")):
            found.append(f"{target}#{anchor}")
    return found


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ (.*)$", _FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


def wrong_quotes(text: str) -> list[str]:
    """Python blocks that are in no file, however indented."""
    sources = [_unindented(source.text) for source in SHIPPED]
    blocks = [body for language, body in _FENCE.findall(text) if language == "python"]
    return [body for body in blocks if not any(_unindented(body) in s for s in sources)]


def _unindented(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def rows(text: str) -> list[list[str]]:
    """The cells of every table row below a heading line."""
    lines = [line.strip("| ") for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]


def section(page: str, heading: str) -> str:
    """The text under a heading of docs/behaviour.md and the like."""
    parts = re.split(r"^## (.*)$", PAGES[page], flags=re.MULTILINE)
    return parts[parts.index(heading) + 1]


def wrong_values(text: str) -> list[str]:
    """Table rows that name a constant or a flag with a default in their last cell, and another
    value in the cell before."""
    defaults = {flag.option: flag.default for flag in all_flags() if type(flag.default) is not str}
    found = []
    for row in rows(text):
        name = row[-1].strip("`")
        values = constants().get(name, [defaults[name]] if defaults.get(name) else [])
        if name.isupper() and len(values) != 1:
            found.append(f"{name} is not one constant")
        for value in values:
            shown = f"{value:g}" if isinstance(value, float) else f"{value:,}"
            if not re.search(rf"(?<![\d,.]){shown}(?![\d.])", row[-2]):
                found.append(f"{name} is {value}, not {row[-2]}")
    return found


def metrics() -> dict[str, str]:
    """Name (with _total for a counter) -> type."""
    return {
        family.name.removeprefix("jaxserve:")
        + ("_total" if family.type == "counter" else ""): family.type
        for family in MetricsPage("m", ServerMetrics("m").counts()).collect()
    }


# --- the pages -----------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_names_exist(page):
    assert wrong_spans(PAGES[page]) == []


@pytest.mark.parametrize("page", PAGES)
def test_flags_and_commands_exist(page):
    assert wrong_flags(PAGES[page]) == []
    assert wrong_commands(PAGES[page]) == []


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    assert wrong_links(page, PAGES[page]) == []


def test_quoted_code_is_the_code():
    text = PAGES["docs/architecture.md"]
    assert text.count("```python") == 4
    assert wrong_quotes(text) == []


def test_limits_and_waits_are_those_of_the_code():
    limits, shutdown = (section("docs/behaviour.md", h) for h in ("Limits", "Shutdown"))
    named = [row[-1].strip("`") for row in rows(limits + shutdown)]
    assert sum(name in constants() for name in named) >= 12
    assert "--max-body-bytes" in named and "--step-timeout-s" in named
    assert wrong_values(limits + shutdown) == []


def test_every_request_option_is_listed():
    text = section("docs/behaviour.md", "Request options")
    listed = [row[0].strip("`") for row in rows(text)][2:]
    fields = {*ChatCompletionRequest.__struct_fields__, *CompletionRequest.__struct_fields__}
    assert sorted(listed) == sorted(fields)
    refused = _SPAN.findall(text[text.index("Known but not implemented") :])
    refused = [span for span in refused if " " not in span]
    known = {*UNSUPPORTED_IN_CHAT, *UNSUPPORTED_IN_COMPLETIONS} - fields
    assert sorted(refused) == sorted(known)


def test_every_route_is_listed():
    text = section("docs/behaviour.md", "Routes")
    spans = [
        _ROUTE.fullmatch(span) for row in rows(text) for span in _SPAN.findall(row[0] + row[1])
    ]
    assert {span[1] for span in spans if span} == routes()


def test_every_metric_is_listed():
    table = rows(section("docs/behaviour.md", "Metrics"))[2:]
    listed = {row[0].strip("`").removeprefix("jaxserve:"): row[1] for row in table}
    assert listed == metrics() and len(table) == len(listed)


def test_platform_defaults_are_listed():
    listed = {}
    for name, *cells in rows(section("docs/behaviour.md", "Memory and sizes"))[2:]:
        listed[name.strip("`")] = [cell.strip("`").replace(",", "") for cell in cells]
    assert listed == {
        name: [
            *map(str, (d.block_size, d.max_num_seqs, d.max_num_batched_tokens)),
            *map(str, (d.max_num_mixed_tokens, d.smallest_bucket, d.jump_ahead_tokens)),
            d.dtype,
        ]
        for name, d in _DEFAULTS.items()
    }


# --- the examples --------------------------------------------------------------------------------


class ResolvedWorker(FakeWorker):
    """A worker of the size of nothing, for a config that leaves all open."""

    def load(self) -> EngineConfig:
        self.config = replace(
            self.config,
            dtype="float32",
            block_size=16,
            num_kv_blocks=64,
            max_num_seqs=4,
            max_num_batched_tokens=64,
            max_num_mixed_tokens=64,
            jump_ahead_tokens=64,
            attention="reference",
            matmul="xla",
            compilation_cache_dir="none",
        )
        return self.config


def test_the_offline_example_runs(monkeypatch, capsys, demo_model_path):
    (program,) = [b for language, b in _FENCE.findall(PAGES["README.md"]) if language == "python"]
    worker_class = f"{__name__}:{ResolvedWorker.__name__}"
    client = functools.partial(InProcClient, worker_class=worker_class)
    monkeypatch.setattr("jaxserve.llm.InProcClient", client)
    exec(compile(program, "README.md", "exec"), {})
    assert len(capsys.readouterr().out.splitlines()) >= 2
    assert len([line for line in program.splitlines() if line]) == 4


@pytest.mark.parametrize("path", sorted(ROOT.glob("configs/*")), ids=lambda path: path.name)
def test_example_configs_are_valid(path, demo_model_path):
    config = config_from_flags({}, str(path))
    assert config.model.model == "smollm2-135m"
    resolve_for_model(config, load_model_info(demo_model_path))
    assert f"configs/{path.name}" in path.read_text("utf-8").splitlines()[0]


# --- each check catches what it is for -----------------------------------------------------------


@pytest.mark.parametrize(
    "span",
    [
        "engine/scheduler2.py",
        "jaxserve/kernels/",
        "__init__.py",
        "scripts/nothing",
        "EngineCore.walk",
        "sizing.no_such_function",
        "jaxserve.engine.no_such_module",
        "jaxserve.LLMs",
        "NoSuchClass",
        "ThreadPoolExecutor",
        "no_such_word",
        "usage.no_such_field",
        "/v1/rerank",
        "GET /healthy",
        "jaxserve:no_such_metric",
    ],
)
def test_a_wrong_name_is_seen(span):
    assert wrong_spans(f"See `{span}` there.") != []


@pytest.mark.parametrize(
    "span",
    [
        "engine/scheduler.py",
        "jaxserve/worker/",
        "scripts/serve",
        "EngineCore.run",
        "sizing.size_kv_cache",
        "jaxserve.engine",
        "jax.lax.cond",
        "messages[2].content",
        "GET /health",
        "jaxserve:num_preemptions_total",
        '{"a": 1}',
    ],
)
def test_a_right_name_is_left_alone(span):
    assert wrong_spans(f"See `{span}` there.") == []


def test_wrong_flags_commands_links_and_quotes_are_seen():
    assert wrong_flags("`--max-model-length 3` or --no-port") == ["--max-model-length", "--no-port"]
    assert wrong_flags("--no-async-scheduling, --temperature, --json -- x") == []
    assert wrong_commands("`jaxserve run`\n```\njaxserve server x\n```\n") == ["server", "run"]
    assert wrong_links("docs/config.md", "[a](config.md) [b](cfg.md)") == ["cfg.md"]
    assert wrong_links("README.md", "[a](docs/behaviour.md#no)") == ["docs/behaviour.md#no"]
    assert wrong_quotes("```python\nwhile self._is_running:\n    self.jump()\n```\n")


@pytest.mark.parametrize(
    ("row", "num_wrong"),
    [
        ("| choices | 128 | `MAX_N` |", 0),
        ("| choices | 129 | `MAX_N` |", 1),
        ("| choices | 1,128 | `MAX_N` |", 1),
        ("| choices | 128 | `MAX_M` |", 1),
        ("| body | 8,388,608 bytes | `--max-body-bytes` |", 0),
        ("| body | 8,388,609 bytes | `--max-body-bytes` |", 1),
        ("| wait | 2 s | `_ASK_TIMEOUT_S` |", 0),
    ],
)
def test_a_wrong_value_is_seen(row, num_wrong):
    assert len(wrong_values(row)) == num_wrong
