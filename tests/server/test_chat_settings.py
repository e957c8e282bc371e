"""The operator's flags about chats: what they come to, and mistakes in two lines."""

from pathlib import Path

import pytest

from jaxserve import checkpoint
from jaxserve.config import ChatConfig
from jaxserve.errors import UserError
from jaxserve.server.chat_settings import make_chat_settings
from jaxserve.server.reasoning import REASONING_PARSERS
from jaxserve.server.tools import TOOL_PARSERS
from tests.fakes_engine import byte_level_tokenizer

GPT_OSS = "{{ messages }}<|channel|><|message|>"


def tokenizer(template: str = "{{ messages }}{% if shout %}!{% endif %}"):
    return byte_level_tokenizer().with_chat_template(template, "test")


def test_defaults() -> None:
    settings = make_chat_settings(ChatConfig(), tokenizer())
    assert settings.tool_parser == "" and settings.tool_format is None
    assert settings.reasoning_format is None
    assert settings.template_kwargs == {}


@pytest.mark.parametrize("name", TOOL_PARSERS)
def test_every_tool_parser_by_name(name: str) -> None:
    settings = make_chat_settings(ChatConfig(tool_call_parser=name), tokenizer())
    assert settings.tool_parser == name
    assert settings.tool_format is TOOL_PARSERS[name]


@pytest.mark.parametrize("name", REASONING_PARSERS)
def test_every_reasoning_parser_by_name(name: str) -> None:
    settings = make_chat_settings(ChatConfig(reasoning_parser=name), tokenizer())
    assert settings.reasoning_format is REASONING_PARSERS[name]


def test_told_from_the_template() -> None:
    qwen = tokenizer("{{ messages }}<tool_call></tool_call><think></think>")
    settings = make_chat_settings(ChatConfig(reasoning_parser="auto"), qwen)
    assert settings.tool_parser == "hermes"
    assert settings.reasoning_format is REASONING_PARSERS["qwen3"]
    assert make_chat_settings(ChatConfig(), qwen).reasoning_format is None
    nothing = make_chat_settings(ChatConfig(reasoning_parser="auto"), tokenizer())
    assert nothing.reasoning_format is None


def test_gpt_oss_is_always_read() -> None:
    settings = make_chat_settings(ChatConfig(), tokenizer(GPT_OSS))
    assert settings.tool_parser == "openai"
    assert settings.reasoning_format is REASONING_PARSERS["openai_gptoss"]


@pytest.mark.parametrize(
    ("config", "problem"),
    (
        (ChatConfig(tool_call_parser="x"), "--tool-call-parser x"),
        (ChatConfig(reasoning_parser="x"), "--reasoning-parser x"),
        (ChatConfig(default_chat_template_kwargs="{"), "--default-chat-template-kwargs {"),
        (ChatConfig(default_chat_template_kwargs="[1]"), "no JSON object"),
        (ChatConfig(default_chat_template_kwargs='{"whisper": 1}'), "a variable whisper"),
    ),
)
def test_mistakes(config: ChatConfig, problem: str) -> None:
    with pytest.raises(UserError) as caught:
        make_chat_settings(config, tokenizer())
    assert problem in caught.value.problem
    assert caught.value.fix


def test_default_template_kwargs() -> None:
    config = ChatConfig(default_chat_template_kwargs='{"shout": true}')
    assert make_chat_settings(config, tokenizer()).template_kwargs == {"shout": True}


def test_a_template_of_the_operator(demo_model_path: Path, tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages[0].role }}é", encoding="utf-8")
    messages = [{"role": "user", "content": "x"}]
    for given, text in ((str(file), "useré"), ("{{ messages[0].content }}", "x")):
        own = checkpoint.load_tokenizer(demo_model_path, given)
        assert own.apply_chat_template(messages, add_generation_prompt=True) == text
    for bad, problem in (("nowhere.jinja", "cannot be read"), ("{% if %}", "not valid")):
        with pytest.raises(UserError, match=problem) as caught:
            checkpoint.load_tokenizer(demo_model_path, bad)
        assert "--chat-template" in caught.value.problem
