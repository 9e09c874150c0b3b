"""Fields of a configuration that carry their meaning, their choices and their limits.

Each configuration of a recipe is a dataclass. A field is written once, with everything there is to
say about it; the checks, the help of the command line and the tables in the chapters read it there.

>>> from dataclasses import dataclass
>>> @dataclass(frozen=True)
... class Masking:
...     rate: float = option(0.25, "share of tokens to mask", above=0, at_most=1)
...     token: str = option("mask", "what replaces them", choices=("mask", "random"))
...     def __post_init__(self):
...         check_options(self, "masking")
>>> Masking(rate=0.4)
Masking(rate=0.4, token='mask')
>>> Masking(rate=1.5)
Traceback (most recent call last):
  ...
cramming_nb.engine.errors.UserError: masking.rate 1.5: give a number above 0, at most 1
>>> meanings(Masking())
{'rate': 'share of tokens to mask', 'token': 'what replaces them: mask, random'}
"""

import dataclasses
import json
import math
import os
from collections.abc import Iterable
from pathlib import Path
from types import NoneType
import yaml
from .errors import UserError

def option(default: object,              # value if none is given
           meaning: str,                 # what the field decides, with its unit and its source
           choices: Iterable[str] = (),  # the names it may have; empty: any value
           at_least: float = -math.inf,  # smallest number allowed
           at_most: float = math.inf,    # largest number allowed
           above: float = -math.inf,     # numbers must be larger than this
           below: float = math.inf,      # numbers must be smaller than this
           ) -> object:
    "A field of a dataclass with its meaning, choices and limits in its metadata."
    limits = dict(at_least=at_least, above=above, at_most=at_most, below=below)
    metadata = dict(meaning=meaning, choices=tuple(choices), limits=limits)
    return dataclasses.field(default=default, metadata=metadata)

def in_words(limits: dict[str, float]) -> str:
    "Limits as a person would say them, such as `a number above 0, at most 1`."
    parts = []
    for name, limit in limits.items():
        if math.isfinite(limit):
            parts.append(f"{name.replace('_', ' ')} {limit:g}")
    return "a number " + ", ".join(parts)

def within(value: float, limits: dict[str, float]) -> bool:
    "Whether a number keeps all limits; not-a-number never does."
    not_too_small = value >= limits["at_least"] and value > limits["above"]
    not_too_large = value <= limits["at_most"] and value < limits["below"]
    return not_too_small and not_too_large

def check_options(config: object, part: str):
    "Raise a `UserError` for the first field whose value is not among its choices or limits."
    for field in dataclasses.fields(config):
        value, about = getattr(config, field.name), field.metadata
        if about["choices"] and value not in about["choices"]:
            names = ", ".join(about["choices"])
            raise UserError(f"{part}.{field.name} {value!r}: choose one of {names}")
        is_limited = any(map(math.isfinite, about["limits"].values()))
        if is_limited and not within(value, about["limits"]):
            wanted = in_words(about["limits"])
            if not math.isfinite(value):
                wanted = wanted.replace("number", "finite number", 1)
            raise UserError(f"{part}.{field.name} {value}: give {wanted}")

def meanings(config: object) -> dict[str, str]:
    "What each field of a configuration means, followed by its choices if it has some."
    found = {}
    for field in dataclasses.fields(config):
        found[field.name] = field.metadata["meaning"]
        if field.metadata["choices"]:
            found[field.name] += ": " + ", ".join(field.metadata["choices"])
    return found

class StrictLoader(yaml.SafeLoader):
    "Reads YAML as its parent does, and refuses a key that is given twice."
    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node, seen = super().compose_mapping_node(anchor), set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                problem = f"{key.value!r} is given twice; keep one"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            if isinstance(key, yaml.ScalarNode):
                seen.add(key.value)
        return node

    def construct_yaml_int(self, node: yaml.ScalarNode) -> int:
        value = super().construct_yaml_int(node)
        str(value)  # a ValueError if it has more digits than Python prints, as 0xfff… may have
        return value

    def construct_yaml_str(self, node: yaml.ScalarNode) -> str:
        value = super().construct_yaml_str(node)
        value.encode()  # a ValueError for half of a character, such as "\\ud800"
        return value

StrictLoader.add_constructor("tag:yaml.org,2002:int", StrictLoader.construct_yaml_int)
StrictLoader.add_constructor("tag:yaml.org,2002:str", StrictLoader.construct_yaml_str)

def read_yaml(text: str) -> object:
    "The value of a YAML text; a key that is given twice is a `YAMLError`, like other mistakes."
    try:
        return StrictLoader(text).get_single_data()
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise yaml.YAMLError(f"a value cannot be read ({error})") from None

