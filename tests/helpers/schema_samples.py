"""Schemas of the kinds that people bring: of code generators, of public registries, written by hand."""

from __future__ import annotations

from typing import Any

_SCALAR = {"type": ["string", "number", "boolean"], "maxLength": 5}
_NAMES = {"type": "array", "items": {"$ref": "#/definitions/name"}}

SAMPLES: dict[str, Any] = {
    "pydantic, discriminated": {
        "$defs": {
            "Cat": {
                "properties": {
                    "kind": {"const": "cat", "default": "cat", "title": "Kind", "type": "string"},
                    "lives": {"anyOf": [{"type": "integer", "maximum": 9}, {"type": "null"}], "default": None},
                },
                "required": ["kind"],
                "title": "Cat",
                "type": "object",
            },
            "Dog": {
                "properties": {
                    "kind": {"const": "dog", "title": "Kind", "type": "string"},
                    "friends": {"items": {"$ref": "#/$defs/Cat"}, "title": "Friends", "type": "array", "maxItems": 2},
                },
                "required": ["kind", "friends"],
                "title": "Dog",
                "type": "object",
            },
            "Colour": {"enum": ["red", "green"], "title": "Colour", "type": "string"},
        },
        "properties": {
            "pet": {
                "discriminator": {"mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}, "propertyName": "kind"},
                "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
                "title": "Pet",
            },
            "colour": {"allOf": [{"$ref": "#/$defs/Colour"}], "default": "red"},
            "seen": {"format": "date-time", "title": "Seen", "type": "string"},
            "price": {"anyOf": [{"type": "number", "exclusiveMinimum": 0}, {"type": "string", "pattern": "^\\d+$"}]},
        },
        "required": ["pet", "seen"],
        "title": "Sighting",
        "type": "object",
    },
    "OpenAPI components": {
        "$ref": "#/components/schemas/Order",
        "components": {
            "schemas": {
                "Order": {
                    "type": "object",
                    "required": ["id", "status"],
                    "properties": {
                        "id": {"type": "string", "format": "uuid"},
                        "status": {"type": "string", "enum": ["placed", "approved", "delivered"]},
                        "quantity": {"type": "integer", "format": "int32", "minimum": 1, "nullable": True},
                        "customer": {"$ref": "#/components/schemas/Customer"},
                    },
                    "additionalProperties": False,
                },
                "Customer": {
                    "type": "object",
                    "properties": {
                        "email": {"type": "string", "format": "email", "example": "a@b.c"},
                        "password": {"type": "string", "format": "password", "maxLength": 12},
                    },
                },
            }
        },
    },
    "workflow": {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "definitions": {
            "name": {"type": "string", "pattern": "^[_a-zA-Z][a-zA-Z0-9_-]*$", "maxLength": 12},
            "env": {"type": "object", "additionalProperties": _SCALAR},
            "step": {
                "type": "object",
                "additionalProperties": False,
                "properties": {"uses": {"type": "string", "maxLength": 20}, "env": {"$ref": "#/definitions/env"}},
                "required": ["uses"],
            },
            "runner": {"anyOf": [{"enum": ["ubuntu", "windows"]}, _NAMES]},
        },
        "type": "object",
        "properties": {
            "on": {"type": "array", "items": {"enum": ["push", "release"]}, "minItems": 1, "maxItems": 2},
            "jobs": {
                "type": "object",
                "patternProperties": {
                    "^[_a-z]{1,5}$": {
                        "type": "object",
                        "properties": {
                            "runs-on": {"$ref": "#/definitions/runner"},
                            "steps": {"type": "array", "items": {"$ref": "#/definitions/step"}, "maxItems": 2},
                        },
                        "required": ["runs-on"],
                    }
                },
                "additionalProperties": False,
                "minProperties": 1,
            },
        },
        "required": ["on", "jobs"],
    },
    "extended base": {
        "definitions": {"base": {"type": "object", "properties": {"id": {"type": "integer"}}, "required": ["id"]}},
        "allOf": [
            {"$ref": "#/definitions/base"},
            {"type": "object", "properties": {"label": {"type": "string", "maxLength": 6}}, "required": ["label"]},
        ],
    },
    "tree": {
        "type": "object",
        "properties": {"name": {"maxLength": 5}, "children": {"type": "array", "items": {"$ref": "#"}}},
        "required": ["name"],
    },
    "tuple of an older draft": {
        "$schema": "http://json-schema.org/draft-04/schema#",
        "type": "array",
        "items": [{"type": "integer", "minimum": 0, "exclusiveMinimum": True, "maximum": 5}, {"enum": ["a", None]}],
        "additionalItems": False,
        "minItems": 2,
    },
    "any value": True,
}
