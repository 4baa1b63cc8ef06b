"""Policies from outside of this repository: what they raise, and what they answer wrongly, in one line.

    policy my_policies.broken:Fifo failed in victims(), broken.py:34: KeyError: 'boom'

The registry makes such a policy in `made`: the hooks of its class raise `PolicyError` in place of any other exception
from then on, and answers are checked (`policy_base`). Policies of this repository are not touched. An error of ours
(`TierMoeError`) that a policy lets through stays what it is.
"""

from __future__ import annotations

import functools
import inspect
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FunctionType, TracebackType
from typing import Any

from ...errors import PolicyError, TierMoeError, told

_HERE = __name__.partition(".")[0]
_LIBRARIES = ("site-packages", "dist-packages")
# (a hook's arguments) -> kind of its policy, and what checks its answers
Of = Callable[[tuple[Any, ...]], "tuple[str, Any] | None"]
_GUARDED = "__tiermoe_guarded__"  # set on what is guarded already; of an instance: its kind, and checks of answers


class Meter:
    """Seconds in the hooks of such policies, by kind; hooks that a hook calls are part of it.

    Attributes:
        clock: of the process that runs them, in seconds; None: nothing is counted.
    """

    def __init__(self) -> None:
        self.clock: Callable[[], float] | None = None
        self.spent_s: dict[str, float] = {}
        self._inside = False

    def reset(self) -> None:
        self.spent_s = {}

    def timed(self, kind: str, function: Callable[[], Any]) -> Any:
        """What a hook's call returns."""
        if self.clock is None or self._inside:
            return function()
        begin_s, self._inside = self.clock(), True
        try:
            return function()
        finally:
            self._inside = False
            self.spent_s[kind] = self.spent_s.get(kind, 0.0) + self.clock() - begin_s


METER = Meter()  # of this process


def failure(kind: str, hook: str, error: BaseException, code: CodeType | None = None) -> PolicyError:
    """What the user sees of a policy's exception.

    Args:
        kind: of the preset, module:Class. hook: as it is called.
        code: where it is, where the exception's traceback does not say; None: where it was raised.
    """
    where = (code.co_filename, code.co_firstlineno) if code is not None else _place(error, kind)
    at = "" if where is None else f", {Path(where[0]).name}:{where[1]}"
    text = told(error)
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return PolicyError(f"policy {kind} failed in {hook}{at}: {said}", "mend it, or choose another policy")


def called(kind: str, hook: str, function: Callable[..., Any], *args: Any, passing: Any = ()) -> Any:
    """What a function of the policy returns.

    Args:
        passing: exceptions that are no failure.

    Raises:
        PolicyError: it raised another.
    """
    try:
        return function(*args)
    except passing as error:
        if not _can_speak(error):
            raise failure(kind, hook, error) from error
        raise
    except BaseException as error:
        if not _is_failure(error, kind):
            raise
        raise failure(kind, hook, error) from error


def made(kind: str, cls: Any, base: type, answers: Any, *args: Any, passing: Any = ()) -> Any:
    """The policy that `cls.make` gives, guarded.

    Args:
        base: what it must be an instance of.
        answers: its methods have the names of hooks; they get a hook's answer and arguments, and return the answer,
            or raise what is wrong with it.
        args: of `make`.
        passing: exceptions of `make` that are no failure.

    Raises:
        PolicyError: it raised something else, or gave no policy.
    """
    try:
        policy = cls.make(*args)
    except passing:
        raise
    except BaseException as error:
        if not _is_failure(error, kind):
            raise
        names = [code.co_name for code, _ in _own_frames(error.__traceback__, kind)]
        if not names and isinstance(error, ValueError):
            raise  # a refusal of the class that it inherits from
        hook = "__init__()" if "__init__" in names or not names else "make()"
        raise failure(kind, hook, error) from error
    if not isinstance(policy, base):
        wrong = TypeError(f"it answered {shown(policy)}, not a {base.__name__}")
        raise failure(kind, "make()", wrong, _code(cls.make))
    if is_ours(type(policy)):
        return policy
    return _guarded(policy, kind, answers)


def guard_options(cls: type, kind: str) -> None:
    """Guard methods and properties of an options class, in place: processes exchange instances by the class's name.

    A ValueError of theirs is a refusal of the options, and stays.
    """
    hooks = _hooks(cls)
    for owner in cls.__mro__:
        if is_ours(owner) or owner.__module__.partition(".")[0] in ("builtins", "pydantic"):
            continue
        for name, value in list(vars(owner).items()):
            if name in hooks and isinstance(value, FunctionType | property):
                setattr(owner, name, _guard(value, f"Options.{name}", lambda _: (kind, None), ValueError))


def _guarded(policy: Any, kind: str, answers: Any) -> Any:
    """The policy, whose class has hooks that raise `PolicyError`."""
    cls, hooks = type(policy), _hooks(type(policy))
    for name in hooks:
        value = inspect.getattr_static(cls, name)
        if callable(value) or isinstance(value, property | functools.cached_property):
            type.__setattr__(cls, name, _guard(value, name))
    for name, value in list(vars(policy).items()):
        if name in hooks and callable(value):  # set in `__init__`
            vars(policy)[name] = _wrapped(value, lambda _: (kind, answers), name, f"{name}()", bound=True)
    vars(policy)[_GUARDED] = kind, answers
    return policy


