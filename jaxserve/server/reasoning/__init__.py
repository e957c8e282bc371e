"""Reasoning in the model's text, before its answer: a pure parser for each format."""

from typing import Final

from jaxserve.server.reasoning import gpt_oss, granite, think
from jaxserve.server.reasoning.answer import AnswerParser, make_answer_parser
from jaxserve.server.reasoning.format import ReasoningFormat, ReasoningParser
from jaxserve.server.tools.events import ContentDelta, ReasoningDelta

# By the names of --reasoning-parser. Called with the end of the prompt, each makes a parser.
REASONING_PARSERS: Final[dict[str, ReasoningFormat]] = {
    "deepseek_r1": think.DEEPSEEK_R1,
    "deepseek_v3": think.QWEN3,
    "granite": granite.FORMAT,
    "mistral": think.MISTRAL,
    "olmo3": think.DEEPSEEK_R1,
    "openai_gptoss": gpt_oss.FORMAT,
    "qwen3": think.QWEN3,
}


def detect_reasoning_parser(chat_template: str) -> str | None:
    """The name of the format that the template writes, in REASONING_PARSERS."""
    if "<|channel|>" in chat_template and "<|message|>" in chat_template:
        return "openai_gptoss"
    if "[THINK]" in chat_template:
        return "mistral"
    if "thought process" in chat_template and "<|start_of_role|>" in chat_template:
        return "granite"
    if "</think>" in chat_template:
        return "deepseek_r1" if "\uff5cAssistant\uff5c><think>" in chat_template else "qwen3"
    return None


__all__ = [
    "REASONING_PARSERS",
    "AnswerParser",
    "ContentDelta",
    "ReasoningDelta",
    "ReasoningFormat",
    "ReasoningParser",
    "detect_reasoning_parser",
    "make_answer_parser",
]
