"""Which values of Python are flags, numbers, integers and names.

- A flag is True, False, NumPy's bool, or the integer 0 or 1.
- A number is what `float()` takes, an integer what `operator.index()` takes, of Python or NumPy: no
  flag, and no array, which may lie on a GPU and would lose its gradient.
- None stands for an option that is not given where the signature has None, nowhere else.

The extension module (python/native/fields.cpp) has the same rule. Here it is for what Python looks
at before, and in a form that torch.compile can follow.
"""

import operator
from collections.abc import Sequence
from typing import Any, NoReturn

from onchip import _native
from onchip._text import nearest
from onchip.errors import InvalidArgument

_FLAGS = ("bool", "bool_")
_WORD = 1 << 63


def described(value: object) -> str:
    """For "got": never by the repr of a foreign type, which may copy an array from a device."""
    if isinstance(value, type):
        return value.__name__
    if type(value) is tuple and len(value) <= 4:
        members = ", ".join(_native.described(x) for x in value)
        return f"({members},)" if len(value) == 1 else f"({members})"
    return _native.described(value)


def refuse(op: str, name: str, value: object, wanted: str) -> NoReturn:
    raise InvalidArgument(f"{op}: {name}: got {described(value)}, wanted {wanted}")


def _is_scalar(value: object) -> bool:
    return type(value).__name__ not in _FLAGS and not hasattr(type(value), "__dlpack__")


def _index(value: Any) -> int | None:
    if not _is_scalar(value):
        return None
    if isinstance(value, int):
        return value
    try:
        return operator.index(value)
    except Exception:
        return None


def flag(op: str, name: str, value: Any) -> bool:
    if type(value).__name__ in _FLAGS:
        return bool(value)
    number = _index(value)
    if number is None or number not in (0, 1):
        refuse(op, name, value, "True or False")
    return number == 1


def integer(op: str, name: str, value: Any) -> int:
    number = _index(value)
    if number is None or not -_WORD <= number < _WORD:
        refuse(op, name, value, "an integer of 64 bits")
    return number


def count(op: str, name: str, value: Any, smallest: int = 1) -> int:
    """Of heads, channels, .."""
    number = integer(op, name, value)
    if number < smallest:
        refuse(op, name, value, f"at least {smallest}")
    return number


def number(op: str, name: str, value: Any) -> float:
    kind = type(value)
    if not _is_scalar(value) or not (hasattr(kind, "__float__") or hasattr(kind, "__index__")):
        refuse(op, name, value, "a number")  # float() alone would read a text
    if not isinstance(value, float):
        try:
            value = float(value)
        except OverflowError:
            refuse(op, name, value, "a finite number")
        except Exception:
            refuse(op, name, value, "a number")
    if value != value:
        refuse(op, name, value, "a number that is not NaN")
    made: float = value
    return made


def text(op: str, name: str, value: Any) -> str:
    if not isinstance(value, str) or not value or "\0" in value or not value.isascii():
        refuse(op, name, value, "a name")
    return value


def choice(op: str, name: str, value: Any, choices: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        wanted = " or ".join(f'"{one}"' for one in choices)
        refuse(
            op, name, value, wanted + (nearest(value, choices) if isinstance(value, str) else "")
        )
    return value


def pair(op: str, name: str, value: Any, wanted: str) -> tuple[Any, Any]:
    """Of a sequence in order: a set, say, has two members but no first, and a text no numbers."""
    if not isinstance(value, (tuple, list)) or len(value) != 2:
        refuse(op, name, value, wanted)
    first, second = value
    return first, second
