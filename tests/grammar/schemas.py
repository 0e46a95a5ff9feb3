"""Schemas of the kinds that the public JSON Schema test suite has: those that are served, with an instance, and those refused."""

from typing import Any, NamedTuple

Json = Any


class Served(NamedTuple):
    """A schema, and a value that it accepts."""

    schema: dict[str, Json]
    instance: Json


NODE = {
    "type": "object",
    "properties": {"v": {"type": "integer"}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
KIND_A = {
    "type": "object",
    "properties": {"k": {"const": "a"}, "v": {"type": "integer"}},
    "required": ["k", "v"],
    "additionalProperties": False,
}
KIND_B = {"type": "object", "properties": {"k": {"const": "b"}}, "required": ["k"], "additionalProperties": False}

SERVED: dict[str, Served] = {
    "anything": Served({}, {"a": [1, "x", None]}),
    "type string": Served({"type": "string"}, 'é "quoted" \n line'),
    "type integer": Served({"type": "integer"}, -12),
    "type number": Served({"type": "number"}, 1.5),
    "type boolean": Served({"type": "boolean"}, False),
    "type null": Served({"type": "null"}, None),
    "type array": Served({"type": "array"}, [1, [2], {}]),
    "type object": Served({"type": "object"}, {"a": {"b": 1}}),
    "several types": Served({"type": ["integer", "null"]}, None),
    "enum": Served({"enum": ["a", 1, None, {"k": [1, 2]}, "é\n"]}, {"k": [1, 2]}),
    "enum, typed": Served({"type": "integer", "enum": [1, "a", 2]}, 2),
    "enum, large": Served({"enum": [f"value {number}" for number in range(500)]}, "value 77"),
    "const": Served({"const": {"a": [1, "x"], "b": False}}, {"a": [1, "x"], "b": False}),
    "minLength, maxLength": Served({"type": "string", "minLength": 3, "maxLength": 5}, "abcd"),
    "pattern": Served({"type": "string", "pattern": "^[A-Z]{3}-[0-9]+$"}, "ABC-17"),
    "pattern, not anchored": Served({"type": "string", "pattern": "ab", "maxLength": 9}, "xxaby"),
    "minimum, maximum": Served({"type": "integer", "minimum": -7, "maximum": 120}, -7),
    "exclusive bounds": Served({"type": "integer", "exclusiveMinimum": 3, "exclusiveMaximum": 12}, 11),
    "bounds of numbers": Served({"type": "number", "exclusiveMinimum": 0.5, "maximum": 2.5}, 2.5),
    "multipleOf": Served({"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000}, 707),
    "multipleOf, fraction": Served({"type": "number", "multipleOf": 0.25, "minimum": 0, "maximum": 10}, 0.75),
    "items": Served({"type": "array", "items": {"type": "integer"}, "minItems": 2, "maxItems": 4}, [1, 2, 3]),
    "prefixItems": Served(
        {
            "type": "array",
            "prefixItems": [{"const": 1}, {"type": "string", "maxLength": 3}],
            "items": False,
            "minItems": 2,
        },
        [1, "abc"],
    ),
    "prefixItems and items": Served(
        {"type": "array", "prefixItems": [{"type": "boolean"}], "items": {"type": "null"}, "maxItems": 4}, [True, None]
    ),
    "items false": Served({"type": "array", "items": False}, []),
    "items of draft 7": Served(
        {
            "$schema": "http://json-schema.org/draft-07/schema#",
            "items": [{"type": "integer"}],
            "additionalItems": False,
        },
        [1],
    ),
    "required": Served(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "string", "maxLength": 5}},
            "required": ["b"],
        },
        {"a": 1, "b": "x"},
    ),
    "required, not described": Served({"type": "object", "required": ["x"]}, {"x": 1}),
    "additionalProperties false": Served(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "null"}},
            "required": ["a"],
            "additionalProperties": False,
        },
        {"a": 5, "b": None},
    ),
    "additionalProperties": Served(
        {"type": "object", "properties": {"a": {"type": "null"}}, "additionalProperties": {"type": "integer"}},
        {"a": None, "z": 3},
    ),
    "patternProperties": Served(
        {"type": "object", "patternProperties": {"^a": {"type": "integer"}}, "additionalProperties": False}, {"ab": 1}
    ),
    "minProperties, maxProperties": Served(
        {"type": "object", "minProperties": 2, "maxProperties": 3, "additionalProperties": {"type": "integer"}},
        {"a": 1, "b": 2},
    ),
    "anyOf": Served({"anyOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]}, "abc"),
    "anyOf of objects": Served({"anyOf": [KIND_A, KIND_B]}, {"k": "b"}),
    "anyOf beside properties": Served(
        {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "anyOf": [{"required": ["a"]}, {"required": ["b"]}],
        },
        {"b": 1},
    ),
    "oneOf, disjoint": Served({"oneOf": [{"type": "integer"}, {"type": "string", "maxLength": 3}]}, 7),
    "oneOf, constants": Served({"oneOf": [{"const": "a"}, {"const": "b"}]}, "b"),
    "allOf": Served({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 9}]}, 9),
    "allOf of objects": Served(
        {
            "allOf": [
                {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"properties": {"b": {"const": 2}}, "required": ["b"]},
            ]
        },
        {"a": 1, "b": 2},
    ),
    "$ref": Served(
        {
            "type": "object",
            "properties": {"p": {"$ref": "#/$defs/digit"}},
            "required": ["p"],
            "additionalProperties": False,
            "$defs": {"digit": {"type": "integer", "minimum": 1, "maximum": 9}},
        },
        {"p": 4},
    ),
    "$ref beside others": Served(
        {"$ref": "#/$defs/a", "maximum": 5, "$defs": {"a": {"type": "integer", "minimum": 1}}}, 5
    ),
    "$ref, recursive": Served(
        {"$ref": "#/$defs/node", "$defs": {"node": NODE}}, {"v": 1, "next": {"v": 2, "next": None}}
    ),
    "$ref to an anchor": Served({"$ref": "#a", "$defs": {"a": {"$anchor": "a", "type": "integer"}}}, 3),
    "definitions": Served({"$ref": "#/definitions/a", "definitions": {"a": {"type": "boolean"}}}, True),
    "nested": Served(
        {
            "type": "object",
            "properties": {
                "o": {
                    "type": ["object", "null"],
                    "properties": {"i": {"type": "array", "items": {"type": "number"}, "maxItems": 2}},
                    "required": ["i"],
                    "additionalProperties": False,
                }
            },
            "required": ["o"],
            "additionalProperties": False,
        },
        {"o": {"i": [0.5, 2]}},
    ),
    "const, large": Served({"const": 9223372036854775807}, 9223372036854775807),
    "annotations": Served({"title": "T", "description": "d", "default": 3, "$comment": "c", "type": "integer"}, 1),
    "keywords of another type": Served({"maxLength": 2, "minimum": 5}, "ab"),
    "format date": Served({"type": "string", "format": "date"}, "2026-02-28"),
    "format ipv4": Served({"type": "string", "format": "ipv4"}, "10.0.0.1"),
    "format ipv6": Served({"type": "string", "format": "ipv6"}, "fe80::1"),
    "format uuid": Served({"type": "string", "format": "uuid"}, "123e4567-e89b-12d3-a456-426614174000"),
    "format email": Served({"type": "string", "format": "email"}, "ada@example.org"),
    "format date-time": Served({"type": "string", "format": "date-time"}, "2026-02-28T23:59:59Z"),
    "format time": Served({"type": "string", "format": "time"}, "23:59:59Z"),
    "format duration": Served({"type": "string", "format": "duration"}, "P1DT2H"),
    "format hostname": Served({"type": "string", "format": "hostname"}, "example.org"),
    "format uri": Served({"type": "string", "format": "uri"}, "https://example.org/a?b=c"),
}

