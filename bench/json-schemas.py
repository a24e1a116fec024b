#!/usr/bin/env python3
"""Asks a running `forebay serve` for answers by 200 JSON schemas, and checks each answer with the package jsonschema.

    bench/json-schemas.py [ADDRESS] [--temperature T] [--max-tokens N]

ADDRESS is http://127.0.0.1:8080 unless given. The schemas have the kinds of the JSON Schema Test Suite (draft 2020-12), each alone
and as parts of an object or an array. Others have parts that are not enforced: their answers are checked by the rest. A refused schema
is counted, because a refusal says so before any answer; an answer that is not valid fails. An answer that the limit of tokens cut off is asked for again with another seed. Exit status 1 if one failed.
"""

import argparse
import itertools
import json
import sys
import time
import urllib.error
import urllib.request

import jsonschema

parser = argparse.ArgumentParser()
parser.add_argument("address", nargs="?", default="http://127.0.0.1:8080")
parser.add_argument("--temperature", type=float, default=1.0)
parser.add_argument("--max-tokens", type=int, default=600)
arguments = parser.parse_args()

TEXT, WHOLE = {"type": "string", "maxLength": 12}, {"type": "integer", "minimum": -50, "maximum": 5000}
KINDS = {
    "type boolean": {"type": "boolean"},
    "type null": {"type": "null"},
    "type integer": {"type": "integer", "minimum": 0, "maximum": 10**6},
    "type number": {"type": "number", "minimum": -1, "maximum": 1},
    "type string": TEXT,
    "several types": {"type": ["boolean", "null"]},
    "enum": {"enum": ["red", "green", 3, None, {"a": 1}]},
    "enum of texts": {"enum": ["a", "ab", "abc"]},
    "const": {"const": {"name": "x", "list": [1, 2]}},
    "const text": {"const": "a \"quoted\" text\n"},
    "minimum, maximum": WHOLE,
    "exclusiveMinimum, exclusiveMaximum": {"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 9},
    "multipleOf": {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 700},
    "minLength, maxLength": {"type": "string", "minLength": 2, "maxLength": 5},
    "pattern": {"type": "string", "pattern": "^[a-c]{2,4}-[0-9]{3}$"},
    "format date": {"type": "string", "format": "date"},
    "format date-time": {"type": "string", "format": "date-time"},
    "format time": {"type": "string", "format": "time"},
    "format uuid": {"type": "string", "format": "uuid"},
    "format ipv4": {"type": "string", "format": "ipv4"},
    "items, maxItems": {"type": "array", "items": WHOLE, "maxItems": 4},
    "minItems": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
    "prefixItems": {"type": "array", "prefixItems": [WHOLE, TEXT], "items": False, "minItems": 2},
    "properties, required": {"type": "object", "properties": {"id": WHOLE, "name": TEXT}, "required": ["id", "name"],
                             "additionalProperties": False},
    "optional properties": {"type": "object", "properties": {"a": WHOLE, "b": TEXT, "c": {"type": "null"}}, "required": ["b"],
                            "additionalProperties": False},
    "additionalProperties": {"type": "object", "properties": {"k": WHOLE}, "required": ["k"],
                             "additionalProperties": {"type": "boolean"}, "maxProperties": 3},
    "nested object": {"type": "object", "properties": {"in": {"type": "object", "properties": {"x": WHOLE}, "required": ["x"],
                      "additionalProperties": False}}, "required": ["in"], "additionalProperties": False},
    "anyOf": {"anyOf": [WHOLE, {"type": "boolean"}]},
    "oneOf": {"oneOf": [{"type": "boolean"}, {"type": "string", "maxLength": 4}]},
    "allOf": {"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 50}]},
    "$ref, $defs": {"$defs": {"n": WHOLE}, "type": "object", "properties": {"v": {"$ref": "#/$defs/n"}}, "required": ["v"],
                    "additionalProperties": False},
    "recursive $ref": {"$defs": {"node": {"type": "object", "properties": {"v": {"type": "boolean"}, "next": {"anyOf": [
        {"type": "null"}, {"$ref": "#/$defs/node"}]}}, "required": ["v", "next"], "additionalProperties": False}},
        "$ref": "#/$defs/node"},
    "object": {"type": "object", "maxProperties": 2, "additionalProperties": TEXT},
}
def closed(**properties):
    """Returns the schema of an object with these members and no others."""
    return {"type": "object", "properties": properties, "additionalProperties": False}


# Schemas with parts that are not enforced, and what is checked instead: the rest, in which objects are closed.
LOOSENED = {
    "closed object": ({"type": "object", "properties": {"a": WHOLE, "b": TEXT}, "required": ["a"]}, closed(a=WHOLE, b=TEXT)),
    "closed allOf": ({"allOf": [{"type": "object", "properties": {"a": WHOLE}}, {"type": "object", "properties": {"b": TEXT}, "required": ["b"]}]},
                     {**closed(a=WHOLE, b=TEXT), "required": ["b"]}),
    "closed anyOf": ({"type": "object", "properties": {"k": TEXT}, "anyOf": [{"properties": {"a": WHOLE}, "required": ["a"]},
                      {"properties": {"b": WHOLE}, "required": ["b"]}]}, {"anyOf": [closed(k=TEXT, a=WHOLE), closed(k=TEXT, b=WHOLE)]}),
    "open object": ({"type": "object", "properties": {"a": WHOLE}, "required": ["a"], "additionalProperties": True, "maxProperties": 1},
                    {"type": "object", "properties": {"a": WHOLE}, "required": ["a"]}),
    "any number": ({"type": "number"}, {"type": "number"}),
    "any integer": ({"type": "integer"}, {"type": "integer"}),
    "unknown format": ({"type": "string", "format": "iban", "maxLength": 9}, TEXT),
    "uniqueItems": ({"type": "array", "items": WHOLE, "maxItems": 3, "uniqueItems": True}, {"type": "array", "items": WHOLE, "maxItems": 3}),
    "not": ({"type": "integer", "minimum": 0, "maximum": 9, "not": {"const": 3}}, {"type": "integer", "minimum": 0, "maximum": 9}),
    "if, then, else": ({"type": "object", "properties": {"a": WHOLE}, "required": ["a"], "if": {"required": ["a"]},
                        "then": {"properties": {"b": TEXT}}, "else": False}, {"type": "object", "required": ["a"]}),
    "propertyNames": ({"type": "object", "additionalProperties": WHOLE, "maxProperties": 2, "propertyNames": {"maxLength": 3}},
                      {"type": "object", "additionalProperties": WHOLE, "maxProperties": 2}),
    "contains": ({"type": "array", "items": WHOLE, "maxItems": 3, "contains": {"const": 7}}, {"type": "array", "items": WHOLE, "maxItems": 3}),
    "dependentSchemas": ({"type": "object", "properties": {"a": WHOLE}, "dependentSchemas": {"a": {"required": ["a"]}}}, closed(a=WHOLE)),
    "pattern that looks ahead": ({"type": "string", "pattern": "^(?=.*[0-9])", "maxLength": 9}, TEXT),
    "overlapping oneOf": ({"oneOf": [WHOLE, {"type": "integer", "minimum": 0, "maximum": 9}]}, WHOLE),
    "unknown type": ({"type": "object", "properties": {"a": {"type": "money", "maxLength": 9}}, "required": ["a"]}, closed(a=True)),
    "far $ref": ({"type": "object", "properties": {"a": {"$ref": "https://example.com/s.json", "type": "boolean"}}, "required": ["a"]},
                 closed(a={"type": "boolean"})),
}


def schemas():
    """Yields 200 schemas with their names: each kind, then pairs of kinds as an object, then lists of one kind."""
    def embed(schema, number, defs):
        # References are to the root of a schema, so definitions move there under names of their own.
        text = json.dumps(schema)
        for name in schema.get("$defs", {}):
            text = text.replace(f"#/$defs/{name}\"", f"#/$defs/{name}{number}\"")
        schema = json.loads(text)
        for name, value in schema.pop("$defs", {}).items():
            defs[f"{name}{number}"] = value
        return schema

    yield from KINDS.items()
    names = list(KINDS)
    for name in names:
        defs = {}
        items = embed(KINDS[name], 0, defs)
        yield f"list of {name}", {"$defs": defs, "type": "array", "items": items, "minItems": 1, "maxItems": 2}
    pairs = [pair for pair in itertools.combinations(names, 2)]
    for first, second in pairs[:: max(1, len(pairs) // 134)][: 200 - 2 * len(names)]:
        defs = {}
        properties = {"first": embed(KINDS[first], 1, defs), "second": embed(KINDS[second], 2, defs)}
        yield f"object of {first} and {second}", {
            "$defs": defs, "type": "object", "properties": properties, "required": ["first", "second"], "additionalProperties": False}


def ask(schema, seed):
    body = {
        "messages": [{"role": "user", "content": "Give me JSON."}], "max_tokens": arguments.max_tokens, "seed": seed,
        "temperature": arguments.temperature,
        "response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}},
    }
    request = urllib.request.Request(arguments.address + "/v1/chat/completions", json.dumps(body).encode(),
                                     {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=300) as response:
        choice = json.load(response)["choices"][0]
    return choice["finish_reason"], choice["message"]["content"]


counts = {"valid": 0, "refused": 0, "cut": 0, "wrong": 0}
started = time.time()
all_of_them = [(name, schema, schema) for name, schema in schemas()]
all_of_them += [(name, schema, checked) for name, (schema, checked) in LOOSENED.items()]
for name, schema, checked in all_of_them:
    validator = jsonschema.Draft202012Validator(checked, format_checker=jsonschema.Draft202012Validator.FORMAT_CHECKER)
    try:
        for seed in range(8):
            reason, text = ask(schema, seed)
            if reason == "stop":
                break
        if reason != "stop":
            counts["cut"] += 1
            print("cut", name, repr(text[:100]), sep="  ")
            continue
        # RFC 3339 has a year 0, which is like 2000, but Python has none.
        validator.validate(json.loads(text.replace('"0000-', '"2000-')))
        counts["valid"] += 1
    except urllib.error.HTTPError as error:
        counts["refused"] += 1
        print("refused", name, error.read().decode()[:300], sep="  ")
    except (ValueError, jsonschema.ValidationError) as error:
        counts["wrong"] += 1
        print("WRONG", name, repr(text[:200]), str(error)[:200], sep="  ")
print(f"{sum(counts.values())} schemas: " + ", ".join(f"{count} {name}" for name, count in counts.items())
      + f" in {time.time() - started:.0f} s")
sys.exit(counts["wrong"] > 0)
