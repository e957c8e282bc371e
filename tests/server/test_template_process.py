"""Templates of requests: what they may cost, and that nothing of it is the server's."""

import os
import threading
import time
from collections.abc import Iterator
from contextlib import closing

import pytest

from jaxserve.errors import RequestError
from jaxserve.server.template_process import TemplateProcess

LOOPS = "{% for i in range(99999) %}" * 4 + "{% endfor %}" * 4


@pytest.fixture
def process() -> Iterator[TemplateProcess]:
    with closing(TemplateProcess(timeout_s=20.0)) as process:
        yield process


def refusal(process: TemplateProcess, template: str, **variables: object) -> str:
    with pytest.raises(RequestError) as caught:
        process.render(template, variables, {})
    assert caught.value.status == 400
    assert len(caught.value.message) < 400
    return f"{caught.value.param}: {caught.value.message}"


def test_one_process_renders_all(process: TemplateProcess) -> None:
    assert process._popen is None, "it starts when it is needed"
    pids = set()
    for text in ("x", "é😀", "\n" * 100_000):
        assert process.render("{{ m.a }}!", {"m": {"a": text}}, {"m": "messages"}) == f"{text}!"
        assert process._popen is not None
        pids.add(process._popen.pid)
    assert len(pids) == 1


def test_refusals(process: TemplateProcess) -> None:
    assert "not valid" in refusal(process, "{% if %}")
    assert refusal(process, "{{ raise_exception('no') }}").startswith("messages: ")
    assert refusal(process, "{{ ''.__class__.__mro__ }}").startswith("chat_template: ")
    assert "too long" in refusal(process, "{{ 'x' * 40000000 }}")
    assert "MemoryError" in refusal(process, "{{ 'x' * (2 * 10 ** 9) }}")
    with pytest.raises(RequestError, match=r"f\.x has no effect") as caught:
        process.render("{{ y }}", {"x": 1}, {"x": "f.x"})
    assert caught.value.param == "f.x"
    assert process.render("{{ x }}", {"x": 1}, {}) == "1"


@pytest.mark.parametrize(
    "template",
    (LOOPS, "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}"
     "{% endfor %}{{ n.x }}", "{{ (9 ** 9) ** (9 ** 9) }}"),
)  # fmt: skip
def test_what_never_ends_is_ended(process: TemplateProcess, template: str) -> None:
    process._timeout_s = 1.0
    begin_s = time.monotonic()
    assert refusal(process, template).startswith("chat_template: ")
    assert time.monotonic() - begin_s < 5
    process._timeout_s = 20.0
    assert process.render("{{ x }}", {"x": 1}, {}) == "1", "there is a new process"


def test_closing_ends_a_running_template() -> None:
    process = TemplateProcess(timeout_s=60.0)
    errors: list[str] = []
    thread = threading.Thread(target=lambda: errors.append(refusal(process, LOOPS)))
    thread.start()
    while process._popen is None:
        time.sleep(0.01)
    pid = process._popen.pid
    time.sleep(0.3)
    process.close()
    thread.join(5)
    assert not thread.is_alive() and errors
    with pytest.raises(RequestError, match="shutting down"):
        process.render("{{ x }}", {}, {})
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