def yaml_file(path: str | os.PathLike) -> object:
    "The value of a YAML file; a `UserError` names the file that cannot be read."
    from .tables import open_text  # late: pyarrow takes a while, and `cram --help` needs none
    with open_text(str(path)) as file:
        text = file.read()
    try:
        return read_yaml(text)
    except yaml.YAMLError as error:
        problem = str(error).replace('in "<unicode string>", ', "at ")
        raise UserError(f"{path}: {' '.join(problem.split())}") from None

FORMS = {  # the type of a field -> how to write its value
    str: "text, with quotes around a number, or a word such as yes",
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    list: "a list, such as [0, 1]",
    dict: "fields and values, such as {schedule.batch_size: 64}",
}

def fits(value: object, kind: type | tuple[type, ...]) -> bool:
    "Whether a value from a file is of a type, or of one of several; true and false are no numbers."
    kinds = kind if isinstance(kind, tuple) else (kind,)
    return isinstance(value, kinds) and (bool in kinds or not isinstance(value, bool))

MISSING = type(...)  # the kind of a field that may be missing
NUMBER = (int, float)

def kind_name(kinds: tuple) -> str:
    "What a value should be, in words; of no kinds, a part that should not be there."
    words = [{NoneType: "null", float: "number"}.get(kind, kind.__name__) for kind in kinds
             if kind is not MISSING and (kind is not int or float not in kinds)]
    return " or ".join(words) or "part of it"

def require(where: str | os.PathLike, fields: object, kinds: dict):
    """Raise a `UserError` unless `fields` has each name of `kinds`, with a value of that kind.

    A kind is a type; a dictionary of kinds by name, with `...` for all other names; a list with
    the kind of its entries, or with one for each of them; or several of these, as a tuple.
    """
    for name, allowed in kinds.items():
        value = fields.get(name, ...) if isinstance(fields, dict) else ...
        allowed = allowed if isinstance(allowed, tuple) else (allowed,)
        types = tuple(type(kind) if isinstance(kind, dict | list) else kind for kind in allowed)
        found = [kind for kind, its_type in zip(allowed, types) if fits(value, its_type)]
        if not found:
            raise UserError(f"{where}: field {name!r} is missing or no {kind_name(types)}")
        if isinstance(found[0], dict):
            known = {key: kind for key, kind in found[0].items() if key is not ...}
            others = dict.fromkeys(value, found[0][...]) if ... in found[0] else {}
            require(f"{where}: {name}", value, others | known)
        elif isinstance(found[0], list):
            entries, each = dict(enumerate(value, 1)), found[0]
            each = each * len(value) if len(each) == 1 else each + [()] * (len(value) - len(each))
            require(f"{where}: {name}", entries, dict(enumerate(each, 1)))

def whole(digits: str) -> int:
    "A whole number of JSON; one of hundreds of digits, too large to compute with, is an error."
    if len(digits) > 40:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)

def json_file(path: str | os.PathLike) -> object:
    "The value of a JSON file; a `UserError` names the file that cannot be read."
    if Path(path).is_fifo():  # which would be waited for
        raise UserError(f"{path}: is a pipe and not a file; put a file in its place")
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"), parse_int=whole)
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{path}: cannot be read ({error})") from None

def check_field(field: dataclasses.Field, value: object):
    "Raise a `UserError` unless a value from a file is of the type of its field."
    allowed = (int, float) if field.type is float else field.type
    if not fits(value, allowed):
        found = "has no value" if value is None else repr(value)
        has_example = isinstance(field.default, str) and field.default
        example = f", such as {field.name}: {field.default}" if has_example else ""
        raise UserError(f"{field.name} {found}; write {FORMS[field.type]}{example}")

def of_fields(kind: type, values: object) -> object:
    "An object of a dataclass from fields that a file gives."
    known = {field.name: field for field in dataclasses.fields(kind)}
    names = ", ".join(known)
    if not isinstance(values, dict):
        raise UserError(f"{values!r}; write fields and values, with some of {names}")
    for name, value in values.items():
        if name not in known:
            raise UserError(f"unknown field {name!r}; known are {names}")
        check_field(known[name], value)
    return kind(**values)

def number_of_environment(name: str, default: int, least: int = 0) -> int:
    "A whole number that an environment variable gives."
    text = os.environ.get(name, default)
    try:
        number = int(text)
    except ValueError:
        number = least - 1
    if number < least:
        raise UserError(f"{name}={text} in the environment: torchrun sets it to a whole number, "
                        f"{least} or more; unset it to work in one process")
    return number
