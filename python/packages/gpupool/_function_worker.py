"""Workers that call functions: each task is `(function, arguments, keywords)`, each result a `CallResult`."""

from __future__ import annotations

from typing import Any, Callable, NamedTuple, Optional

from gpupool._worker import WorkerFunctions


class CallResult(NamedTuple):
    """Return value or error of a call."""

    value: Any
    error: Optional[BaseException] = None
    #: The error's traceback in the worker, as Python prints it.
    traceback: str = ""


def start_worker(hello: dict[str, Any]) -> WorkerFunctions:
    """Return the functions of a worker that calls functions."""
    return WorkerFunctions(_call_function, lambda: None)


def _call_function(task: tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]) -> CallResult:
    function, arguments, keywords = task
    try:
        return CallResult(function(*arguments, **keywords))
    except BaseException as error:
        import traceback

        text = "".join(traceback.format_exception(type(error), error, error.__traceback__))
        return CallResult(None, _picklable_error(error, text), text)


def _picklable_error(error: BaseException, text: str) -> BaseException:
    """Return the error, or a `RuntimeError` with its traceback if the error cannot be pickled."""
    import pickle

    try:
        pickle.loads(pickle.dumps(error))
        return error
    except Exception:
        return RuntimeError(text)
