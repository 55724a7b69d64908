"""The command line as it is read before torch is imported: names replaced, options parsed."""

import os
import re
from argparse import Action, RawDescriptionHelpFormatter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from inspect import cleandoc
from pathlib import Path
from typing import Any, NoReturn, get_args, get_origin, get_type_hints

import jsonargparse

from lightning_rob.cli.errors import shorten_jsonargparse_error
from lightning_rob.cli.spelling import PARTS, check_class, check_option
from lightning_rob.commands.config import CommandConfig, config_of
from lightning_rob.commands.specs import short
from lightning_rob.recipes.plugins import expand
from lightning_rob.recipes.safe_yaml import (
    load,
    load_file,
    one_line,
    parse_fraction_arg,
    reading_recipes,
)
from lightning_rob.recipes.shipped import find_checkpoint, find_recipe, shipped_folder
from lightning_rob.recipes.trust import OPTION, VARIABLE
from lightning_rob.runtime.errors import InputError, nearest
from lightning_rob.runtime.files import is_file

NAMED = ("best", "last", "hpc", "null", "")  # checkpoints that are no files
CONFIG = ("--config", "-c")
WITHOUT_VALUE = re.compile(r"-h|--help|--print_config")


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


OF_METHODS = ("ckpt_path", "verbose", "weights_only", "return_predictions")  # of `Trainer.test` …
OF_RUN = {  # options without a dot, of `fit`, `test` and other commands
    *("config", "print_config", "help", "seed_everything", OPTION.removeprefix("--")),
    *OF_METHODS,
    *(option.name for option in fields(RunOptions)),
}


@dataclass(frozen=True)
class CommandLine:
    """A command line whose names exist."""

    command: str
    given: tuple[str, ...]  # arguments as they were given
    args: list[str]  # of the run: joined values, files for short names, callbacks for plug-ins
    parts: list[dict[str, Any]]  # for each of `args` the content of its configuration file
    allowed: list[str]  # prefixes of `--allow-import`
    options: Any = None  # the command's own; None for those of Lightning, and for a page

    @property
    def checkpoint(self) -> str | None:
        given = [arg for arg in self.args if arg.startswith("--ckpt_path=")]
        return given[-1].partition("=")[2] if given else None


def read_command_line(command: str, *args: str) -> CommandLine:
    """Read the command line of a command that needs torch.

    An argument without a name is the checkpoint: `--ckpt_path`, or `--run` of `monitor`.
    """
    config = config_of(command)
    kinds = option_types(config) if config else {}
    name = config.positional if config else "ckpt_path"
    joined = join_values(args, kinds)
    unnamed = [arg for arg in joined if not arg.startswith("-")]
    if unnamed and (len(unnamed) > 1 or not name):
        raise InputError(f"{command} takes {unnamed[-1]!r} only as the value of an option")
    if unnamed and find_recipe(unnamed[0]) and not Path(unnamed[0]).exists():
        raise InputError(f"{unnamed[0]} is a recipe: --config {unnamed[0]}")
    joined = [arg if arg.startswith("-") else f"--{name}={arg}" for arg in joined]
    # Imports are allowed here, before any recipe is read.
    allowed = [arg.partition("=")[2] for arg in joined if arg.partition("=")[0] == OPTION]
    joined = [arg for arg in joined if arg.partition("=")[0] != OPTION]
    known = {*OF_RUN, *PARTS}
    refuse_unknown(joined, {*known, *(option.removeprefix("--") for option in kinds)})
    # An entry of a mapping, `--transforms.blur=…`, is the option's own.
    own = [arg for arg in joined if re.split(r"[=.+]", arg, maxsplit=1)[0] in kinds]
    read = [_read_argument(arg, known) for arg in joined if arg not in own]
    if not (allowed or os.environ.get(VARIABLE)):  # else any class may be meant
        for arg, _ in read:
            option, _, value = arg.removeprefix("--").partition("=")
            check_option(option, value)
            for callback in load(value) if option == "trainer.callbacks+" else ():
                check_class(str(callback["class_path"]))
    rest, parts = [arg for arg, _ in read], [part for _, part in read]
    options = None
    if config and not any(map(asks_for_page, joined)):
        options = parse_own(command, config, own)
    line = CommandLine(command, args, rest, parts, allowed, options)
    path = line.checkpoint
    if path and name == "run":
        raise InputError(f"{command} takes the checkpoints of its run: leave out --ckpt_path")
    if path is not None and path not in NAMED and not Path(path).exists():
        folder = Path(path).parent
        near = map(str, folder.iterdir()) if folder.is_dir() else ()
        raise InputError(f"there is no checkpoint {path}{nearest(path, near)}")
    return line


def refuse_unknown(args: Sequence[str], known: Iterable[str]) -> None:
    """Refuse the first option that does not exist; `known` are names up to the first dot."""
    options = {f"--{name}" for name in known}
    for arg in args:
        name = arg.partition("=")[0].rstrip("+")
        if arg.startswith("-") and name.partition(".")[0] not in {*options, "-c", "-h"}:
            hint = nearest(name.partition(".")[0], options, "; try --help")
            if name in ("--eps", "--norm"):
                hint = f": that of a plug-in is --trainer.callbacks.{name[2:]}, after the plug-in"
            raise InputError(f"there is no option {name}{hint}")


