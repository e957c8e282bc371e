"""The command `jaxserve`: reads the command line and runs one of its commands."""

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple, NoReturn

from jaxserve import __version__
from jaxserve.cli_flags import Flag, all_flags, closest, config_from_flags
from jaxserve.config import SECTIONS
from jaxserve.errors import UserError
from jaxserve.logs import print_user_error

_HINTS = {"--model": "Give the model without a flag: jaxserve serve MODEL."}


class Command(NamedTuple):
    """One of `jaxserve`'s commands. run: returns the exit code."""

    summary: str
    make_parser: Callable[[], "_Parser"]
    run: Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    """ArgumentParser that raises UserError and knows what a mistyped flag was meant to be."""

    def __init__(self, prog: str, description: str):
        super().__init__(
            prog=prog,
            description=description,
            allow_abbrev=False,
            formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=32),
        )

    def error(self, message: str) -> NoReturn:
        problem = message[:1].upper() + message[1:]
        raise UserError(f"{problem}.", fix=f"'{self.prog} --help' shows how it is used.")

    def parse(self, argv: Sequence[str]) -> argparse.Namespace:
        """Every argument, or a UserError that names the first unknown one."""
        namespace, unknown = self.parse_known_intermixed_args(argv)
        flag = next((arg.partition("=")[0] for arg in unknown if arg.startswith("-")), None)
        if flag is not None:
            match = closest(flag, self._option_string_actions)
            hint = f"Did you mean {match}?" if match else f"'{self.prog} --help' lists them."
            raise UserError(f"{flag} is not a flag of '{self.prog}'.", fix=_HINTS.get(flag, hint))
        if unknown:
            self.error(f"{unknown[0]!r} is one argument too many")
        return namespace


def _add_config_flag(group: argparse._ArgumentGroup, flag: Flag) -> None:
    default = flag.shown_default
    text = flag.description + (f" (default: {default})" if default not in ("", "0") else "")
    if flag.type is bool:
        group.add_argument(
            flag.option,
            dest=flag.name,
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=text,
        )
        return
    metavar = "{" + ",".join(flag.choices) + "}" if flag.choices else _METAVARS[flag.type]
    group.add_argument(
        flag.option,
        dest=flag.name,
        action="append" if flag.type is tuple else "store",
        metavar=metavar,
        default=argparse.SUPPRESS,
        help=text,
    )


_METAVARS = {int: "N", float: "X", str: "TEXT", tuple: "TEXT"}


def _make_serve_parser() -> _Parser:
    parser = _Parser("jaxserve serve", "Serve a model over HTTP, with OpenAI's API.")
    flags = all_flags()
    model = next(flag for flag in flags if flag.name == "model")
    parser.add_argument("model", metavar="MODEL", nargs="?", help=model.description)
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of flags, 'name: value' a line; flags win."
    )
    for section, struct in SECTIONS.items():
        group = parser.add_argument_group(section, (struct.__doc__ or "").partition("\n")[0])
        for flag in flags:
            if flag.section == section and flag is not model:
                _add_config_flag(group, flag)
    return parser


def _serve(args: argparse.Namespace) -> int:
    given = {name: value for name, value in vars(args).items() if value is not None}
    config = config_from_flags(given, given.pop("config", None))
    if not config.model.model:
        raise UserError(
            "jaxserve serve needs a model.", fix="Name one, such as: jaxserve serve smollm2-135m."
        )
    from jaxserve.server.serve import serve

    return serve(config)


def _whole_number(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number, 1 or more")
    return int(text)


def _temperature(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 2")
    return value


def _make_chat_parser() -> _Parser:
    parser = _Parser(
        "jaxserve chat",
        "Talk to a running server. Ctrl-C stops an answer, Ctrl-D leaves. "
        "A question that comes through a pipe is answered once.",
    )
    parser.add_argument(
        "--url", default="http://127.0.0.1:8000", help="the server (default: %(default)s)"
    )
    parser.add_argument("--model", metavar="NAME", help="default: the server's first")
    parser.add_argument("--system", metavar="TEXT", help="what the assistant is told first")
    parser.add_argument("--max-tokens", metavar="N", type=_whole_number, help="longest answer")
    parser.add_argument("--temperature", metavar="X", type=_temperature, help="0: always the same")
    parser.add_argument("--api-key", metavar="TEXT", help="the key that the server asks for")
    return parser


def _chat(args: argparse.Namespace) -> int:
    from jaxserve.chat_client import chat

    return chat(
        args.url,
        model=args.model,
        system=args.system,
        api_key=args.api_key,
        max_tokens=args.max_tokens,
        temperature=args.temperature,
    )


def _make_doctor_parser() -> _Parser:
    parser = _Parser(
        "jaxserve doctor", "Show versions, devices, the attention kernel chosen here, and caches."
    )
    parser.add_argument("--json", action="store_true", help="as one JSON object")
    return parser


def _doctor(args: argparse.Namespace) -> int:
    from jaxserve.doctor import doctor

    return doctor(as_json=args.json)


COMMANDS = {
    "serve": Command("serve a model over HTTP", _make_serve_parser, _serve),
    "chat": Command("talk to a running server", _make_chat_parser, _chat),
    "doctor": Command("show versions, devices and chosen kernels", _make_doctor_parser, _doctor),
}


def _usage() -> str:
    lines = [f"  {name:<8} {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join(
        [
            "usage: jaxserve COMMAND ...",
            "",
            *lines,
            "",
            "'jaxserve COMMAND --help' shows a command's flags; 'jaxserve --version' the version.",
        ]
    )


def _run(argv: Sequence[str]) -> int:
    if not argv or argv[0] in ("-h", "--help"):
        print(_usage())
        return 0
    if argv[0] == "--version":
        print(f"jaxserve {__version__}")
        return 0
    command = COMMANDS.get(argv[0])
    if command is None:
        match = closest(argv[0], [*COMMANDS, "--help", "--version"])
        raise UserError(
            f"jaxserve has no command {argv[0]!r}.",
            fix=f"Did you mean 'jaxserve {match}'?" if match else "'jaxserve --help' lists them.",
        )
    return command.run(command.make_parser().parse(argv[1:]))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit code: 2, and two lines on stderr, for a UserError."""
    try:
        code = _run(sys.argv[1:] if argv is None else argv)
        sys.stdout.flush()
        return code
    except UserError as e:
        print_user_error(e)
        return 2
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:
        # The reader left; nothing must be flushed into the closed pipe at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
