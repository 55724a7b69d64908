"""Check records against the shipped JSON schema, by the keywords that it uses."""

import json
import math
from collections.abc import Iterator
from typing import Any

from lightning_rob.evaluation import records

SCHEMA = json.loads(records.SCHEMA_FILE.read_text())
TYPES: dict[str, Any] = {
    "object": dict,
    "array": list,
    "string": str,
    "number": int | float,
    "integer": int,
    "boolean": bool,
    "null": type(None),
}


def is_type(value: Any, name: str) -> bool:
    if isinstance(value, bool):
        return name == "boolean"
    return isinstance(value, TYPES[name])


def problems(value: Any, schema: dict[str, Any], place: str = "record") -> Iterator[str]:
    if "$ref" in schema:
        yield from problems(value, SCHEMA["$defs"][schema["$ref"].rpartition("/")[2]], place)
    if "oneOf" in schema:
        found = [list(problems(value, option, place)) for option in schema["oneOf"]]
        if sum(not one for one in found) != 1:
            yield f"{place} is not one of the kinds: {min(found, key=len)}"
    names = schema.get("type", [])
    names = [names] if isinstance(names, str) else names
    if names and not any(is_type(value, name) for name in names):
        yield f"{place} is no {names}: {value!r}"
        return
    if value != schema.get("const", value) or value not in schema.get("enum", [value]):
        yield f"{place} is {value!r}"
    if isinstance(value, int | float):
        low, high = schema.get("minimum", -math.inf), schema.get("maximum", math.inf)
        if not low <= value <= high:
            yield f"{place} is {value}"
    if isinstance(value, list):
        if not schema.get("minItems", 0) <= len(value) <= schema.get("maxItems", math.inf):
            yield f"{place} has {len(value)} items"
        for i, item in enumerate(value):
            yield from problems(item, schema.get("items", {}), f"{place}[{i}]")
    if isinstance(value, dict):
        yield from (f"{place} has no {k}" for k in schema.get("required", ()) if k not in value)
        rest = schema.get("additionalProperties", {})
        for key, part in value.items():
            inner = schema.get("properties", {}).get(key, rest)
            if inner is False:
                yield f"{place} has {key}"
            else:
                yield from problems(part, inner, f"{place}.{key}")


def checked(text: str) -> dict[str, Any]:
    """Return the record in a JSON text, which follows the schema and is JSON without NaN."""

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    record: dict[str, Any] = json.loads(text, parse_constant=refuse)
    found = list(problems(record, SCHEMA))
    assert not found, found
    return record
