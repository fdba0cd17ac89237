"""Options of commands that plan or run: from the command line and config files to typed values.

The first pass reads only names (target, strategy, accelerator, plugins), so that only the selected
plugins are imported. The second pass is jsonargparse's, with the typed options of the Trainer, of
the target's classes and of the selected plugins.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import pairwise
from typing import Any

import yaml
from jsonargparse import ArgumentError, ArgumentParser, Namespace

from geartrain import Module, Trainer, UsageError
from geartrain.plugin_api import (
    KNOWN,
    Registry,
    nearest,
    user_path,
    write_instead,
)
from geartrain_cli import optimizers
from geartrain_cli.help import options_help, print_titled
from geartrain_cli.plugin_files import file_plugin
from geartrain_cli.target import Target, choose_classes, find_target, import_class

#: Options that may be given several times -> the key that holds their list.
_REPEATED = {"plugin": "plugins", "block": "block", "assume": "assume"}
#: Options that choose the target's classes: ``--model CLASS``, or ``class_path`` in a config file.
_CLASSES = ("model", "data")
#: Trainer's arguments that have another form on the command line.
_SPELT_OTHERWISE = {
    *("accelerator", "strategy", "plugins", "callbacks", "block"),
    *("accelerator_options", "strategy_options", "plugin_options", "assume"),
}
#: Options of other programs -> geartrain's.
_MEANT = {
    **dict.fromkeys(["epochs", "num_epochs", "n_epochs"], "--max-epochs"),
    **dict.fromkeys(["steps", "num_steps", "n_steps"], "--max-steps"),
    **dict.fromkeys(["gpu", "cuda"], "--accelerator gpu"),
    "cpu": "--accelerator cpu",
    "device": "--accelerator NAME or --devices COUNT",
    "output_dir": "--output",
    "resume_from": "--resume",
}
#: Options that only some commands have. A file of --print-config may hold those of another command.
_OF_SOME = {
    *("checkpoint", "resume", "no_output", "json", "hooks", "memory", "assume"),
    # of geartrain tune
    *("min_lr", "max_lr", "num_training", "mode", "early_stop_threshold"),
    *("init_val", "max_trials", "steps_per_trial", "batch_arg_name"),
    *optimizers.OPTIONS,
}


def option_names() -> frozenset[str]:
    """Return the names of all options, with underscores. A plugin must not use one of them."""
    handled = {
        "help",
        "print_config",
        "quiet",
        "traceback",
        "config",
        *_OF_SOME,
        *_REPEATED,
        *_REPEATED.values(),
    }
    return frozenset(handled | set(inspect.signature(Trainer).parameters))


@dataclass
class Names:
    """The result of the first pass."""

    chosen: dict[str, str] = field(default_factory=dict)
    #: "model" or "data" -> the class that ``--model CLASS`` or ``class_path`` names.
    classes: dict[str, str] = field(default_factory=dict)
    repeated: dict[str, list[str]] = field(
        default_factory=lambda: {key: [] for key in _REPEATED.values()}
    )
    config: dict[str, Any] = field(default_factory=dict)
    #: Arguments for the second pass.
    rest: list[str] = field(default_factory=list)

    def given(self, group: str) -> dict[str, Any]:
        """Return the options of a group as typed; the command line overrides config files."""
        found = dict(self.config.get(group) or {})
        for token, after in pairwise([*self.rest, ""]):
            name, has_value, value = token.partition("=")
            if name.startswith(f"--{group}."):
                found[name.removeprefix(f"--{group}.")] = value if has_value else after
        return found

    def given_class(self, option: str) -> bool:
        """True if a class is chosen for an option such as ``optimizer``."""
        typed = any(token.partition("=")[0] == f"--{option}" for token in self.rest)
        return typed or self.config.get(option) is not None


@dataclass
class Request:
    """The result of the second pass."""

    trainer: Trainer
    parser: ArgumentParser
    values: Namespace
    target: Target

    def make_model(self) -> Any:
        """Make the module, and the DataModule or ``None``. The trainer exists and has seeded."""
        made = self.parser.instantiate(self.values)
        if isinstance(made.model, optimizers.ChosenOptimizer):
            optimizers.choose(made.model, made)
        return made.model, made.get("data")


def read_arguments(
    command: str,
    argv: list[str],
    target: Target | None,
    defaults: Mapping[str, Any] | None = None,
    options: Mapping[str, tuple[Any, Any, str]] | None = None,
    choose_folder: Callable[[Namespace, type[Module]], None] | None = None,
) -> Request:
    """Read the arguments of one command and make its trainer.

    Args:
        defaults: options of lower priority than config files, in the form of a config file.
        options: the command's own options -> (type, default, help).
        choose_folder: called with the values and the module's class before the trainer is made; it
            may set ``values.output``.

    Raises:
        UsageError: an argument is wrong.
    """
    program = f"python {sys.argv[0]} {command}"
    if target is None:
        program = f"geartrain {command} {argv[0] if argv and argv[0][:1] != '-' else 'TARGET'}"
        if not {"-h", "--help", "--help-all"}.isdisjoint(argv) and argv[0].startswith("-"):
            names = first_pass(argv, defaults or {})
        elif not argv or argv[0].startswith("-"):
            raise UsageError(f"TARGET comes first: geartrain {command} file.py [options]")
        else:
            names = first_pass(argv[1:], defaults or {})
            target = find_target(argv[0], names.classes)
    else:
        names = first_pass(argv, defaults or {})
        target = choose_classes(target, names.classes)
    has_optimizer = command == "fit" and names.given_class("optimizer")
    if command == "fit" and names.given_class("lr_scheduler") and not has_optimizer:
        raise UsageError("--lr_scheduler has no optimizer. Fix: give --optimizer CLASS, too")
    if target is not None and has_optimizer:
        target = optimizers.with_optimizer(target[0]), target[1]
    registry = Registry(names.repeated["block"])
    _select_by_flag(names, registry)
    parser, groups = build_parser(command, target, names, registry, options or {})
    required = [action.dest for action in parser._actions if action.required]
    parser.describe = partial(options_help, parser, command, program, list(options or ()), required)
    values = _parse(parser, names)
    assert target is not None  # without a target, --help was requested and has exited
    given = values.get("checkpoint")
    if given in ("best", "last"):  # a new trainer knows neither
        raise UsageError(
            f"--checkpoint {given}: here it is a file. "
            "Fix: --checkpoint RUN/last.ckpt, or one of those in RUN/checkpoints"
        )
    if given is not None and values.get("resume") is not None:
        raise UsageError(
            "--resume continues with everything, --checkpoint starts from the weights alone. "
            "Fix: give one of them"
        )
    _settle_output(values, names)
    if choose_folder is not None:
        choose_folder(values, target[0])
    trainer = Trainer(**_trainer_arguments(names, values, groups))
    return Request(trainer, parser, values, target)


def _settle_output(values: Namespace, names: Names) -> None:
    """Let ``--output`` and ``--no-output`` override a config file.

    Raises:
        UsageError: both are given.
    """
    if not values.get("no_output") or values.output is None:
        return
    typed = {token.partition("=")[0] for token in names.rest} & {"--output", "--no_output"}
    if len(typed) != 1:
        raise UsageError("--output and --no-output contradict each other. Fix: give one of them")
    if "--output" in typed:
        values.no_output = False
    else:
        values.output = None


# --- first pass: names ----------------------------------------------------------------------------


def first_pass(argv: list[str], defaults: Mapping[str, Any]) -> Names:
    """Normalise the spelling and find the names that decide which plugins are imported."""
    names = Names(config=_config(defaults))
    tokens = _normalise(argv)
    configs: list[str] = []
    while tokens:
        token = tokens.pop(0)
        key, has_value, value = token.partition("=")
        key = key.removeprefix("--") if token.startswith("--") else ""
        if key in {*_REPEATED, *_CLASSES, "strategy", "accelerator", "config"}:
            if not has_value:
                if not tokens or tokens[0].startswith("--"):
                    raise UsageError(f"--{key} needs a value")
                value = tokens.pop(0)
            if key == "config":
                configs.append(value)
            elif key in _REPEATED:
                names.repeated[_REPEATED[key]].append(value)
            elif key in _CLASSES:
                if not re.fullmatch(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", value):
                    hint = f"a class, and --{key}.ARG VALUE; a file of options is --config FILE"
                    raise UsageError(f"--{key} {value}: this is not a class. Fix: {hint}")
                names.classes[key] = value
            else:
                names.chosen[key] = value
        else:
            names.rest.append(token)
    for path in configs:
        _merge(names.config, _read_config(path))
    for key in _CLASSES:
        given = names.config.get(key)
        if isinstance(given, dict) and "class_path" in given:
            path = str(given["class_path"])
            chosen = names.classes.setdefault(key, path)
            is_same = chosen.rpartition(".")[2] == path.rpartition(".")[2]
            names.config[key] = dict(given.get("init_args") or {}) if is_same else {}
    for key in ("strategy", "accelerator"):
        if key in names.config:
            names.chosen.setdefault(key, str(names.config.pop(key)))
    for key in _REPEATED.values():
        listed = names.config.pop(key, [])
        names.repeated[key] = [
            *(listed if isinstance(listed, list) else [listed]),
            *names.repeated[key],
        ]
    return names


def _select_by_flag(names: Names, registry: Registry) -> None:
    """Select the plugin NAME for a flag ``--NAME`` without a value, such as ``--profile``."""
    found = {name for kind, name in KNOWN if kind == "plugin"}
    found |= {plugin.name for plugin in registry.of("plugin")}
    plugins = {name.replace("-", "_"): name for name in found}
    others: list[str] = []
    for token, after in pairwise([*names.rest, "--"]):
        name, has_value, _ = token.removeprefix("--").partition("=")
        plugin = plugins.get(name) if token.startswith("--") else None
        selected = plugin in names.repeated["plugins"]
        is_flag = not has_value and after.startswith("--")
        if plugin is None or name in option_names() or (selected and not is_flag):
            others.append(token)
        elif not is_flag:
            raise UsageError(
                f"--{name} takes no value. Fix: use --{name}, and --{name}.OPTION VALUE"
            )
        elif not selected:
            names.repeated["plugins"].append(plugin)
    names.rest = others


def _normalise(argv: list[str]) -> list[str]:
    """Normalise tokens.

    ``--max-epochs`` -> ``--max_epochs``, ``--strategy.X`` -> ``--strategy_options.X``, a flag
    without a value -> ``=true``, ``-q`` -> ``--enable_progress_bar=false``.
    """
    flags = {
        name
        for name, p in inspect.signature(Trainer).parameters.items()
        if "bool" in str(p.annotation)
    } | {"json", "hooks", "memory", "no_output"}
    tokens = []
    for i, token in enumerate(argv):
        if token in ("-q", "--quiet"):
            tokens.append("--enable_progress_bar=false")
            continue
        if not token.startswith("--"):
            tokens.append(token)
            continue
        name, has_value, value = token.partition("=")
        name = "--" + name[2:].replace("-", "_")
        name = re.sub(r"^--(strategy|accelerator)\.", r"--\1_options.", name)
        bare = not has_value and (i + 1 == len(argv) or argv[i + 1].startswith(("--", "-q")))
        if bare and name == "--resume":
            tokens.append("--resume=last")
            continue
        tokens.append(f"{name}=true" if bare and name[2:] in flags else name + has_value + value)
    return tokens


class _Loader(yaml.SafeLoader):
    """Reads a time such as 10:00:00:00 as text; YAML 1.1 reads it as a number to the base 60.

    Refuses a key that a mapping has twice, of which YAML would take the last.
    """

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        found: set[str] = set()
        for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
            if key.value in found:
                line = key.start_mark.line + 1
                message = f"line {line} has the key {key.value!r} for the second time"
                raise ValueError(f"{message}. Fix: remove one of the two")
            found.add(key.value)
        return node


_TIME = ("tag:yaml.org,2002:str", re.compile(r"\d+(:\d\d)+"))
_Loader.yaml_implicit_resolvers = {
    first: [_TIME, *rules] for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _read_config(path: str) -> dict[str, Any]:
    try:
        loaded = yaml.load(text := user_path(path, "--config").read_text(encoding="utf-8"), _Loader)
    except FileNotFoundError as error:
        raise UsageError(
            f"--config {path}: there is no such file. Fix: name a YAML file of options"
        ) from error
    except OSError as error:
        raise UsageError(
            f"--config {path}: {error.strerror}. Fix: name a YAML file that can be read"
        ) from error
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise UsageError(f"--config {path}: {error}") from error
    # Without aliases, a file has fewer values than characters.
    if not _has_at_most(max(len(text), 10_000), loaded):
        raise UsageError(
            f"--config {path}: its aliases expand to too many values. Fix: write the values out"
        )
    if loaded is None:  # nothing but comments
        return {}
    if not isinstance(loaded, dict):
        message = f"it must be a mapping of options, not {type(loaded).__name__}"
        raise UsageError(f"--config {path}: {message}. Fix: lines such as max_epochs: 3")
    return _config(loaded)


def _has_at_most(most: int, loaded: Any) -> bool:
    """True if there are at most ``most`` values. An alias counts each time; it may be recursive."""
    remaining, count = [loaded], 0
    while remaining and count <= most:
        value = remaining.pop()
        remaining += (
            value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
        )
        count += 1
    return count <= most


def _config(loaded: Mapping[Any, Any]) -> dict[str, Any]:
    """Return options by group, spelled as in Python."""
    config: dict[str, Any] = {}
    for key, value in _underscored(loaded).items():
        key = re.sub(r"^(strategy|accelerator)\.", r"\1_options.", key)
        if key in ("strategy", "accelerator") and isinstance(value, dict):
            # strategy: {name: bagua, algorithm: bytegrad}
            options = dict(value)
            config[key] = options.pop("name", "auto")
            _merge(config, {f"{key}_options": options})
        elif "." in key:
            group, _, option = key.partition(".")
            _merge(config, {group: {option: value}})
        else:
            _merge(config, {"plugins" if key == "plugin" else key: value})
    return config


def _underscored(values: Mapping[Any, Any]) -> dict[str, Any]:
    """Return options and those of groups, spelled as in Python; deeper keys are the user's."""
    return {
        str(key).replace("-", "_"): {str(k).replace("-", "_"): v for k, v in value.items()}
        if isinstance(value, Mapping)
        else value
        for key, value in values.items()
    }


