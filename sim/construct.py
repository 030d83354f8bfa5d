"""Find and construct what a user has named and given parameters."""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from schedlab.sim.errors import SchedlabError, SpecError, described, nearest
from schedlab.sim.user_modules import import_own, places

T = TypeVar("T")
Named = TypeVar("Named", bound=Callable[..., Any])
AnyNamed = TypeVar("AnyNamed", bound=Callable[..., Any])


class Registry(Generic[Named]):
    """What stands in the files of one package under a name of its own.

    A file of that package that registers something is all there is to do: whoever asks for a name
    imports them all.

    Parameters
    ----------
    what : str
        How messages call one, e.g. ``"policy"``.
    package : str
        Where they are, e.g. ``"schedlab.policies"``; packages inside it are left out.
    own : str
        What a user may name instead, e.g. ``"my_module:MyPolicy"``.
    """

    registered_elsewhere: ClassVar[set[str]] = set()
    """Names of any registry that modules of the user's have given: other processes lack them."""

    def __init__(self, what: str, package: str, own: str) -> None:
        self._what = what
        self._package = package
        self._own = own
        self.found: dict[str, Named] = {}

    def register(self, name: str) -> Callable[[AnyNamed], AnyNamed]:
        """Make a class or function known under `name` (decorator).

        Raises
        ------
        ValueError
            If another one has the name.
        """

        def decorate(one: AnyNamed) -> AnyNamed:
            there: Callable[..., Any] = self.found.get(name, one)
            if there.__qualname__ != one.__qualname__:
                raise ValueError(f"{self._what} name {name!r} is taken by {there.__qualname__}")
            self.found[name] = one  # type: ignore[assignment]
            if not one.__module__.startswith("schedlab."):
                self.registered_elsewhere.add(name)
            return one

        return decorate

    def names(self) -> list[str]:
        """Return all names, sorted."""
        path = importlib.import_module(self._package).__path__
        for module in pkgutil.iter_modules(path, f"{self._package}."):
            if not module.ispkg:
                importlib.import_module(module.name)
        return sorted(self.found)

    def get(self, name: str) -> Named:
        """Return what has a name.

        Raises
        ------
        SpecError
            If nothing has; says the nearest name.
        """
        if name not in self.found and name not in self.names():
            hint = f"{nearest(name, sorted(self.found))} (or a path like {self._own})"
            hint = _classes_of_file(name) or hint
            raise SpecError(f"unknown {self._what} {name!r}; {hint}")
        return self.found[name]


def looked_in() -> list[Path]:
    """Return where files of the user's are looked for that an experiment names, in this order."""
    return [Path(place or ".") for place in (places().beside, places().working, None)]


def _classes_of_file(name: str) -> str:
    """Return which classes somebody may mean who names a file of Python; nothing if it is none."""
    path = Path(name if name.endswith(".py") else f"{name}.py")
    file = next((place / path for place in looked_in() if (place / path).is_file()), None)
    if file is None:
        return ""
    try:
        tree = ast.parse(file.read_bytes())
    except (OSError, SyntaxError, ValueError):
        return ""
    there = [f"{path.stem}:{one.name}" for one in tree.body if isinstance(one, ast.ClassDef)]
    return f"of {path} name the class: {', '.join(there)}" if there else ""


class HasKnobs(Protocol):
    """What a user may name and give parameters."""

    @classmethod
    def knobs(cls) -> Mapping[str, inspect.Parameter]:
        """Return the parameters of the constructor, by name."""


Knobbed = TypeVar("Knobbed", bound=HasKnobs)


class ClassRegistry(Registry[type[Knobbed]]):
    """Classes of one kind by name, or by ``module:Class`` for those that live elsewhere.

    Parameters
    ----------
    what, package, own : str
        As of `Registry`.
    base : type
        What a class that lives elsewhere must derive from.
    check : callable, optional
        Is given the path of such a class and the class, and raises SpecError if it cannot be used.
    """

    def __init__(
        self,
        what: str,
        package: str,
        own: str,
        base: type[Knobbed],
        check: Callable[[str, type[Knobbed]], None] | None = None,
    ) -> None:
        super().__init__(what, package, own)
        self._base = base
        self._check = check

    def class_of(self, name: str) -> type[Knobbed]:
        """Return the class of a registered name or of a ``module:Class`` path.

        Raises
        ------
        SpecError
            If there is none, or it cannot be used; names the nearest one.
        """
        if ":" not in name:
            return self.get(name)
        cls = import_class(self._what, name, self._base)
        if self._check is not None:
            self._check(name, cls)
        return cls

    def make(self, name: str, /, **params: Any) -> Knobbed:  # noqa: ANN401 - whatever it takes
        """Construct one by name.

        Raises
        ------
        SpecError
            If there is none of that name, or it does not take these parameters.
        """
        cls = self.class_of(name)
        return construct(f"{self._what} {name!r}", cls, cls.knobs(), params)


