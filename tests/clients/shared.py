"""The server that all clients use, and what their tests say to it."""

import importlib.util
import sys
from typing import Literal

from pydantic import BaseModel, Field

from tests.e2e.live_server import ROOT

MODEL = "smollm2-135m"

# Clients have a venv without jax; the server then runs in the other one.
HAS_JAX = importlib.util.find_spec("jax") is not None
PYTHON = sys.executable if HAS_JAX else str(ROOT / ".venv" / "bin" / "python")

CONTEXT = "--max-model-len=1024"
# The demo model's own chat template has no place for tools.
TEMPLATE = ROOT / "tests" / "clients" / "chat_with_tools.jinja"
FLAGS = (
    "--num-kv-blocks=256",
    "--max-num-seqs=8",
    "--max-num-batched-tokens=64",
    "--dtype=float32",
    f"--chat-template={TEMPLATE}",
    "--tool-call-parser=hermes",
)

QUESTION = [{"role": "user", "content": "What is the capital of France?"}]
CITIES = ["Paris", "Oslo", "Rome"]


# Every value is bounded, so that a small model always comes to an end.
class Trip(BaseModel):
    """A trip to a city."""

    city: Literal["Paris", "Oslo", "Rome"]
    days: int = Field(ge=1, le=9)


class Stay(BaseModel):
    """The same without bounds on a number: the anthropic SDK only describes those to the model."""

    city: Literal["Paris", "Oslo", "Rome"]
    nights: Literal[1, 2, 3]


WEATHER_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}, "celsius": {"type": "boolean"}},
    "required": ["city", "celsius"],
    "additionalProperties": False,
}
TIME_SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": CITIES}},
    "required": ["city"],
    "additionalProperties": False,
}


def is_weather(arguments: object) -> bool:
    """Whether these are arguments that WEATHER_SCHEMA allows."""
    return (
        isinstance(arguments, dict)
        and set(arguments) == {"city", "celsius"}
        and arguments["city"] in CITIES
        and isinstance(arguments["celsius"], bool)
    )


def is_time(arguments: object) -> bool:
    """Whether these are arguments that TIME_SCHEMA allows."""
    return (
        isinstance(arguments, dict) and set(arguments) == {"city"} and arguments["city"] in CITIES
    )