def _merge(into: dict[str, Any], more: Mapping[str, Any]) -> None:
    for key, value in more.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


# --- second pass: values --------------------------------------------------------------------------


def build_parser(
    command: str,
    target: Target | None,
    names: Names,
    registry: Registry,
    options: Mapping[str, tuple[Any, Any, str]],
) -> tuple[_Parser, dict[str, str]]:
    """Return the parser with every option, and the plugins' groups: key -> plugin's name."""
    parser = _Parser(
        prog=f"geartrain {command}" + (" TARGET" if target is None else ""),
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.classes = names.classes
    parser.add_argument(
        "--accelerator", type=str, default="auto", help="auto, gpu or an accelerator's name"
    )
    parser.add_argument("--strategy", type=str, default="auto", help="auto or a strategy's name")
    parser.add_argument(
        "--plugins",
        type=list[str],
        default=[],
        help="a plugin's name or file; may be given several times; --NAME alone does the same",
    )
    parser.add_argument(
        "--block",
        type=list[str],
        default=[],
        help="a plugin's name, or DISTRIBUTION[name], that must not be selected",
    )
    parser.add_argument("--config", action="config", help="a YAML file of options")
    if command == "explain":
        parser.add_argument(
            "--hooks", type=bool, default=False, help="also list the plugins of each hook"
        )
        text = "predict each rank's peak memory and the bytes it sends; makes the module and data"
        parser.add_argument("--memory", type=bool, default=False, help=text)
        parser.add_argument(
            "--json", type=bool, default=False, help="print the plan and the hooks as JSON"
        )
        parser.add_argument(
            "--assume",
            type=list[str],
            default=[],
            help="ACCELERATOR=COUNT: plan for hardware that this machine lacks",
        )
    else:
        parser.add_argument(
            "--checkpoint",
            type=str | None,
            default=None,
            help="first read the model's weights from this file",
        )
    if command in ("fit", "explain"):
        text = "save nothing; without it and --output a fit is saved in runs/MODULE-N"
        parser.add_argument("--no_output", type=bool, default=False, help=text)
    if command == "fit":
        text = (
            "resume from this checkpoint; without a value: from the last one in --output, or of "
            "the newest run; auto: from the last one if it exists"
        )
        parser.add_argument("--resume", type=str | None, default=None, help=text)
        optimizers.add_options(parser)
    for option, (kind, default, text) in options.items():
        parser.add_argument(f"--{option}", type=kind, default=default, help=text)
    parser.add_class_arguments(
        Trainer, None, skip=_SPELT_OTHERWISE, instantiate=False, fail_untyped=False
    )
    if target is not None:
        parser.add_class_arguments(target[0], "model", fail_untyped=False)
        if target[1] is not None:
            parser.add_class_arguments(target[1], "data", fail_untyped=False)
    return parser, _add_chosen(parser, names, registry)


def _add_chosen(parser: ArgumentParser, names: Names, registry: Registry) -> dict[str, str]:
    for kind in ("accelerator", "strategy"):
        name = names.chosen.get(kind, "auto")
        if name.lower() not in ("auto", "gpu") and any(
            c.name.lower() == name.lower() for c in registry.of(kind)
        ):
            cls = registry.load(registry.find(kind, name))
            parser.add_class_arguments(
                cls, f"{kind}_options", instantiate=False, fail_untyped=False
            )
            # Options of a part that another option selects, such as bagua's algorithm.
            if hasattr(cls, "more_options"):
                for other in cls.more_options(names.given(f"{kind}_options")):
                    parser.add_class_arguments(
                        other,
                        f"{kind}_options",
                        as_group=False,
                        instantiate=False,
                        fail_untyped=False,
                    )
    groups: dict[str, str] = {}
    for plugin in names.repeated["plugins"]:
        if (of_file := file_plugin(plugin)) is not None:
            name, found = of_file
        else:
            name, found = plugin, registry.load(registry.find("plugin", plugin))
        key = name.replace("-", "_")
        if inspect.isclass(found) and key not in groups:
            if key in parser.get_defaults():
                raise UsageError(
                    f"plugin {name!r} has the name of an option (--{key}). "
                    "Fix: use the option, or rename the plugin"
                )
            parser.add_class_arguments(found, key, instantiate=False, fail_untyped=False)
            groups[key] = name
    return groups


class _Parser(ArgumentParser):
    """jsonargparse's parser with geartrain's help: ``--help``, and ``--help-all``."""

    #: Returns the text of the help; its argument is True for all options.
    describe: Callable[[bool], str]
    shows_all = False

    #: The classes that ``--print-config`` adds to their options.
    classes: Mapping[str, str] = {}

    def dump(self, *args: Any, **kwargs: Any) -> str:
        text = str(super().dump(*args, **kwargs))
        if not self.classes:
            return text
        values = yaml.safe_load(text)
        for key, path in self.classes.items():
            values[key] = {"class_path": path, "init_args": values.get(key) or {}}
        return str(yaml.safe_dump(values, sort_keys=False))

    def format_help(self, *args: Any, **kwargs: Any) -> str:
        return self.describe(self.shows_all)

    def print_help(self, file: Any = None, *args: Any, **kwargs: Any) -> None:
        print_titled(self.format_help())


def _parse(parser: _Parser, names: Names) -> Namespace:
    if "--help_all" in names.rest:
        parser.shows_all = True
        parser.print_help()
        raise SystemExit(0)
    config = dict(names.config)
    config.update(names.chosen)
    known = {action.dest for action in parser._actions}
    for key in _OF_SOME - known:  # a file of another command's --print-config
        config.pop(key, None)
    config.update({key: value for key, value in names.repeated.items() if key in known and value})
    remaining = [key for key, value in names.repeated.items() if key not in known and value]
    if remaining:
        raise UsageError(f"--{remaining[0]} belongs to geartrain explain")
    try:
        text = json.dumps(config)
    except (TypeError, ValueError) as error:
        # A YAML date, a recursive alias, or an object in the defaults of gt.cli.
        raise UsageError(
            f"an option is not text, number, list or mapping: {error}. Fix: write it as text"
        ) from error
    try:
        values: Namespace = parser.parse_args([f"--config={text}", *names.rest])
    except ArgumentError as error:
        raise UsageError(_readable(str(error), parser, names)) from error
    return values


def _readable(message: str, parser: ArgumentParser, names: Names) -> str:
    """Return jsonargparse's message with the option as it was typed and the nearest option."""
    grouped = re.search(r"Group '(\S+)' does not accept (?:nested key|option) '(\S+)'", message)
    unknown = re.search(r"unrecognized arguments: --(\S+)", message) or re.search(
        r"Option '(\S+)' is not accepted", message
    )
    if surplus := re.search(r"unrecognized arguments: ([^-].*)", message):
        return _surplus(surplus[1].split()[0], names)
    if in_class := re.search(r"class_path[ =]'([^']+)'", message):
        option, cls = message.partition('"')[2].partition('"')[0], in_class[1]
        if unknown:
            return _unknown_argument(option, cls, unknown[1])
        if wrong := re.search(
            r'Parser key "(\w+)":\s+Expected an? (.+?)\. Got value: (.*)', message
        ):
            expected = re.sub(r"<class '(.+?)'>", r"\1", wrong[2])
            return f"--{option}.{wrong[1]}: expected {expected}, got {wrong[3]!r}"
    if path := re.search(
        r"Expected a dot import path string: (\S+)|module '\S+' has no attribute '(\S+)'", message
    ):
        option = message.partition('"')[2].partition('"')[0]
        hint = "a class that the file imports, or one with its module, as torch.optim.Adam"
        return f"--{option}: there is no class {path[1] or path[2]!r}. Fix: {hint}"
    if grouped:
        return _unknown_option(f"{grouped[1]}.{grouped[2]}", parser, names)
    if unknown:
        return _unknown_option(unknown[1].partition("=")[0], parser, names)
    if required := re.search(r"arguments are required: (.+)", message):
        options = [f"--{option}" for option in required[1].split(", ")]
        message = f"{', '.join(options)}: a value is required. Fix: {options[0]} VALUE"
    message = re.sub(r'Parser key "([^"]+)":\s*', r"--\1: ", message)
    message = re.sub(r"^argument (--\S+): expected one argument", r"\1 needs a value", message)
    if wrong := re.search(r"(?:Got|Given) value: (.*)", message):
        types = re.findall(r"Expected (?:an? )?(.+?)(?:\. Got value.*)?$", message, re.MULTILINE)
        if types:
            expected = re.sub(r"<class '(.+?)'>|typing\.", r"\1", " or ".join(types))
            expected = expected.replace("NoneType", "None")
            message = f"{message.partition(': ')[0]}: expected {expected}, got {wrong[1]!r}"
    return re.sub(r"(strategy|accelerator)_options\.", r"\1.", message)


def _unknown_argument(option: str, path: str, name: str) -> str:
    """Return the error for an argument that the class of an option does not have."""
    cls = import_class(path)
    known = list(inspect.signature(cls).parameters) if cls is not None else []
    return f"--{option}.{name}: {path} has no argument {name!r}. {nearest(name, known)}"


def _surplus(argument: str, names: Names) -> str:
    """Return the answer to an argument that is neither an option nor an option's value."""
    option, has_value, value = argument.partition("=")
    remedy = f"--{option} {value}" if has_value else "--OPTION VALUE, or leave it out"
    if argument.endswith((".yaml", ".yml")):
        remedy = f"--config {argument}, which may be given several times"
    return f"{argument!r} is the value of no option. Fix: {remedy}"


def _unknown_option(name: str, parser: ArgumentParser, names: Names) -> str:
    if instead := write_instead("option", name):
        return f"there is no option --{name}{instead}"
    unknown = f"there is no option --{name}"
    if name in _MEANT:
        return f"{unknown}. Did you mean {_MEANT[name]}?"
    typed = re.sub(r"^(strategy|accelerator)_options\.", r"\1.", name)
    options = [
        option[2:]
        for action in parser._actions
        for option in action.option_strings
        if option[:2] == "--" and option[-1] != "+"
    ]
    group = name.partition(".")[0]
    if "." in name and not any(option.startswith(f"{group}.") for option in options):
        kind = group.removesuffix("_options")
        chosen = names.chosen.get(kind, "auto")
        if any(
            (of_file := file_plugin(plugin)) is not None and of_file[0] == group
            for plugin in names.repeated["plugins"]
        ):
            return (
                f"--{typed}: {group}.py is a file of functions and takes no options. "
                "Fix: use a class with a typed __init__"
            )
        if group == "trainer":
            own = name.split(".")[1].removesuffix("+")
            instead = write_instead("option", own)
            section = f". Write: --{own}; in a config file {own} without the section trainer"
            return (
                f"there is no option --{typed}: the trainer's options have no prefix"
                f"{instead or section}"
            )
        if group in ("model", "data"):
            message = "module" if group == "model" else "data module"
            return (
                f"--{typed}: the target has no {message} with arguments. "
                f"Fix: leave it out, or give the {message}'s __init__ this argument"
            )
        if group == kind:
            return (
                f"--{typed}: no {group!r} is selected. Fix: --plugin {group}, or check the spelling"
            )
        if chosen in ("auto", "gpu"):
            return f"--{typed}: its {kind} must be selected by name. Fix: --{kind} NAME"
        return f"--{typed}: {kind} {chosen!r} takes no options."
    if name in _OF_SOME:
        return f"{unknown} of geartrain {parser.prog.split()[1]}. Fix: leave it out"
    positive = name.removeprefix("no_")
    if positive != name and positive in options:
        return f"{unknown}. Fix: --{positive} false"
    if longer := [option for option in options if option.endswith(f".{name}")]:
        return f"{unknown}. Did you mean --{longer[0]}?"
    near = [
        re.sub(r"^(strategy|accelerator)_options\.", r"\1.", option)
        for option in options
        if ("." in option) == ("." in name)
    ]
    answer = nearest(typed, [*near, "plugin", "quiet"])
    if not answer.startswith("Did"):
        answer = f"Fix: one of those that geartrain {parser.prog.split()[1]} TARGET --help lists"
    return f"there is no option --{typed}. {answer}"


def _trainer_arguments(
    names: Names, values: Namespace, groups: Mapping[str, str]
) -> dict[str, Any]:
    known = [
        name
        for name in inspect.signature(Trainer).parameters
        if name not in {*_SPELT_OTHERWISE, "unknown"}
    ]
    arguments = {name: values[name] for name in known}
    arguments |= {
        "accelerator": values.accelerator,
        "strategy": values.strategy,
        "plugins": values.plugins,
        "block": values.block,
    }
    for kind in ("accelerator", "strategy"):
        arguments[f"{kind}_options"] = _plain(values.get(f"{kind}_options"))
    arguments["plugin_options"] = {name: _plain(values.get(key)) for key, name in groups.items()}
    arguments["assume"] = dict(map(_assumption, values.get("assume") or []))
    return arguments


def _plain(values: Any) -> dict[str, Any]:
    return values.as_dict() if isinstance(values, Namespace) else {}


def _assumption(text: str) -> tuple[str, int]:
    name, _, count = text.partition("=")
    if not count.isdigit() or int(count) < 1:
        raise UsageError(f"--assume {text} must be ACCELERATOR=COUNT, such as --assume cuda=8")
    return name.lower(), int(count)
