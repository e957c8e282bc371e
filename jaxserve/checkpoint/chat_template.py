"""Chat templates: Jinja in a sandbox, with what Hugging Face templates expect to find there.

Rendered with jinja2 itself: importing transformers for the same costs a second of every start.
"""

import datetime
import functools
import json
from collections.abc import Mapping
from typing import Any, NoReturn

import jinja2
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxserve.errors import RequestError, UserError

# What a template's own text can raise: its language, its operators on the request's values.
_REFUSALS = (
    jinja2.TemplateError,
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    TypeError,
    ValueError,
)


class ChatTemplate:
    """One compiled template.

    variables: names that it reads and does not set itself; what a request sets beside them would
      do nothing.

    Raises:
      UserError: the template is not valid Jinja; `source` says where it comes from.
    """

    def __init__(self, text: str, source: str):
        self.text = text
        environment = _environment()
        try:
            self._template = environment.from_string(text)
            undeclared = meta.find_undeclared_variables(environment.parse(text))
        except (jinja2.TemplateError, RecursionError) as e:
            raise UserError(f"{source} is not valid: {e}.", fix="Mend the chat template.") from e
        self.variables = frozenset(undeclared) - set(environment.globals)

    def check_takes(self, names: Mapping[str, str]) -> None:
        """Raises RequestError when the template does not read one of the variables.

        names: each variable, and the field of the request that sets it.
        """
        for name, param in names.items():
            if name not in self.variables:
                raise RequestError(
                    f"{param} has no effect: the chat template has no variable {name[:100]!r}.",
                    param=param,
                )

    def render(self, variables: Mapping[str, Any]) -> str:
        """Raises RequestError when the template refuses the variables (roles, content types)."""
        try:
            return self._template.render(variables)
        except SecurityError as e:
            raise RequestError(
                f"The chat template does something unsafe: {e}", param="chat_template"
            ) from e
        except _REFUSALS as e:
            raise RequestError(
                f"The chat template does not accept these messages: {e}", param="messages"
            ) from e


class _Generation(Extension):
    """`{% generation %}...{% endgeneration %}` marks what a model writes; it renders its body."""

    tags = {"generation"}  # noqa: RUF012  (jinja2 declares it so)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Unlike Jinja's own filter it escapes no HTML and keeps the order of keys."""
    return json.dumps(
        value,
        ensure_ascii=ensure_ascii,
        indent=indent,
        separators=separators,
        sort_keys=sort_keys,
    )


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)
