"""The command line: flags and YAML become a config, mistakes become two lines."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from jaxserve import __version__, cli, doctor
from jaxserve.cli_flags import all_flags, config_from_flags, config_from_kwargs
from jaxserve.config import EngineConfig, replace
from jaxserve.errors import UserError
from tests.native import IN_C

ROOT = Path(__file__).parent.parent


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[EngineConfig]:
    """`jaxserve serve` appends its config here and returns 7."""
    configs: list[EngineConfig] = []
    module: Any = ModuleType("jaxserve.server.serve")
    module.serve = lambda config: configs.append(config) or 7
    monkeypatch.setitem(sys.modules, "jaxserve.server.serve", module)
    return configs


def mistake(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[str, str]:
    """Problem and fix that a wrong command line prints; the rest of the contract is checked."""
    assert cli.main(argv) == 2
    captured = capsys.readouterr()
    problem, fix = captured.err.splitlines()
    assert captured.out == ""
    assert problem.startswith("error: ") and fix.startswith("fix: ")
    return problem.removeprefix("error: "), fix.removeprefix("fix: ")


# --- flags ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("argv", "changed"),
    [
        (["m"], {}),
        (["m", "--port", "8001"], {"port": 8001}),
        (["--port=8001", "m"], {"port": 8001}),
        (["--port", "8001", "--port", "8002", "m"], {"port": 8002}),
        (["m", "--forbid-compile"], {"forbid_compile": True}),
        (["m", "--no-async-scheduling"], {"async_scheduling": False}),
        (["m", "--async-scheduling"], {}),
        (["m", "--memory-utilization", "1"], {"memory_utilization": 1.0}),
        (["m", "--dtype", "float32"], {"dtype": "float32"}),
        (["m", "--served-model-name", "a b"], {"served_model_name": "a b"}),
        (["m", "--api-key=-secret"], {"api_key": ("-secret",)}),
        (["m", "--api-key", "a,b", "--api-key", "c"], {"api_key": ("a", "b", "c")}),
        (
            ["m", "--allowed-origins", '["http://a", "b,c"]'],
            {"allowed_origins": ("http://a", "b,c")},
        ),
        (["m", "--api-key", "[a, b]"], {"api_key": ("[a", "b]")}),
        (["m", "--seed", "9223372036854775807"], {"seed": 2**63 - 1}),
    ],
)
def test_flags(served, argv, changed):
    assert cli.main(["serve", *argv]) == 7
    assert served == [replace(EngineConfig(), model="m", **changed)]


def other_value(flag):
    """A valid value that is not the default."""
    if flag.type is bool:
        return not flag.default
    if flag.choices:
        return next(choice for choice in flag.choices if choice != flag.default)
    if flag.type is tuple:
        return ("other", "more")
    if flag.type is str:
        return "other"
    other = 2 if flag.type is int else 0.5
    return flag.type(1) if flag.default != 1 else other


@pytest.mark.parametrize("flag", all_flags(), ids=lambda flag: flag.name)
def test_every_field_by_flag_yaml_and_keyword(served, tmp_path, flag):
    value = other_value(flag) if flag.name != "max_body_bytes" else 4096
    expected = replace(replace(EngineConfig(), model="m"), **{flag.name: value})
    assert expected != replace(EngineConfig(), model="m")

    option = flag.option if value is not False else flag.option.replace("--", "--no-", 1)
    text = ",".join(value) if isinstance(value, tuple) else str(value)
    argv = [option] if flag.type is bool else [option, text]
    by_flag = ["serve", "m", *argv] if flag.name != "model" else ["serve", str(value)]
    file = tmp_path / "config.yaml"
    file.write_text(json.dumps({"model": "m"} | {flag.name: value}))

    assert cli.main(by_flag) == 7
    assert cli.main(["serve", "--config", str(file)]) == 7
    assert served == [expected, expected]
    assert config_from_kwargs(**({"model": "m"} | {flag.name: value})) == expected


@pytest.mark.parametrize(
    ("argv", "problem", "fix"),
    [
        (["--prot", "1", "m"], "--prot is not a flag", "Did you mean --port?"),
        (["m", "--prot=1"], "--prot is not a flag", "Did you mean --port?"),
        (["m", "--max-model-length", "1"], "--max-model-length", "Did you mean --max-model-len?"),
        (["m", "--por", "1"], "--por is not a flag", "Did you mean --port?"),
        (["m", "--zzzzz"], "--zzzzz is not a flag", "'jaxserve serve --help' lists them."),
        (["--model", "m"], "--model is not a flag", "jaxserve serve MODEL"),
        (["m", "--api-key", ""], "--api-key is empty", "leave it out"),
        (["m", "--api-key", "a,,b"], "--api-key a,,b is not valid", "several with commas between"),
        (["m", "--api-key", "a", "--api-key", ""], "--api-key a --api-key  is not valid", "a text"),
        (["m", "--port", "0"], "--port 0 is not valid", "a whole number from 1 to 65535"),
        (["m", "--port", "65536"], "--port 65536 is not valid", "such as --port 8000"),
        (["m", "--port", "-5"], "--port -5 is not valid", "such as --port 8000"),
        (["m", "--port", "80.5"], "--port 80.5 is not valid", "a whole number"),
        (["m", "--max-num-seqs", "-1"], "--max-num-seqs -1 is not valid", "from 0 to 4096"),
        (["m", "--seed", str(2**63)], f"--seed {2**63} is not valid", "a whole number"),
        (["m", "--memory-utilization", "0"], "0 is not valid", "above 0 and up to 1"),
        (["m", "--memory-utilization", "1.01"], "1.01 is not valid", "above 0 and up to 1"),
        (["m", "--memory-utilization", "nan"], "nan is not valid", "above 0 and up to 1"),
        (["m", "--step-timeout-s", "inf"], "inf is not valid", "a number above 0"),
        (["m", "--dtype", "float64"], "--dtype float64", "one of auto, bfloat16, float32"),
        (["m", "--port"], "--port", "'jaxserve serve --help'"),
        (["m", "--forbid-compile=yes"], "--forbid-compile", "'jaxserve serve --help'"),
        (["m", "n"], "'n' is one argument too many", "'jaxserve serve --help'"),
        ([], "needs a model", "jaxserve serve smollm2-135m"),
    ],
)
def test_wrong_flags(served, capsys, argv, problem, fix):
    lines = mistake(capsys, "serve", *argv)
    assert problem in lines[0] and fix in lines[1]
    assert served == []


def test_user_error_of_the_server_is_two_lines(served, capsys, monkeypatch):
    def refuse(config: EngineConfig) -> int:
        raise UserError("Port 8000 is taken.", fix="Use another.")

    monkeypatch.setattr(sys.modules["jaxserve.server.serve"], "serve", refuse)
    assert mistake(capsys, "serve", "m") == ("Port 8000 is taken.", "Use another.")


@pytest.mark.parametrize(
    ("argv", "problem", "fix"),
    [
        (["srve"], "no command 'srve'", "Did you mean 'jaxserve serve'?"),
        (["zzz"], "no command 'zzz'", "'jaxserve --help'"),
        (["--versoin"], "no command '--versoin'", "Did you mean 'jaxserve --version'?"),
        (["doctor", "--jsno"], "--jsno is not a flag of 'jaxserve doctor'", "--json"),
        (["doctor", "x"], "'x' is one argument too many", "'jaxserve doctor --help'"),
        (["chat", "--max-tokens", "0"], "'0' is not a whole number", "'jaxserve chat --help'"),
        (["chat", "--temperature", "hot"], "'hot' is not a number", "'jaxserve chat --help'"),
        (["chat", "--url", "ftp://x"], "--url ftp://x", "http://127.0.0.1:8000"),
        (["chat", "--url", "http://h:port"], "--url http://h:port", "http://127.0.0.1:8000"),
    ],
)
def test_wrong_commands(capsys, argv, problem, fix):
    lines = mistake(capsys, *argv)
    assert problem in lines[0] and fix in lines[1]


def test_keyword_mistakes():
    with pytest.raises(UserError) as unknown:
        config_from_kwargs(max_model_lenght=5)
    assert unknown.value.fix == "Did you mean max_model_len?"
    with pytest.raises(UserError) as invalid:
        config_from_kwargs(port="8000")
    assert invalid.value.problem == "port='8000' is not valid."
    assert invalid.value.fix.endswith("such as port=8000.")


# --- YAML ----------------------------------------------------------------------------------------


def test_flags_win_over_the_file(served, tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("model: a\nmax-model-len: 100\nblock_size: 8\nasync-scheduling: true\n")
    argv = ["serve", "b", "--config", str(file), "--max-model-len", "50", "--no-async-scheduling"]
    assert cli.main(argv) == 7
    assert served == [
        replace(EngineConfig(), model="b", max_model_len=50, block_size=8, async_scheduling=False)
    ]


def test_a_whole_number_is_a_number(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("step-timeout-s: 5\n")
    timeout_s = config_from_flags({}, str(file)).worker.step_timeout_s
    assert timeout_s == 5.0 and type(timeout_s) is float


def test_empty_file_is_the_default(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text("# nothing\n")
    assert config_from_flags({}, str(file)) == EngineConfig()


@pytest.mark.parametrize(
    ("text", "problem", "fix"),
    [
        ("prt: 1", "c.yaml: prt is not a config field", "Did you mean port?"),
        ("info: {}", "c.yaml: info is not a config field", ""),
        ("port: '8000'", "c.yaml: port: '8000' is not valid", "such as port: 8000"),
        ("port: 99999", "c.yaml: port: 99999 is not valid", "from 1 to 65535"),
        ("port: true", "c.yaml: port: True is not valid", "a whole number"),
        ("port:", "c.yaml: port: None is not valid", "a whole number"),
        ("port: [1]", "c.yaml: port: [1] is not valid", "a whole number"),
        ("api_key: 1234", "c.yaml: api_key: 1234 is not valid", "a text"),
        (
            "forbid-compile: 1",
            "c.yaml: forbid-compile: 1 is not valid",
            "such as forbid_compile: f",
        ),
        ("dtype: half", "c.yaml: dtype: 'half' is not valid", "such as dtype: auto"),
        ("port: 1\nport: 2", "c.yaml, line 2 is not valid YAML: port is given twice", "port: 8000"),
        ("block-size: 1\nblock_size: 2", "line 2 is not valid YAML: block_size is given twice", ""),
        ("port: [", "c.yaml, line 1 is not valid YAML", "one 'name: value' a line"),
        ("- port", "c.yaml is not a list of names and values", "one 'name: value' a line"),
        ("\xff", "c.yaml is not valid YAML: it is not UTF-8 text", "one 'name: value' a line"),
        ("a: !!python/object:os.system {}", "c.yaml, line 1 is not valid YAML", ""),
    ],
)
def test_wrong_files(served, capsys, tmp_path, text, problem, fix):
    file = tmp_path / "c.yaml"
    file.write_bytes(text.encode("latin-1"))
    lines = mistake(capsys, "serve", "m", "--config", str(file))
    assert problem in lines[0] and fix in lines[1]


def test_missing_file_and_folder(capsys, tmp_path):
    assert "No such file" in mistake(capsys, "serve", "m", "--config", str(tmp_path / "no"))[0]
    assert "Is a directory" in mistake(capsys, "serve", "m", "--config", str(tmp_path))[0]


@pytest.mark.parametrize("path", sorted((ROOT / "configs").glob("*.yaml")), ids=lambda p: p.name)
def test_example_configs_are_valid(path):
    assert config_from_flags({}, str(path)) != EngineConfig()


# --- help, version, doctor -----------------------------------------------------------------------


def test_help_names_every_flag_under_its_section(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["serve", "--help"])
    assert exit_info.value.code == 0
    text = capsys.readouterr().out
    for flag in all_flags():
        section = text.partition(f"\n{flag.section}:\n")[2] if flag.name != "model" else text
        section = section.partition(":\n\n")[0]
        option = "MODEL" if flag.name == "model" else flag.option
        assert f"\n  {option}" in section, option
        assert " ".join(flag.description.split()) in " ".join(section.split()), option


def test_usage_and_version(capsys):
    assert cli.main([]) == 0
    usage = capsys.readouterr().out
    assert all(f"\n  {name} " in usage for name in cli.COMMANDS)
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"jaxserve {__version__}\n"


def test_the_command_line_is_cheap_to_import():
    program = "import sys, jaxserve.cli; sys.exit('jax' in sys.modules or 'numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=False).returncode == 0


def test_doctor(capsys):
    assert cli.main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["versions"]["jaxserve"] == __version__
    assert report["devices"][0]["platform"] == "cpu"
    assert report["attention"]["SmolLM2-135M"]["chosen"] == IN_C
    assert report["matmul"]["a few tokens"]["chosen"] == IN_C

    assert cli.main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert f"SmolLM2-135M: {IN_C}" in text and f"a few tokens: {IN_C}" in text
    assert report["versions"]["jax"] in text


def test_doctor_says_why_an_implementation_is_refused(capsys, monkeypatch):
    def attention():
        return {"Tiny": {"chosen": "xla", "refused": {"tpu": "this is not a TPU"}}}

    monkeypatch.setattr(doctor, "_attention", attention)
    assert cli.main(["doctor"]) == 0
    assert "tpu refused: this is not a TPU" in capsys.readouterr().out


def test_doctor_reports_a_platform_that_cannot_start(capsys, monkeypatch):
    def devices():
        raise RuntimeError("Unable to initialize\nbackend 'tpu'")

    monkeypatch.setattr(doctor, "_devices", devices)
    assert cli.main(["doctor"]) == 1
    assert "problem      JAX cannot start: Unable to initialize backend 'tpu'" in (
        capsys.readouterr().out
    )


def test_doctor_notices_an_unused_accelerator(tmp_path, monkeypatch):
    monkeypatch.setattr(doctor, "_ACCELERATORS", {str(tmp_path): "cuda12"})
    assert "jaxserve[cuda12]" in str(doctor.make_report()["hint"])
    monkeypatch.setattr(doctor, "_ACCELERATORS", {str(tmp_path / "no"): "cuda12"})
    assert doctor.make_report()["hint"] is None


@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_a_closed_pipe_is_no_traceback(unbuffered):
    read_fd, write_fd = os.pipe()
    os.close(read_fd)
    with os.fdopen(write_fd) as closed:
        done = subprocess.run(
            [sys.executable, "-m", "jaxserve", "--help"],
            cwd=ROOT,
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stdout=closed,
            stderr=subprocess.PIPE,
            check=False,
        )
    assert (done.returncode, done.stderr) == (1, b"")
