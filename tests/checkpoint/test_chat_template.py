"""Chat templates: what they may use, what they may not, and how refusals reach the client."""

import datetime
from typing import Any

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from jaxserve.checkpoint.chat_template import ChatTemplate
from jaxserve.checkpoint.tokenizer import Tokenizer
from jaxserve.errors import RequestError, UserError

USER = [{"role": "user", "content": "hi"}]


def make_tokenizer(**templates: str) -> Tokenizer:
    backend = Backend(BPE())
    backend.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    return Tokenizer(backend, special_tokens=special, chat_templates=templates, source="x")


def render(template: str, **variables: Any) -> str:
    return ChatTemplate(template, "x").render(variables)


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ v | tojson }}", '{"b": "<é>", "a": [1, null]}'),
        ("{{ v | tojson(indent=1) }}", '{\n "b": "<é>",\n "a": [\n  1,\n  null\n ]\n}'),
        ("{{ v | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":[1,null],"b":"<é>"}'),
        ("{{ v | tojson(ensure_ascii=true) }}", '{"b": "<\\u00e9>", "a": [1, null]}'),
        ("{% for i in [1, 2, 3] %}{% if i == 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "1"),
        ("{% for i in [1, 2] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "2"),
        ("a{% generation %}{{ v['b'] }}{% endgeneration %}c", "a<é>c"),
        ("  {% if v %}\n  x\n  {% endif %}\ny", "  x\ny"),
        (
            "{% set ns = namespace(n=0) %}"
            "{% for i in [1, 2] %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}",
            "3",
        ),
        ("{{ missing }}{{ missing is defined }}", "False"),
    ],
)
def test_language(template: str, expected: str) -> None:
    assert render(template, v={"b": "<é>", "a": [1, None]}) == expected


def test_date() -> None:
    before = datetime.datetime.now().strftime("%d %b %Y")
    assert render("{{ strftime_now('%d %b %Y') }}") in (
        before,
        datetime.datetime.now().strftime("%d %b %Y"),
    )


@pytest.mark.parametrize(
    ("template", "param"),
    [
        ("{{ raise_exception('roles must alternate') }}", "messages"),
        ("{{ 'a' + 1 }}", "messages"),
        ("{{ missing.attribute }}", "messages"),
        ("{{ v.append(1) }}", "chat_template"),
        ("{{ ''.__class__.__mro__ }}", "chat_template"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "messages"),
        ("{{ 1 / v | length }}", "messages"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "messages"),
    ],
)
def test_refusals_are_the_requests_fault(template: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        render(template, v=[])
    assert (caught.value.param, caught.value.status) == (param, 400)


def test_reason_reaches_the_client() -> None:
    with pytest.raises(RequestError, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_variables() -> None:
    tokenizer = make_tokenizer(
        default="{{ bos_token }}{{ messages[0].content }}{{ eos_token }}{{ extra }}"
        "{{ add_generation_prompt }}{{ tools }}"
    )
    text = tokenizer.apply_chat_template(USER, add_generation_prompt=True, extra="E")
    assert text == "<s>hi</s>ETrueNone"
    text = tokenizer.apply_chat_template(
        USER, add_generation_prompt=False, tools=[{"a": 1}], bos_token="B"
    )
    assert text == "Bhi</s>False[{'a': 1}]"


def test_another_template() -> None:
    tokenizer = make_tokenizer(default="D", tool_use="T")
    other = tokenizer.with_chat_template("{{ messages[0].role }}", "--chat-template")
    for tools in (None, [{}]):
        assert other.apply_chat_template(USER, add_generation_prompt=True, tools=tools) == "user"
    assert tokenizer.apply_chat_template(USER, add_generation_prompt=True) == "D"
    with pytest.raises(UserError, match=r"--chat-template is not valid"):
        tokenizer.with_chat_template("{% if %}", "--chat-template")


def test_what_a_template_reads() -> None:
    template = ChatTemplate(
        "{% if not tools is defined %}{% set tools = none %}{% endif %}"
        "{% for m in messages %}{{ strftime_now('%d') ~ m.role }}{% endfor %}"
        "{% macro f(own) %}{{ own ~ shout }}{% endmacro %}",
        "x",
    )
    assert template.variables == {"tools", "messages", "shout"}
    template.check_takes({"tools": "tools", "shout": "kwargs.shout"})
    with pytest.raises(RequestError, match=r"kwargs\.own has no effect") as caught:
        template.check_takes({"own": "kwargs.own"})
    assert caught.value.param == "kwargs.own"


def test_no_template() -> None:
    with pytest.raises(RequestError, match="has no chat template") as caught:
        make_tokenizer().apply_chat_template(USER, add_generation_prompt=True)
    assert caught.value.param == "messages"


def test_invalid_template_is_the_operators_fault() -> None:
    with pytest.raises(UserError, match=r"x: chat template 'default' is not valid"):
        make_tokenizer(default="{{ unclosed")
