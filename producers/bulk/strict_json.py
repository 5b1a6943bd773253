"""JSON as others can read it too: no NaN, no half of a surrogate pair."""

import json
from typing import Any, NoReturn


def _no_number(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


# raises ValueError, or RecursionError
decode = json.JSONDecoder(parse_constant=_no_number).decode


def is_text(values: Any) -> bool:
    """Whether it can be written: an escape may be half of a surrogate pair."""
    try:
        json.dumps(values, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


def reason(error: ValueError | RecursionError) -> str:
    """What is wrong, without any of the text, which the error's own message may quote."""
    if isinstance(error, json.JSONDecodeError):
        return f"{error.msg} at character {error.pos:,}"
    if isinstance(error, RecursionError):
        return "nested too deep"
    return "a number that JSON does not have, or too long a one"