def _hooks(cls: type) -> set[str]:
    """Public names of the classes of this repository that it inherits from, but for those that make instances."""
    ours = [owner for owner in cls.__mro__ if is_ours(owner)]
    named = {name: value for owner in ours for name, value in vars(owner).items() if not name.startswith("_")}
    return {name for name, value in named.items() if not isinstance(value, type | classmethod)}


def _of_policy(args: tuple[Any, ...]) -> tuple[str, Any] | None:
    found: tuple[str, Any] | None = vars(args[0]).get(_GUARDED)
    return found


def _guard(value: Any, name: str, of: Of = _of_policy, passing: Any = ()) -> Any:
    """What stands in a class in place of a method or property."""
    if isinstance(value, property):
        read = None if value.fget is None else _wrapped(value.fget, of, name, name, passing)
        return property(read, value.fset, value.fdel, value.__doc__)
    if isinstance(value, functools.cached_property):
        found = functools.cached_property(_wrapped(value.func, of, name, name, passing))
        found.__set_name__(object, name.rpartition(".")[2])
        return found
    if isinstance(value, staticmethod) or not hasattr(type(value), "__get__"):
        free = getattr(value, "__func__", value)
        value = functools.wraps(free)(lambda policy, *args, **given: free(*args, **given))
    return _wrapped(value, of, name, f"{name}()", passing)


def _wrapped(
    function: Callable[..., Any], of: Of, name: str, hook: str, passing: Any = (), bound: bool = False
) -> Callable[..., Any]:
    """The function, which raises `PolicyError`, with its answers checked. bound: it does not take the policy."""
    if hasattr(function, _GUARDED):
        return function

    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        policy = of(args)
        if policy is None:  # `made` has not given it (yet)
            return function(*args, **given)
        kind, answers = policy
        found = called(kind, hook, METER.timed, kind, functools.partial(function, *args, **given), passing=passing)
        check = getattr(answers, name, None)
        if check is None:
            return found
        try:
            return check(found, *args[0 if bound else 1 :], **given)
        except (TypeError, ValueError) as error:
            raise failure(kind, hook, error, _code(function)) from error

    setattr(call, _GUARDED, True)
    return call


def _can_speak(error: BaseException) -> bool:
    """Whether an exception can say what it is, to whom it passes."""
    try:
        str(error)
    except BaseException:
        return False
    return True


def is_ours(cls: Any) -> bool:
    return bool(cls.__module__.partition(".")[0] == _HERE)


def _is_failure(error: BaseException, kind: str) -> bool:
    """Whether an exception is the policy's own; not one of ours, or of a signal."""
    if isinstance(error, KeyboardInterrupt | SystemExit):  # a policy's would end a thread without a word
        return not _is_of_a_signal(error, kind)
    return not isinstance(error, TierMoeError)


def _is_of_a_signal(error: BaseException, kind: str) -> bool:
    """Whether a signal's handler raised it, amid a hook: a function of the program; or Python's own, which has no
    frame.
    """
    if isinstance(error, KeyboardInterrupt) and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        return True
    frames = list(_frames(error.__traceback__))
    if not frames or frames[-1][0].co_filename == __file__:  # raised in native code
        return True
    top = frames[-1][2].partition(".")[0]
    return top in (_HERE, "__main__") and not _is_own(frames[-1][0], frames[-1][2], kind)


def _frames(trace: TracebackType | None) -> Any:
    """(code, line, module) of each call, the outermost first."""
    while trace is not None:
        yield trace.tb_frame.f_code, trace.tb_lineno, str(trace.tb_frame.f_globals.get("__name__", ""))
        trace = trace.tb_next


def _is_own(code: CodeType, module: str, kind: str) -> bool:
    """Whether code is the policy's: of its package, or of no library."""
    top, file = module.partition(".")[0], code.co_filename
    if top == kind.partition(":")[0].partition(".")[0]:
        return True
    library = top == _HERE or top in sys.stdlib_module_names or any(f"/{part}/" in file for part in _LIBRARIES)
    return not library and not file.startswith("<") and module != "__main__"


def _own_frames(trace: TracebackType | None, kind: str) -> list[tuple[CodeType, int]]:
    return [(code, line) for code, line, module in _frames(trace) if _is_own(code, module, kind)]


def _place(error: BaseException, kind: str) -> tuple[str, int] | None:
    """File and line: the last ones in the policy's own code, else the last ones; None: nobody knows."""
    if isinstance(error, SyntaxError) and error.filename and error.lineno and Path(error.filename).is_file():
        return error.filename, error.lineno
    frames = _own_frames(error.__traceback__, kind) or [
        (code, line) for code, line, _ in _frames(error.__traceback__) if code.co_filename != __file__
    ]
    return (frames[-1][0].co_filename, frames[-1][1]) if frames else None


def _code(function: Any) -> CodeType | None:
    found = inspect.unwrap(function)
    return getattr(getattr(found, "__func__", found), "__code__", None)


def shown(value: object) -> str:
    """A wrong answer, for people."""
    return "None" if value is None else f"a {type(value).__name__}"
