"""jinja2's sandbox with a bound on what one operation of a template can allocate.

jinja2 keeps a template from leaving the sandbox and bounds ``range``; this bounds operators, formats, methods and
filters that make a large text or number out of a few characters. Neither bounds the time that nested loops take.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial, wraps
from string import Formatter
from typing import Any

from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

MAX_SIZE = 1 << 24  # characters or items of one value, or an integer that may become a length: beyond any context
_MAX_BITS = 1 << 12  # of a number
_PRINTF = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")
_WIDE = re.compile(r"\d{4}")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """A sandbox for templates of strangers; raises SecurityError where a bound is passed."""

    intercepted_binops = frozenset({"*", "**", "%", "+"})

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        del self.globals["lipsum"]
        for name, check in _FILTER_CHECKS.items():
            self.filters[name] = _checked(self.filters[name], check)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Judge the operands, then operate."""
        _BINOP_CHECKS[operator](left, right)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 - as jinja2 has it
        """Judge the arguments of a method of a text or a number, then call."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str | bytes | int):
            _check_integers(*args, **kwargs)
            if check := _METHOD_CHECKS.get(__obj.__name__):
                check(owner, *args, **kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """``str.format`` as the sandbox has it, with its format specs judged."""
        safe = super().wrap_str_format(value)
        return None if safe is None else _checked(safe, partial(_check_format, value.__self__))


def _refuse(what: str) -> None:
    raise SecurityError(f"{what} in the chat template is too large")


def _size(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _check_sum(left: Any, right: Any) -> None:
    if _size(left) + _size(right) > MAX_SIZE:
        _refuse("a sum")


def _check_product(left: Any, right: Any) -> None:
    for sized, count in ((left, right), (right, left)):
        if isinstance(count, int) and _size(sized) * count > MAX_SIZE:
            _refuse("a product")
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_BITS:
        _refuse("a product")


def _check_power(left: Any, right: Any) -> None:
    if not (abs(left) <= 1 << 20 and abs(right) <= 64):
        _refuse("a power")


def _check_remainder(left: Any, right: Any) -> None:
    if isinstance(left, str | bytes):
        text = left if isinstance(left, str) else left.decode("latin-1")
        if any("*" in found or _WIDE.search(found) for pair in _PRINTF.findall(text) for found in pair):
            _refuse("a width or precision")
        values = right if isinstance(right, tuple) else right.values() if isinstance(right, Mapping) else [right]
        _check_fields(text, text.count("%"), values)


def _check_format(text: str, *args: Any, **kwargs: Any) -> None:
    specs = [spec or "" for _, name, spec, _ in Formatter().parse(text) if name is not None]
    if any("{" in spec or _WIDE.search(spec) for spec in specs):
        _refuse("a width or precision")
    values = [*args, *kwargs.values()]
    inner = [item for value in values if isinstance(value, dict) for item in value.values()]
    _check_fields(text, len(specs), values + inner)


def _check_fields(text: str, num_fields: int, values: Iterable[Any]) -> None:
    if len(text) + num_fields * max(map(_size, values), default=0) > MAX_SIZE:
        _refuse("a formatted text")


def _check_join(items: Any, separator: Any = "", *_: Any, **__: Any) -> None:
    if isinstance(items, list | tuple) and sum(map(_size, items)) + len(items) * _size(separator) > MAX_SIZE:
        _refuse("a joined text")


def _check_replace(text: Any, old: Any = "", new: Any = "", *_: Any, **__: Any) -> None:
    if isinstance(text, str) and len(text) + text.count(str(old)) * _size(new) > MAX_SIZE:
        _refuse("a replacement")


def _check_indent(text: Any, width: Any = 4, *_: Any, **__: Any) -> None:
    if (_size(width) or int(width or 0)) * (str(text).count("\n") + 1) > MAX_SIZE:
        _refuse("an indent")


def _check_integers(*args: Any, **kwargs: Any) -> None:
    if any(isinstance(value, int) and value > MAX_SIZE for value in (*args, *kwargs.values())):
        _refuse("a number")


_Check = Callable[..., None]
_BINOP_CHECKS: dict[str, _Check] = {
    "+": _check_sum,
    "*": _check_product,
    "**": _check_power,
    "%": _check_remainder,
}
_METHOD_CHECKS: dict[str, _Check] = {
    "join": lambda separator, items=(): _check_join(items, separator),
    "replace": _check_replace,
}
_FILTER_CHECKS: dict[str, _Check] = {
    "batch": _check_integers,
    "center": _check_integers,
    "format": lambda text, *args, **kwargs: _check_remainder(text, kwargs or args),
    "indent": _check_indent,
    "join": _check_join,
    "replace": _check_replace,
    "slice": _check_integers,
    "wordwrap": _check_integers,
}


def _checked(function: Callable[..., Any], check: _Check) -> Callable[..., Any]:
    """The function, its arguments judged before; what jinja2 itself passes to a filter first is not judged."""
    num_passed = int(hasattr(function, "jinja_pass_arg"))

    @wraps(function)
    def judged(*args: Any, **kwargs: Any) -> Any:
        check(*args[num_passed:], **kwargs)
        return function(*args, **kwargs)

    return judged
