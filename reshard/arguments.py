"""Checks of the arguments of public functions: old names still work, and errors for wrong calls
show the right call."""

from __future__ import annotations

import functools
import operator
import os
from collections.abc import Callable, Collection, Iterable, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import fields
from inspect import Parameter, signature
from types import FunctionType, MethodType
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import torch

from reshard.errors import FormatError, OptionError, did_you_mean, format_value, option_error, warn_renamed
from reshard.storage.base import Storage
from reshard.storage.opening import describe_wrong_path

__all__ = [
    "check_arguments", "check_options", "checked_step", "globs_of", "named_arguments", "no_attribute", "options_of",
    "renamed", "with_options",
]  # fmt: skip

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

P = ParamSpec("P")
R = TypeVar("R")
T = TypeVar("T", bound="DataclassInstance")
Named = TypeVar("Named")


def renamed(**names: str) -> Callable[[Named], Named]:
    """Let a function accept old names of its arguments, or a class old names of its attributes:
    `@renamed(deadline_s="timeout")`.

    Calls raise TypeError with a suggestion for an unknown argument and for one passed under both
    names. If a required argument is missing, or only a state or a path was passed, the error shows
    the intended call. `@renamed()` adds only these errors.
    """

    def decorate(it: Any) -> Any:
        if isinstance(it, type):
            for old, new in names.items():
                setattr(it, old, _Attribute(f"{it.__name__}.{old}", new))
            return it
        what = it.__qualname__.removesuffix(".__init__")

        @functools.wraps(it)
        def call(*args: Any, **kwargs: Any) -> Any:
            for old in names.keys() & kwargs.keys():
                new = names[old]
                if new in kwargs:
                    raise TypeError(f"{what}() got both {new}= and its old name {old}=: leave out {old}=")
                warn_renamed(f"{old}= of {what}()", f"{new}=")
                kwargs[new] = kwargs.pop(old)
            try:
                return it(*args, **kwargs)
            except TypeError:
                _refuse_call(what, it, args, kwargs)
                raise

        return call

    return decorate


def named_arguments(**names: str) -> Callable[[type[R]], type[R]]:
    """Let a class accept old names of its arguments and attributes, and suggest names for unknown
    arguments, as `renamed` does."""

    def decorate(kind: type[R]) -> type[R]:
        kind.__init__ = renamed(**names)(kind.__init__)  # type: ignore[method-assign]
        return renamed(**names)(kind)

    return decorate


def _refuse_call(what: str, it: Callable[..., Any], args: tuple[Any, ...], given: Mapping[str, Any]) -> None:
    """Raise a more helpful TypeError than Python's if the arguments of the call caused the error."""
    known = signature(it).parameters
    rest = [str(each.annotation) for each in known.values() if each.kind == each.VAR_KEYWORD]
    kinds = [it.__globals__.get(text.removeprefix("Unpack[").removesuffix("]")) for text in rest]
    names = [*known, *(name for kind in kinds for name in getattr(kind, "__annotations__", ()))]
    for name in given.keys() - {*names}:
        if name in _OF_OTHERS or not rest:
            raise _unexpected(what, name, names, (*given, *names[: len(args)])) from None
    both = ("state_dict", "path")
    if tuple(known)[:2] == both and any(isinstance(one, torch.optim.Optimizer) for one in args[1:2]):
        raise TypeError(f"{what}() takes one dict: write {_fix(what, args[1])}") from None
    by_name = [name for name, each in known.items() if each.kind == each.KEYWORD_ONLY]
    places = [name for name, each in known.items() if each.kind <= each.POSITIONAL_OR_KEYWORD]
    if by_name and len(args) > len(places):
        taken = ", ".join(name for name in places if name != "self") or "nothing"
        extra = args[len(places) :]
        such = "=, ".join(by_name[: len(extra)])
        words = f"{what}() takes only {taken} by position, but also got {format_value(extra[0])}"
        more = ". For both states: get_state_dict(model, optimizers)" * (what == "get_model_state_dict")
        raise TypeError(f"{words}: pass all others by name, such as {such}={more}") from None
    half = [*args, *(given[name] for name in both if name in given)]
    if tuple(known)[:2] == both and len(half) == 1 and not isinstance(half[0], Mapping):
        raise TypeError(_half(what, half[0])) from None
    needed = [name for name in (*places, *by_name) if known[name].default is Parameter.empty]
    if absent := [name for name in needed if name not in (*given, *places[: len(args)])]:
        call = ", ".join(f"{name}=..." if name in by_name else name for name in needed if name != "self")
        raise TypeError(f"{what}() was called without {' and '.join(absent)}: write {what}({call})") from None


