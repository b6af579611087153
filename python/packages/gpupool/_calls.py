"""Workers that call functions: each task is `(function, arguments, keywords)`, each result an `Answer`."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional

from gpupool._worker import Work


class Answer(NamedTuple):
    """What a call came to."""

    value: Any
    error: Optional[BaseException] = None
    #: How Python would print the error, in the worker.
    traceback: str = ""


def start(hello: dict[str, Any]) -> Work:
    """What such a worker does."""
    return Work(_call, lambda: None)


def _call(task: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> Answer:
    function, arguments, keywords = task
    try:
        return Answer(function(*arguments, **keywords))
    except BaseException as error:
        import traceback

        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return Answer(None, _portable(error, text), text)


def _portable(error: BaseException, text: str) -> BaseException:
    """The error, or one that says the same where it cannot travel."""
    import pickle

    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(text)
