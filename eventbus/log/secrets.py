"""What looks like a secret, and so has no place in a log: by its name, or by itself."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Final

__all__ = ["is_secret_name", "is_secret_value", "masked"]

_NAME: Final = re.compile(
    r"(api|access|private|secret)key|secret|passw|pwd|credential|auth|bearer|cookie|header|session|token$"
)
_VALUE: Final = re.compile(
    r"://[^/\s]*@|\bbearer\b|\bsk-|\bhf_|(key|token|secret|password)=|^(proxy-)?authorization$|^cookie$|^x-api-key$",
    re.IGNORECASE,
)


def is_secret_name(name: str) -> bool:
    """Such as "api_key", "X-Api-Key", "hf_token"."""
    return _NAME.search(re.sub(r"[-_\s]", "", name).lower()) is not None


def is_secret_value(value: str) -> bool:
    """Such as "Bearer ...", or an address with a password in it."""
    return _VALUE.search(value) is not None


def masked(arguments: Iterable[str]) -> list[str]:
    """A command line without the values of its secrets: `--api-key ***`, `--api-key=***`."""
    shown: list[str] = []
    follows = False
    for argument in arguments:
        name, equals, _ = argument.partition("=")
        if equals and is_secret_name(name):
            shown.append(f"{name}=***")
        elif (follows and not argument.startswith("-")) or is_secret_value(argument):
            shown.append("***")
        else:
            shown.append(argument)
        follows = argument.startswith("-") and not equals and is_secret_name(name)
    return shown
