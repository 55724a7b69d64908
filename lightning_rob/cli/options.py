"""Options of commands: parsers and help pages generated from dataclasses; imports no torch."""

import re
from argparse import Action, RawDescriptionHelpFormatter
from collections.abc import Sequence
from dataclasses import dataclass, fields
from inspect import cleandoc
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import jsonargparse
import yaml

from lightning_rob.cli.configs import config_file, is_inline, read_config
from lightning_rob.cli.errors import shorten_jsonargparse_error
from lightning_rob.cli.spelling import refuse_misspelt, refuse_unknown
from lightning_rob.commands.configs import CONFIGS, CommandConfig
from lightning_rob.commands.specs import short
from lightning_rob.recipes.safe_yaml import load, parse_fraction_arg, plain_yaml
from lightning_rob.recipes.shipped import find_recipe
from lightning_rob.recipes.trust import OPTION
from lightning_rob.runtime.errors import InputError


@dataclass
class RunOptions:
    """Options of a run beside those of Lightning.

    Args:
        test_after_fit: Test the trained model after fit and print the table: the best checkpoint,
            if a checkpoint callback monitors a metric.
        rank_timeout: Seconds after which a rank that others wait for counts as hung, and the run
            ends; longer than one rank may attack after another. Default: the strategy's.
        fail_under: Exit with code 1 if an accuracy is below: robust/worst=0.40,robust/arc=0.35.
    """

    test_after_fit: bool = False
    rank_timeout: jsonargparse.typing.PositiveFloat | None = None
    fail_under: str | None = None


OF_RUN = {  # options of `fit`, `test` and others that have no dots
    *("config", "print_config", "help", "seed_everything", "ckpt_path", "verbose"),
    *("weights_only", "return_predictions", OPTION.removeprefix("--")),
    *(field.name for field in fields(RunOptions)),
}
WITHOUT_VALUE = re.compile(r"-h|--help|--print_config")


