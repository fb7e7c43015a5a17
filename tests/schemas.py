"""Seeded JSON schemas whose documents have bounded length, for the structured-output tests."""

import random

LETTERS = "abcdefgh"


def bounded_schema(seed: int) -> dict:
    """Returns an object schema; every document of it is shorter than about 400 characters."""
    rng = random.Random(seed)
    return _object(rng, depth=0)


def _object(rng: random.Random, depth: int) -> dict:
    names = rng.sample(LETTERS, rng.randint(1, 3))
    return {
        "type": "object",
        "properties": {name: _value(rng, depth + 1) for name in names},
        "required": [name for name in names if rng.random() < 0.7],
        "additionalProperties": False,
    }


def _value(rng: random.Random, depth: int) -> dict:
    kinds = ["string", "integer", "boolean", "enum", "const", "number", "pattern", "null"]
    if depth < 3:
        kinds += ["object", "array", "anyOf"]
    match rng.choice(kinds):
        case "string":
            return {
                "type": "string",
                "minLength": rng.randint(0, 2),
                "maxLength": rng.randint(3, 8),
            }
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 1000)}
        case "number":
            return {"type": "number", "minimum": 0, "maximum": 9, "multipleOf": 0.5}
        case "boolean":
            return {"type": "boolean"}
        case "null":
            return {"type": "null"}
        case "enum":
            return {"enum": rng.sample(["red", "green", "blue", 1, 2, True, None], 3)}
        case "const":
            return {"const": rng.choice(["x", 7, False])}
        case "pattern":
            return {"type": "string", "pattern": f"^[a-c]{{1,{rng.randint(2, 5)}}}$"}
        case "array":
            most = rng.randint(1, 3)
            return {"type": "array", "items": _value(rng, depth + 1), "maxItems": most}
        case "anyOf":
            return {"anyOf": [_value(rng, depth + 1), _value(rng, depth + 1)]}
        case _:
            return _object(rng, depth)
