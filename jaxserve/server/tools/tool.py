"""A function that the model may call, as the client describes it."""

from typing import Any

import msgspec


class FunctionTool(msgspec.Struct, frozen=True):
    """parameters: the JSON schema of the arguments, an object; None: it takes no arguments."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None

    def arguments_schema(self) -> dict[str, Any]:
        """A schema that only objects fulfil."""
        if self.parameters is None:
            return {"type": "object", "properties": {}, "additionalProperties": False}
        return {**self.parameters, "type": "object"}
