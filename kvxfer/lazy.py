"""Attributes that are computed when they are first asked for, and kept.

As `functools.cached_property`, which in Python 3.11 holds one lock for all objects of a class while it computes for one
of them: a plan on the event loop would wait for a large one in a worker thread. Here two threads may compute the same
value; the last one is kept.
"""

from collections.abc import Callable
from typing import Any, Generic, Self, TypeVar, overload

__all__ = ["lazy"]

_T = TypeVar("_T")


class _Lazy(Generic[_T]):
    """A descriptor that its value takes the place of, in the object's own attributes."""

    def __init__(self, make: Callable[[Any], _T]) -> None:
        self.__doc__ = make.__doc__
        self._make = make
        self._name = make.__name__

    @overload
    def __get__(self, instance: None, owner: type | None = None) -> Self: ...

    @overload
    def __get__(self, instance: object, owner: type | None = None) -> _T: ...

    def __get__(self, instance: object | None, owner: type | None = None) -> Self | _T:
        if instance is None:
            return self
        value = instance.__dict__[self._name] = self._make(instance)
        return value


def lazy(make: Callable[[Any], _T]) -> _Lazy[_T]:
    """Decorate a method of no arguments; its objects need a `__dict__`, and their class may be a frozen dataclass."""
    return _Lazy(make)
