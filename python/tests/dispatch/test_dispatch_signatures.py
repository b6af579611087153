"""Names, argument order, defaults and messages are as documented."""

from __future__ import annotations

import inspect
import os
import subprocess
import sys
from typing import Any

import pytest

import gpu_dispatch
from gpu_dispatch import BaseWorker, Dispatcher, protocol
from gpu_dispatch.ui import RichDispatcher

from dispatch_kit import CallbackRecorder


class NoOpWorker(BaseWorker):
    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        pass

    def process(self, data: Any) -> Any:
        return data


RUN = [
    ("generator", inspect.Parameter.empty),
    ("on_success", inspect.Parameter.empty),
    ("on_error", None),
    ("on_timeout", None),
    ("on_setup_fail", None),
    ("on_task_start", None),
    ("on_exit", None),
    ("base_seed", 42),
    ("task_timeout", None),
    ("total_tasks", None),
    ("setup_kwargs", inspect.Parameter.empty),
]


def signature_of(function: Any) -> list[tuple[str, Any]]:
    return [(name, parameter.default) for name, parameter in inspect.signature(function).parameters.items()]


def test_run_has_the_documented_arguments() -> None:
    assert signature_of(Dispatcher.run)[1:] == RUN
    shown = signature_of(RichDispatcher.run)[1:]
    assert [name for name, _ in shown] == [name for name, _ in RUN]
    assert shown[2:] == RUN[2:]


def test_the_constructor_has_the_documented_arguments() -> None:
    options = {"on_progress": None, "retries": 0, "joblog": None, "debug": False, "workers_per_gpu": 1, "mask": None}
    empty = inspect.Parameter.empty
    documented = [("worker_cls", empty), ("gpu_ids", empty), ("queue_size", 1024), ("suppress_worker_output", False)]
    assert signature_of(Dispatcher.__init__)[1:] == [*documented, *options.items()]
    parameters = inspect.signature(Dispatcher.__init__).parameters
    assert all(parameters[name].kind is inspect.Parameter.KEYWORD_ONLY for name in options)
    assert signature_of(RichDispatcher.__init__)[1:8] == [
        *documented[:3],
        ("show_ui", True),
        ("refresh_rate", 2.0),
        ("console", None),
        ("suppress_worker_output", True),
    ]


def test_setup_and_process_are_required_and_cleanup_is_optional() -> None:
    assert list(inspect.signature(BaseWorker.setup).parameters) == ["self", "gpu_id", "seed", "kwargs"]
    assert list(inspect.signature(BaseWorker.process).parameters) == ["self", "data"]
    assert BaseWorker.__abstractmethods__ == {"setup", "process"}
    with pytest.raises(TypeError):
        BaseWorker()  # type: ignore[abstract]
    assert NoOpWorker().cleanup() is None  # type: ignore[func-returns-value]


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("TaskSuccess", ["task_id", "data", "worker_id"]),
        ("TaskError", ["task_id", "error", "worker_id"]),
        ("TaskTimeout", ["task_id", "timeout", "worker_id"]),
        ("TaskStarted", ["task_id", "worker_id"]),
        ("SetupFailed", ["gpu_id", "error"]),
        ("CleanupFailed", ["gpu_id", "error"]),
    ],
)
def test_messages_have_the_fields_of_the_protocol(message: str, fields: list[str]) -> None:
    kind = getattr(protocol, message)
    assert list(inspect.signature(kind).parameters) == fields
    assert getattr(gpu_dispatch, message) is kind
    values = list(range(len(fields)))
    assert kind(*values) == kind(**dict(zip(fields, values)))


@pytest.mark.parametrize("wrong", [object, int, NoOpWorker(), "NoOpWorker", None])
def test_a_worker_class_must_inherit_from_base_worker(wrong: Any) -> None:
    with pytest.raises(TypeError, match="^worker_cls must inherit from BaseWorker, got "):
        Dispatcher(wrong, [0])


@pytest.mark.parametrize("empty", [[], (), range(0)])
def test_an_empty_gpu_list_is_rejected(empty: Any) -> None:
    with pytest.raises(ValueError, match="^gpu_ids cannot be empty$"):
        Dispatcher(NoOpWorker, empty)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"gpu_ids": [-1]}, "gpu_ids"),
        ({"gpu_ids": ["0"]}, "gpu_ids"),
        ({"queue_size": 0}, "queue_size"),
        ({"queue_size": 1.5}, "queue_size"),
        ({"retries": -1}, "retries"),
        ({"workers_per_gpu": 0}, "workers_per_gpu"),
    ],
)
def test_an_invalid_argument_is_named_with_its_value(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named) as raised:
        Dispatcher(NoOpWorker, **{"gpu_ids": [0], **arguments})
    value = arguments[named]
    assert repr(value if not isinstance(value, list) else value[0]) in str(raised.value)


@pytest.mark.parametrize("timeout", [0, -1, float("nan"), float("inf")])
def test_an_unusable_task_timeout_is_rejected(timeout: float) -> None:
    with pytest.raises(ValueError, match="task_timeout"):
        Dispatcher(NoOpWorker, [0]).run([1], print, task_timeout=timeout)


@pytest.mark.parametrize("timeout", ["5", True, [5]])
def test_a_task_timeout_of_the_wrong_type_is_rejected(timeout: Any) -> None:
    with pytest.raises(TypeError, match=f"task_timeout must be .* got .*{type(timeout).__name__}"):
        Dispatcher(NoOpWorker, [0]).run([1], print, task_timeout=timeout)


def test_gpu_ids_are_any_sequence_of_whole_numbers() -> None:
    numpy = pytest.importorskip("numpy")
    sequences: list[Any] = [(0, 1), range(2), iter([0, 1]), numpy.arange(2)]
    for gpu_ids in sequences:
        assert Dispatcher(NoOpWorker, gpu_ids).gpu_ids == [0, 1]


def test_importing_the_package_loads_neither_rich_nor_numpy_nor_cloudpickle() -> None:
    code = "import sys, gpu_dispatch, gpu_dispatch.ui; print({'rich', 'numpy', 'cloudpickle'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "set()"


class IdentityWorker(BaseWorker):
    """Returns its GPU and its process id."""

    def setup(self, gpu_id: int, seed: int, **kwargs: Any) -> None:
        self.gpu_id = gpu_id

    def process(self, data: Any) -> Any:
        return self.gpu_id, os.getpid()


@pytest.mark.parametrize("arguments", [{"gpu_ids": [3, 3]}, {"gpu_ids": [3], "workers_per_gpu": 2}])
def test_several_workers_of_a_gpu_have_different_ids(arguments: dict[str, Any]) -> None:
    recorder = CallbackRecorder()
    Dispatcher(IdentityWorker, **arguments).run((None for _ in range(2_000)), recorder.on_success)
    assert {gpu_id for gpu_id, _ in recorder.results.values()} == {3}
    processes = {(worker_id, recorder.results[task_id][1]) for task_id, worker_id in recorder.worker_ids.items()}
    assert len(processes) == len({worker_id for worker_id, _ in processes}), processes
    assert {worker_id for worker_id, _ in processes} <= {0, 1}
