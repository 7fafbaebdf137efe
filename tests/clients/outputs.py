"""Outputs of scripted models in the tests of clients."""

from __future__ import annotations

import json
from typing import Any

WEATHER_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Weather of a city.", "parameters": WEATHER_SCHEMA},
}


def call(tool: str, /, **arguments: Any) -> str:
    """Return a call in the model's form."""
    data = json.dumps({"name": tool, "arguments": arguments})
    return f"<tool_call>\n{data}\n</tool_call>"


def entries(*more: dict[str, Any]) -> list[dict[str, Any]]:
    """Entries for a conversation about the weather, behind ``more``."""
    return [
        *more,
        {"match": {"contains": ["<tool_response>", "21"]}, "text": "It is 21 degrees.", "repeat": True},
        {
            "match": "two cities",
            "text": "I look.\n"
            + call("get_weather", city="Oslo")
            + "\n"
            + call("get_weather", city="Bergen"),
            "repeat": True,
        },
        {"match": "weather", "text": call("get_weather", city="Paris"), "repeat": True, "chunks": 3},
        {"match": "think", "text": "<think>\nTwo and two.\n</think>\n\nFour.", "repeat": True},
        {"match": "json", "text": '{"name": "Ann", "age": 7}', "repeat": True},
        {"match": "count", "text": "1 2 3 4 5", "num_cached": 16, "repeat": True},
        {"match": "slow", "text": "x" * 500, "delay_ms": 50, "repeat": True},
    ]
