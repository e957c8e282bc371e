"""The parser of an answer whose whole text is content."""

from collections.abc import Sequence

from jaxserve.server.choice_parser import Delta


class PlainParser:
    """Has what a ChoiceParser has, for routes that have one way to write both."""

    num_reasoning_tokens = 0
    has_tool_calls = False

    def feed(self, text: str, token_ids: Sequence[int]) -> Delta:
        """The text."""
        return Delta(text)

    def finish(self) -> Delta:
        """Nothing."""
        return Delta()
