"""Parsers and help pages generated from the dataclasses of commands; imports no torch."""

import re
from argparse import Action, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import fields
from inspect import cleandoc
from typing import Any, get_args, get_origin, get_type_hints

import jsonargparse

from lightning_rob.commands.configs import CONFIGS, CommandConfig
from lightning_rob.commands.specs import short

# Options of all commands that are read here and there before a parser sees them.
SHARED = re.compile(r"-c|--(config|ckpt_path|allow-import|trainer\.callbacks\+|model\b.*)")


class Formatter(RawDescriptionHelpFormatter):
    """Keeps the lines of the description; options show their default, but no metavar."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=19, width=86)

    def _format_action_invocation(self, action: Action) -> str:
        return next(iter(action.option_strings), action.dest)

    def _get_help_string(self, action: Action) -> str:
        default = "" if action.default in (None, False, "") else f" ({short(action.default)})"
        return f"{action.help}{default}"


def build_parser(command: str) -> jsonargparse.ArgumentParser:
    """Build the parser of a command's own options."""
    config = CONFIGS[command]
    parser = jsonargparse.ArgumentParser(
        usage=f"lightning-rob {command} {config.usage}",
        description=cleandoc(config.__doc__ or "").partition("\n\nArgs:")[0],
        formatter_class=Formatter,
        exit_on_error=False,
        add_help=False,
    )
    parser.add_class_arguments(config, as_group=False, skip=set(positional(config)))
    for name in positional(config):
        described = re.search(rf"^ +{name}: (.*)$", config.__doc__ or "", re.M)
        kind = get_args(get_type_hints(config)[name])[0]
        parser.add_argument(name, nargs="*", type=kind, help=described[1] if described else "")
    return parser


def positional(config: type[CommandConfig]) -> list[str]:
    """Return the name of the field that takes all arguments without a name, if there is one."""
    return [fields(config)[0].name] if config.receives == "records" else []


def parse_records(command: str, args: Sequence[str]) -> Any:
    """Return the options of a command that reads records.

    Raises:
        ValueError: the command line has no meaning.
    """
    config = CONFIGS[command]
    try:
        parsed = build_parser(command).parse_args(join_values(args, config))
    except jsonargparse.ArgumentError as error:
        raise ValueError(f"{error}; try --help") from error
    options = {field.name: parsed[field.name] for field in fields(config)}
    return config(**options | {name: tuple(options[name]) for name in positional(config)})


def option_types(config: type[CommandConfig]) -> dict[str, Any]:
    """Return the type of each option of a command."""
    kinds = get_type_hints(config)
    return {f"--{field.name}": kinds[field.name] for field in fields(config)}


def join_values(args: Sequence[str], config: type[CommandConfig] | None = None) -> list[str]:
    """Write `--name VALUE` as `--name=VALUE`, for `SHARED` options and those of a command.

    So the value may begin with a minus sign. A command's `--flag` becomes `--flag=true`,
    `--name VALUE` of a list becomes `--name+=VALUE`, and `--two-words` becomes `--two_words`.
    """
    kinds = option_types(config) if config else {}
    joined, rest = [], list(args)
    while rest:
        arg = rest.pop(0)
        name, equals, value = arg.partition("=")
        if (spelled := "--" + name[2:].replace("-", "_")) in kinds:
            name, arg = spelled, spelled + equals + value
        kind = kinds.get(name)
        follows = bool(rest) and not rest[0].startswith("--")
        own, is_flag = name in kinds or SHARED.fullmatch(name), kind is bool
        if not own or not (equals or follows or is_flag):
            joined.append(arg)
            continue
        if is_flag and not equals:
            value = rest.pop(0) if follows and rest[0] in ("true", "false") else "true"
        elif not equals:
            value = rest.pop(0)
        joined.append(f"{name}{'+' if allows(kind, list) else ''}={value}")
    return joined


def allows(kind: Any, wanted: type) -> bool:
    """Return whether an option's type is the wanted one, or a union with it."""
    return any(wanted in (part, get_origin(part)) for part in (kind, *get_args(kind)))