def with_options(options: type[DataclassInstance], *but: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Add the fields of `options`, except those named in `but`, to the signature of a function that
    accepts them by keyword."""

    def told(verb: Callable[P, R]) -> Callable[P, R]:
        own = [each for each in signature(verb).parameters.values() if each.kind != each.VAR_KEYWORD]
        by_name = [
            Parameter(each.name, Parameter.KEYWORD_ONLY, default=each.default, annotation=each.type)
            for each in fields(options)
            if each.name not in but
        ]
        verb.__dict__["__signature__"] = signature(verb).replace(parameters=[*own, *by_name])
        return verb

    return told


def options_of(verb: str, options: type[T], given: Mapping[str, Any]) -> T:
    """Return the options that a caller passed by name. Raises TypeError for an unknown name, with a
    suggestion."""
    known = [each.name for each in fields(options)]
    for name in given.keys() - set(known):
        raise _unexpected(verb, name, known)
    return options(**given)


_OF_OTHERS = {
    "alone": "leave it out: save, async_save, load, and convert have it; calls with process_group= need all its ranks",
    "timeout": "leave it out: only calls whose ranks wait for each other have it, such as save, load, and compare",
    "checkpoint_id": "pass the path without a name: save(state_dict, path), load(state_dict, path), open(path)",
    "no_dist": "write alone=True",
    "allow_partial_load": "write strict=False",
    "device": "tensors are filled on the device they are on",
    "compress": "data are stored uncompressed",
    "format": "reshard.save writes its own format; reshard.convert(path, target, format=...) writes others",
    "blocking": "reshard.async_save saves in the background",
    "use_async": "reshard.async_save saves in the background",
    "full_state_dict": "pass options=reshard.StateDictOptions(full_state_dict=True)",
    "cpu_offload": "pass options=reshard.StateDictOptions(cpu_offload=True)",
    "options": "pass every= and keep=, as in CheckpointManager(root, every=Every(steps=500), keep=Keep(last=3))",
    "num_replicas": "write parts=",
    "rank": "write part=",
    "planner": "strict=, dtype_policy=, and mapping= of load replace planners; reshard.dcp takes DCP's planners",
    "select": 'pass reshard.open(path).select(...), or load a state with only these keys and strict="subset"',
    "storage_reader": "the second argument is a path or URL; reshard.dcp takes DCP's readers",
    "storage_writer": "the second argument is a path or URL; reshard.dcp takes DCP's writers",
    "strict": "reshard.load has it; to set a part, pass options=reshard.StateDictOptions(strict=False); in "
    "reshard.dcp, pass planner=DefaultLoadPlanner(allow_partial_load=True)",
    "step": "pass the folder of the step, or reshard.open(path, step=...)",
    "max_to_keep": "write Keep(last=...)",
    "save_interval_steps": "write every=Every(steps=...)",
    "framework": "leave it out: tensors are torch's",
    "map_location": "tensors are filled on the device they are on",
    "weights_only": "leave it out: no code from a checkpoint runs",
}
"""Arguments of other functions of reshard, torch, and Orbax, and what to write instead."""


def _unexpected(verb: str, name: str, known: Iterable[str], given: Collection[str] = ()) -> TypeError:
    words = [word for word in known if word != "self"]
    is_other = name in _OF_OTHERS and f"{name}s" not in words
    near = did_you_mean(name, [word for word in words if word not in given])
    meant = f": {_OF_OTHERS[name]}" if is_other else near or f": it takes {', '.join(words)}"
    return TypeError(f"{verb}() got an unexpected keyword argument {name!r}{meant}")


def _half(verb: str, given: Any) -> str:
    what = repr(os.fspath(given)) if isinstance(given, (str, os.PathLike)) else type(given).__name__
    if verb == "load":
        fix = f"pass the state to fill first. To read without one: reshard.open({what})"
    else:
        fix = f"pass the state first: reshard.{verb}({{'model': reshard.get_model_state_dict(model)}}, {what})"
    return f"{verb}(state_dict, path) was called with {what} only: {fix}"


_KINDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "workers threads memory_budget_bytes divide_above_bytes ranks_per_file ranks_per_host max_inflight_bytes "
    "full_every sync_every": (
        lambda value: type(value) is int and value >= 1,
        "an integer >= 1",
    ),
    "rtol atol": (lambda value: isinstance(value, int | float) and value >= 0, "a number >= 0"),
    "step": (lambda value: isinstance(value, int | None), "an integer"),
    "timeout": (lambda value: isinstance(value, int | float | None), "a number of seconds, or None"),
    "labels": (
        lambda value: value is None or (type(value) in (tuple, list) and len(value) == 2),
        "a pair of strings",
    ),
    "mapping": (
        lambda value: (
            all(isinstance(name, str) for pair in value.items() for name in pair)
            if isinstance(value, Mapping)
            else value is None or hasattr(value, "stages")
        ),
        "a dict of names or a reshard.mapping.Mapping, such as Mapping([Rename('old', 'new')])",
    ),
    "hints": (lambda value: isinstance(value, Mapping | None), "a dict, such as {'vocab_size': 50257}"),
    "views": (lambda value: isinstance(value, Iterable), "a list of views"),
    "key": (lambda value: hasattr(value, "secret"), "a Key, such as reshard.fingerprints.Key(secret)"),
    "histograms": (lambda value: isinstance(value, str), "a glob, such as '*.weight'"),
}
"""Allowed values of options, by option names. All other options are flags, and must be bools: "no"
would count as True."""


def check_options(**given: Any) -> None:
    """Raise OptionError if the value of an option is not allowed."""
    flag = lambda value: isinstance(value, bool), "True or False"
    for name, value in given.items():
        fits, words = next((kind for names, kind in _KINDS.items() if name in names.split()), flag)
        if not fits(value):
            raise OptionError(f"{name} must be {words}, got {format_value(value)}")


def checked_step(step: object, call: str) -> int:
    """Return the step number as an int. Accepts numpy integers. Raises OptionError for other
    values, with the correct form of `call`."""
    number = -1
    if not isinstance(step, bool) and hasattr(step, "__index__"):
        with suppress(TypeError):  # from __index__ of other values, such as tensors of several elements
            number = operator.index(step)
    if number < 0:
        swapped = ": the arguments are swapped" * isinstance(step, Mapping)
        raise OptionError(f"step must be an integer >= 0, as in {call}, got {format_value(step)}{swapped}")
    return number


def no_attribute(it: object, name: str, meant: Mapping[str, str]) -> AttributeError:
    """Return the error for a name that an object does not have. `meant` says what to write for
    names from other libraries."""
    fix = f": {meant[name]}" if name in meant else did_you_mean(name, [each for each in dir(it) if each[0] != "_"])
    return AttributeError(f"{type(it).__name__!r} object has no attribute {name!r}{fix}", name=name, obj=it)


def check_arguments(verb: str, state: Any, path: Any, *paths: type) -> bool:
    """Return True if the state contains models, optimizers, generators, or other objects with
    `state_dict` and `load_state_dict`.

    Raises OptionError for swapped arguments, for an argument of the wrong class as `path`, and for a module, an
    optimizer, or a tuple (such as the result of `get_state_dict`) instead of a dict. `paths` are
    further classes that are accepted as a path.
    """
    paths = (str, os.PathLike, Storage, *paths)
    if isinstance(state, paths) and not isinstance(path, paths):
        raise _refused(
            f"the path is the second argument: {verb}(state_dict, {state!r}), not {verb}({state!r}, state_dict)"
        )
    if not isinstance(path, paths):
        kinds = "path, URL, Storage, or open Checkpoint" if len(paths) > 3 else "path, URL, or Storage"
        raise _refused(f"{verb}(state_dict, path) needs a {kinds}, got {describe_wrong_path(path)}")
    if isinstance(state, FunctionType | MethodType):
        raise _refused(f"the first argument of {verb} is a function or method: call it, {state.__name__}()")
    if isinstance(state, torch.nn.Module | torch.optim.Optimizer | tuple):
        name = "a tuple" if isinstance(state, tuple) else f"the {type(state).__name__} itself"
        raise _refused(f"{verb} takes a dict, but the first argument is {name}. Write: {_fix(verb, state)}")
    from reshard.live.state import is_object  # not needed to open a checkpoint

    return isinstance(state, MutableMapping) and is_object(state, within=True)


_refused = functools.partial(option_error, was=FormatError)


def _fix(verb: str, value: Any) -> str:
    """Return the intended call."""
    if isinstance(value, torch.nn.Module):
        return f"reshard.{verb}({{'model': model}}, path), or pass reshard.get_model_state_dict(model)"
    return f"reshard.{verb}({{'model': model, 'optim': optimizer}}, path)"


class _Attribute:
    def __init__(self, old: str, new: str) -> None:
        self._old, self._new = old, new

    def __get__(self, instance: Any, owner: type) -> Any:
        warn_renamed(self._old, self._new)
        return getattr(owner if instance is None else instance, self._new)


def globs_of(select: str | Iterable[str] | None) -> tuple[str, ...] | None:
    """Return `select` as a tuple of globs, or None if everything is selected. Raises OptionError."""
    globs = (select,) if isinstance(select, str) else select
    if globs is not None and not isinstance(globs, Iterable):
        raise OptionError(f"select must be a glob or a list of globs, got {format_value(select)}")
    globs = None if globs is None else tuple(globs)
    if odd := [glob for glob in globs or () if not isinstance(glob, str)]:
        raise OptionError(f"select must be a glob or a list of globs, but contains {odd[0]!r}")
    if globs == ():
        raise OptionError("select is empty, which leaves nothing: leave it out to take everything")
    return globs