REFUSED: dict[str, tuple[str, str]] = {
    "not": ('{"not": {"type": "integer"}}', "not"),
    "if": ('{"if": {"type": "integer"}, "then": {"minimum": 3}}', "if"),
    "contains": ('{"type": "array", "contains": {"const": 1}}', "contains"),
    "minContains": ('{"type": "array", "contains": {"const": 1}, "minContains": 2}', "minContains"),
    "maxContains": ('{"type": "array", "contains": {"const": 1}, "maxContains": 2}', "maxContains"),
    "unevaluatedItems": ('{"type": "array", "unevaluatedItems": false}', "unevaluatedItems"),
    "uniqueItems": ('{"type": "array", "uniqueItems": true}', "uniqueItems"),
    "propertyNames": ('{"type": "object", "propertyNames": {"maxLength": 2}}', "propertyNames"),
    "dependentRequired": ('{"type": "object", "dependentRequired": {"a": ["b"]}}', "dependentRequired"),
    "dependentSchemas": ('{"dependentSchemas": {"a": {"required": ["b"]}}}', "dependentSchemas"),
    "unevaluatedProperties": ('{"type": "object", "unevaluatedProperties": false}', "unevaluatedProperties"),
    "$dynamicRef": ('{"$dynamicRef": "#x"}', "$dynamicRef"),
    "remote $ref": ('{"$ref": "http://example.com/x.json"}', "http://example.com/x.json"),
    "oneOf, overlapping": ('{"oneOf": [{"type": "integer"}, {"type": "number", "minimum": 2}]}', "oneOf"),
    "unknown format": ('{"type": "string", "format": "weird"}', "weird"),
    "format regex": ('{"type": "string", "format": "regex"}', "regex"),
    "look-ahead": ('{"type": "string", "pattern": "(?=a)b"}', "look"),
    "unknown type": ('{"type": "foo"}', "foo"),
    "never": ('{"type": "string", "minLength": 3, "maxLength": 2}', "minLength"),
    "false": ("false", "object"),
    "a list": ("[1]", "object"),
    "no JSON": ('{"type":', "not JSON"),
    "not a number": ('{"type": "number", "minimum": NaN}', "NaN"),
    "half a surrogate pair": ('{"const": "\\ud800"}', "escape"),
    "nested too deeply": ('{"items":' * 3000 + "{}" + "}" * 3000, "deep"),
    "nested a bit too deeply": ('{"items":' * 200 + "{}" + "}" * 200, "recursion"),
    "a schema that is itself": ('{"$ref": "#"}', "no answer"),
    "too many remainders": ('{"type": "integer", "multipleOf": 1000003}', "multipleOf"),
    "too many remainders, huge": ('{"type": "integer", "multipleOf": 1e18}', "multipleOf"),
    "a number of more than 64 bits": ('{"type": "integer", "enum": [1, 9223372036854775808]}', "64 bits"),
    "a number of many more bits": ('{"type": "integer", "const": 1e300}', "64 bits"),
    "too many remainders, fraction": ('{"items": [{"type": "number", "multipleOf": 0.1234567}]}', "multipleOf"),
    "options of the library": ('{"not": {}, "x-guidance": {"lenient": true}}', "x-guidance"),
    "too large": ('{"description": "' + "x" * 131072 + '"}', "bytes"),
    "empty": (" ", "empty"),
}
"""Text of a schema, and what the refusal has to name."""