class Formatter(RawDescriptionHelpFormatter):
    """Keeps the lines of the description; options show their default, but no metavar."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=19, width=86)

    def _format_action_invocation(self, action: Action) -> str:
        return next(iter(action.option_strings), action.dest)

    def _get_help_string(self, action: Action) -> str:
        default = "" if action.default in (None, False, "") else f" ({short(action.default)})"
        return f"{action.help}{default}"


class OptionParser(jsonargparse.ArgumentParser):
    """Parser of options without classes, which reports an error in one line."""

    def error(self, message: str, ex: Exception | None = None) -> NoReturn:
        """Raise InputError with the innermost reason first."""
        raise InputError(shorten_jsonargparse_error(message)) from ex


def build_parser(command: str) -> OptionParser:
    """Build the parser of a command's own options."""
    config = CONFIGS[command]
    parser = OptionParser(
        usage=f"lightning-rob {command} {config.usage}",
        description=cleandoc(config.__doc__ or "").partition("\n\nArgs:")[0],
        formatter_class=Formatter,
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


def read_command_line(command: str, *args: str) -> list[str]:
    """Return the command line of a command that needs torch, with joined values.

    An argument without a name is the checkpoint: `--ckpt_path`, or `--run` of `monitor`.

    Raises:
        InputError: the command line has no meaning.
    """
    config = CONFIGS.get(command)
    read = join_values(args, config)
    own = own_names(config) if config else []
    unnamed = [arg for arg in read if not arg.startswith("-")]
    if unnamed and (len(unnamed) > 1 or command in ("tune", "bpda")):
        raise InputError(f"{command} takes {unnamed[-1]!r} only as the value of an option")
    if unnamed and find_recipe(unnamed[0]) and not Path(unnamed[0]).exists():
        raise InputError(f"{unnamed[0]} is a recipe: --config {unnamed[0]}")
    name = "run" if "run" in own else "ckpt_path"
    if name == "run" and any(re.match(r"--ckpt_path(=|$)", arg) for arg in read):
        raise InputError(f"{command} takes the checkpoints of its run: leave out --ckpt_path")
    read = [arg if arg.startswith("-") else f"--{name}={arg}" for arg in read]
    try:
        refuse_unknown(read, [*OF_RUN, *own, "model", "data", "trainer"])
        if config and not any(asks_for_page(arg) for arg in read):
            parse_options(command, read)
        refuse_misspelt(read, [*OF_RUN, *own])
    except (ValueError, ModuleNotFoundError, yaml.YAMLError) as error:
        raise InputError(str(error)) from error
    return [command, *read]


def asks_for_page(arg: str) -> bool:
    """Whether an argument asks for help or the configuration, in place of a run."""
    return bool(re.match(r"--(print_config|([\w.]+\.)?help)\b", arg))


def parse_records(command: str, args: Sequence[str]) -> Any:
    """Return the options of a command that reads records.

    Raises:
        InputError: the command line has no meaning.
        ValueError: an option has no meaning.
    """
    config = CONFIGS[command]
    args = join_values(args, config)
    refuse_unknown(args, own_names(config))
    parsed = build_parser(command).parse_args(args)
    options = {field.name: parsed[field.name] for field in fields(config)}
    return config(**options | {name: tuple(options[name]) for name in positional(config)})


def parse_options(command: str, args: Sequence[str]) -> Any:
    """Return a command's own options, of the command line and of its configuration files.

    Args:
        command: the command.
        args: its command line with joined values; options of other parsers are ignored.

    Raises:
        InputError: the command line has no meaning.
        ValueError: an option has no meaning.
    """
    kinds = option_types(CONFIGS[command])
    own = [a for a in args if config_file(a) or a.partition("=")[0].rstrip("+") in kinds]
    return parse(build_parser(command), command, own)[0]


def parse(
    parser: jsonargparse.ArgumentParser, command: str, args: Sequence[str], *keys: str
) -> tuple[Any, Any]:
    """Return a command's options and all that was parsed.

    Args:
        parser: parser of the command's options, and others.
        command: the command.
        args: its command line with joined values.
        *keys: keys of recipes that are parsed beside the command's options.
    """
    config, kinds = CONFIGS[command], option_types(CONFIGS[command])
    files: Any = jsonargparse.ActionConfigFile  # type: ignore[attr-defined]
    parser.add_argument("--config", "-c", action=files, help="A recipe.")
    spelled = []
    for arg in args:
        if path := config_file(arg):
            recipe = load(path) if is_inline(path) else read_config(path)
            part = {k: v for k, v in recipe.items() if k in (*keys, *own_names(config))}
            arg = f"--config={yaml.safe_dump(config.from_recipe(recipe) | part)}"
        is_text = allows(kinds.get(arg.partition("=")[0].rstrip("+")), str)
        spelled.append(arg if is_text else parse_fraction_arg(arg))
    with plain_yaml():
        parsed = parser.parse_args(spelled)
    return config(**{name: parsed[name] for name in own_names(config)}), parsed


def own_names(config: type[CommandConfig]) -> list[str]:
    """Return the names of a command's own options."""
    return [field.name for field in fields(config)]


def option_types(config: type[CommandConfig]) -> dict[str, Any]:
    """Return the type of each option of a command."""
    kinds = get_type_hints(config)
    return {f"--{field.name}": kinds[field.name] for field in fields(config)}


def join_values(args: Sequence[str], config: type[CommandConfig] | None = None) -> list[str]:
    """Write every `--name VALUE` as `--name=VALUE`.

    So the value may begin with a minus sign. A command's `--flag` becomes `--flag=true`,
    `--name VALUE` of a list becomes `--name+=VALUE`, and `--two-words` becomes `--two_words`.
    """
    kinds = option_types(config) if config else {}
    joined, rest = [], list(args)
    while rest:
        name, equals, value = rest.pop(0).partition("=")
        if name != OPTION and re.fullmatch(r"--[\w-]+", name):
            name = "--" + name[2:].replace("-", "_")
        kind = kinds.get(name)
        follows = bool(rest) and not rest[0].startswith("--")
        if kind is bool and not equals:
            equals, value = "=", rest.pop(0) if rest and rest[0] in ("true", "false") else "true"
        elif name.startswith("-") and not equals and follows and not WITHOUT_VALUE.fullmatch(name):
            equals, value = "=", rest.pop(0)
        plus = "+" if equals and allows(kind, list) else ""
        joined.append(f"{name}{plus}{equals}{value}")
    return joined


def allows(kind: Any, wanted: type) -> bool:
    """Return whether an option's type is the wanted one, or a union with it."""
    return any(wanted in (part, get_origin(part)) for part in (kind, *get_args(kind)))