def _read_argument(arg: str, known: set[str]) -> tuple[str, dict[str, Any]]:
    """Return an argument for the parser, and the content of a configuration file."""
    option, equals, value = arg.partition("=")
    if option == "--trainer.callbacks":
        raise InputError("write --trainer.callbacks+=…: without + it drops those before it")
    if not equals:
        return arg, {}
    if option in CONFIG:
        file = find_recipe(value)
        return f"{option}={file or value}", _read_config(value, file, known)
    if option == "--trainer.callbacks+":
        # A list or mapping; a name stays as it is.
        is_yaml = re.search(r"[\n{[]|: ", value) and not is_file(value)
        content = load(value) if is_yaml else value
        return f"{option}={one_line(expand(content, Path()))}", {}
    if option == "--ckpt_path":
        return f"{option}={find_checkpoint(value)}", {}
    if re.search(r"(root|dir|path|name|version|weights)$", option):
        return arg, {}  # a folder such as 2026/11 is no fraction
    # jsonargparse gives `--trainer.callbacks.eps` to the callback that was added last.
    return parse_fraction_arg(arg), {}


def _read_config(value: str, file: Path | None, known: set[str]) -> dict[str, Any]:
    # A line break, a key or a brace makes it YAML; all else is the name of a file or a recipe.
    if file is None and re.search(r"\n|: |^\s*\{", value):
        content = load(value)
    elif file is None and not Path(value).exists():
        recipes = [path.stem for path in (shipped_folder() / "configs").rglob("*.yaml")]
        hint = nearest(Path(value).stem, recipes, ": lightning-rob recipes lists those by name")
        raise InputError(f"there is no recipe {value}{hint}")
    else:
        content = load_file(file or Path(value), "a configuration file")
    if not isinstance(content, dict):
        start = value if file is None else file.read_text(encoding="utf-8")
        raise InputError(f"{value} must hold keys such as model and trainer, got {start[:40]!r}")
    for key in content:
        if key not in known:
            raise InputError(f"{value:.200}: there is no key {key!r}{nearest(str(key), known)}")
    trainer = content.get("trainer") or {}
    if not isinstance(trainer, dict):
        raise InputError(f"{value}: trainer must hold keys, got {trainer!r:.40}")
    if "callbacks" in trainer:
        raise InputError(
            f"{value}: write `callbacks+:` under `trainer:`; "
            "a plain `callbacks:` silently drops those that came before it"
        )
    return content


def parse_own(command: str, config: type[CommandConfig], args: Sequence[str]) -> Any:
    """Return a command's own options."""
    kinds = option_types(config)
    numbers = []
    for arg in args:
        kind = kinds.get(re.split(r"[=.+]", arg)[0], Path)
        text = allows(kind, str) or allows(kind, Path)  # such as a folder 2026/11
        numbers.append(arg if text else parse_fraction_arg(arg))
    with reading_recipes():
        parsed = build_parser(command, config).parse_args(numbers)
    options = {option.name: parsed[option.name] for option in fields(config)}
    if config.reads_records:
        options[config.positional] = tuple(options[config.positional])
    return config(**options)


def parse_records(command: str, args: Sequence[str]) -> Any:
    """Return the options of a command that reads records."""
    config: Any = config_of(command)
    joined = join_values(args, option_types(config))
    refuse_unknown(joined, (option.name for option in fields(config)))
    return parse_own(command, config, joined)


def asks_for_page(arg: str) -> bool:
    """Return whether an argument asks for help or the configuration, in place of a run."""
    return bool(re.match(r"--(print_config|([\w.]+\.)?help)\b", arg))


def option_types(config: type[CommandConfig]) -> dict[str, Any]:
    """Return the type of each option of a command."""
    kinds = get_type_hints(config)
    return {f"--{option.name}": kinds[option.name] for option in fields(config)}


def join_values(args: Sequence[str], kinds: dict[str, Any]) -> list[str]:
    """Write every `--name VALUE` as `--name=VALUE`, so that the value may begin with a minus sign.

    By `kinds`, the types of the command's own options, `--flag` becomes `--flag=true` and
    `--name VALUE` of a list `--name+=VALUE`; `--two-words` becomes `--two_words`.
    """
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
        raise InputError(shorten_jsonargparse_error(message)) from ex


def build_parser(command: str, config: type[CommandConfig]) -> OptionParser:
    """Build the parser of a command's own options."""
    parser = OptionParser(
        usage=f"lightning-rob {command} {config.usage}",
        description=cleandoc(config.__doc__ or "").partition("\n\nArgs:")[0],
        formatter_class=Formatter,
        add_help=False,
    )
    named = {config.positional} if config.reads_records else set()
    parser.add_class_arguments(config, as_group=False, skip=named)
    for name in named:
        described = re.search(rf"^ +{name}: (.*)$", config.__doc__ or "", re.M)
        kind = get_args(get_type_hints(config)[name])[0]
        parser.add_argument(name, nargs="*", type=kind, help=described[1] if described else "")
    return parser