def check_call(what: str, method: Callable[..., Any], num_arguments: int, given: str = "") -> None:
    """Raise SpecError if a method cannot be called with so many arguments.

    Parameters
    ----------
    what : str
        How the message calls it, e.g. ``"router 'mine:Own': route"``.
    method : callable
        It, of the class, so that `self` is not among the arguments.
    num_arguments : int
        How many it is called with.
    given : str, optional
        What they are; their number if not said.
    """
    signature = inspect.signature(method)
    try:
        signature.bind(*range(num_arguments + 1))
    except TypeError:
        given = given or f"{num_arguments} arguments"
        raise SpecError(f"{what}() is called with {given}, and takes {signature}") from None


def construct(
    what: str,
    cls: Callable[..., T],
    knobs: Iterable[str],
    params: Mapping[str, Any],
    *given: object,
) -> T:
    """Return ``cls(*given, **params)``, or say which parameter is wrong.

    Parameters
    ----------
    what : str
        How a message calls it, e.g. ``"policy 'sjf'"``.
    cls : callable
        What to construct.
    knobs : iterable of str
        The parameters that it takes.
    params : mapping
        The parameters that it is given.
    *given
        What it is given beside, whatever the user says.

    Raises
    ------
    SpecError
        If it does not take a parameter (names the nearest one), or refuses a value, or one that
        is annotated as a whole number is none.

    Examples
    --------
    >>> construct("number", complex, ["real", "imag"], {"real": 1.0})
    (1+0j)
    """
    known = list(knobs)
    for name in params:
        if name not in known:
            hint = nearest(name, known) if known else "it takes none"
            raise SpecError(f"{what} has no parameter {name!r}; {hint}")
    for name in known:
        if name not in params and name in _required(cls):
            raise SpecError(f"{what} needs a parameter {name!r}")
    try:
        return cls(*given, **_whole(what, cls, params))
    except SchedlabError:
        raise
    except (TypeError, ValueError) as error:
        raise SpecError(f"{what}: {error}") from error
    except (Exception, SystemExit) as error:
        raise SpecError(f"{what}: its constructor raised {described(error)}") from error


def _whole(what: str, cls: Callable[..., object], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters with 1e3 as 1000 where a whole number is asked for, and refuse 2.5."""
    try:
        known = inspect.signature(cls, eval_str=True).parameters if params else {}
    except (NameError, TypeError, ValueError):  # written in C, or annotated for the type checker
        return dict(params)
    made = dict(params)
    for name, value in params.items():
        if name not in known or known[name].annotation not in (int, int | None):
            continue
        if isinstance(value, float) and value.is_integer():
            made[name] = int(value)
        elif not isinstance(value, int | None):
            raise SpecError(f"{what}: {name} must be a whole number, got {value!r:.80}")
    return made


def _required(cls: Callable[..., object]) -> list[str]:
    try:
        parameters = inspect.signature(cls).parameters.values()
    except ValueError:  # some that are written in C have none
        return []
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.default is p.empty and p.kind in kinds]


def import_class(what: str, path: str, base: type[T]) -> type[T]:
    """Return the class that ``module:Class`` names.

    Parameters
    ----------
    what : str
        How a message calls it, e.g. ``"policy"``.
    path : str
        Module and class.
    base : type
        What the class must derive from.

    Raises
    ------
    SpecError
        If the module cannot be imported, or has no such class.
    """
    module_name, _, class_name = path.partition(":")
    try:
        module = import_own(module_name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        # Whatever a module of the user's raises is a fault of that module, also exit().
        raise SpecError(
            f"{what} {path!r}: cannot import {module_name!r}: {described(error)}"
        ) from error
    cls = getattr(module, class_name, None)
    if not (isinstance(cls, type) and issubclass(cls, base)):
        there = [
            name for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, base)
            and value.__module__ == module.__name__
        ]  # fmt: skip
        hint = f"; {nearest(class_name, there)}" if there else ""
        raise SpecError(
            f"{what} {path!r}: {with_file(module)} has no {base.__name__} class "
            f"{class_name!r}{hint}"
        )
    return cls


def with_file(module: ModuleType) -> str:
    """Return the name of a module and where it was found; a hint if that is Python's own library.

    Examples
    --------
    >>> with_file(importlib.import_module("sys"))
    "sys (built in; Python's own go first, so give yours another name)"
    """
    name = module.__name__
    file = getattr(module, "__file__", None) or "built in"
    if name.partition(".")[0] in sys.stdlib_module_names:
        file += "; Python's own go first, so give yours another name"
    return f"{name} ({file})"
