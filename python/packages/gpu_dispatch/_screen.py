"""What `gpu_dispatch.ui` draws: a line for the whole run, and one for each GPU.

A thread of `rich` redraws it, from the run's begin to its end. What is written meanwhile goes above it.
"""

from __future__ import annotations

import time
from collections import deque
from typing import Any, Callable, Optional

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

# Rates are those of so many last seconds, or of so many last tasks where that is longer.
RATE_SECS = 15.0
RATE_TASKS = 10
# Columns are left out, the least important first, where the terminal is narrower than this.
WIDTHS = {"Rate": 76, "Last": 66, "Since": 58, "Timeouts": 50, "Failed": 42, "Task": 32}

_STYLES = {"busy": "green", "idle": "dim", "starting": "yellow", "failed": "bold red"}


def can_draw(console: Console) -> bool:
    """Whether there is a terminal that can redraw."""
    return (console.is_terminal and not console.is_dumb_terminal) or console.is_jupyter


class Screen:
    """The picture of a run; leaves the terminal as it was, and its last state to be read."""

    def __init__(self, console: Console, refresh_rate: float, stats: Callable[[], dict[str, Any]]) -> None:
        self._console = console
        self._stats = stats
        self._rates: dict[Optional[int], _Rate] = {}
        self._unfinished = b""
        self._live = Live(console=console, refresh_per_second=refresh_rate, get_renderable=self._picture)

    def __enter__(self) -> Screen:
        self._live.start()
        return self

    def __exit__(self, *_error: Any) -> None:
        if self._unfinished:
            self.write(b"\n")
        self._live.stop()

    def write(self, output: bytes) -> None:
        """Writes whole lines of a worker's output above the picture."""
        *lines, self._unfinished = (self._unfinished + output).split(b"\n")
        if lines:
            text = b"\n".join(lines).decode(errors="replace")
            self._console.print(Text.from_ansi(text), soft_wrap=True, highlight=False)

    def _picture(self) -> RenderableType:
        stats, now = self._stats(), time.time()
        return Group(self._overall(stats, now), self._gpus(stats["gpu_status"], now))

    def _overall(self, stats: dict[str, Any], now: float) -> RenderableType:
        over, expected = stats["total"], stats["expected_total"]
        start, end = stats["start_time"] or now, stats["end_time"]
        rate = over / max(end - start, 1e-9) if end is not None else self._rate(None, over, now)
        words = [f"{over}/{expected}" if expected is not None else f"{over} tasks", f"{_number(rate)}/s"]
        if end is not None:
            words.append(f"took {_time(end - start)}")
        elif expected is not None and over < expected:
            words.append(f"ETA {_time((expected - over) / rate)}" if rate > 0 else "ETA –")
        else:
            words.append(_time(now - start))
        words += [f"{stats[name]} {name}" for name in ("failed", "timeouts") if stats[name]]
        if stats["setup_failures"]:
            words.append(f"{stats['setup_failures']} not set up")
        line = Text("  ".join(words), no_wrap=True, overflow="ellipsis")
        space = self._console.width - line.cell_len - 2
        if expected is None or space < 5:
            return line
        grid = Table.grid(padding=(0, 2))
        grid.add_row(ProgressBar(total=max(expected, 1), completed=min(over, max(expected, 1)), width=min(space, 40)), line)
        return grid

    def _gpus(self, gpus: dict[int, dict[str, Any]], now: float) -> RenderableType:
        columns: dict[str, Callable[[int, dict[str, Any]], str]] = {
            "GPU": lambda gpu_id, gpu: str(gpu_id),
            "State": lambda gpu_id, gpu: str(gpu["status"]),
            "Task": lambda gpu_id, gpu: "–" if gpu["current_task"] is None else str(gpu["current_task"]),
            "Since": lambda gpu_id, gpu: "–" if gpu["task_start_time"] is None else _time(now - gpu["task_start_time"]),
            "Last": lambda gpu_id, gpu: "–" if gpu["last_duration"] is None else _time(gpu["last_duration"]),
            "Done": lambda gpu_id, gpu: str(gpu["completed"]),
            "Failed": lambda gpu_id, gpu: str(gpu["failed"]),
            "Timeouts": lambda gpu_id, gpu: str(gpu["timeouts"]),
            "Rate": lambda gpu_id, gpu: f"{_number(self._rate(gpu_id, _over(gpu), now))}/s",
        }
        shown = [name for name in columns if self._console.width >= WIDTHS.get(name, 0)]
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for name in shown:
            table.add_column(name, justify="left" if name == "State" else "right", no_wrap=True, overflow="ellipsis")
        for gpu_id, gpu in gpus.items():
            table.add_row(*(columns[name](gpu_id, gpu) for name in shown), style=_STYLES.get(gpu["status"]))
        return table

    def _rate(self, of: Optional[int], count: int, now: float) -> float:
        return self._rates.setdefault(of, _Rate()).after(count, now)


class _Rate:
    """How many a second, lately."""

    def __init__(self) -> None:
        self._changes: deque[tuple[float, int]] = deque()

    def after(self, count: int, now: float) -> float:
        changes = self._changes
        if not changes or changes[-1][1] != count:
            changes.append((now, count))
        while len(changes) > 2 and changes[1][0] <= now - RATE_SECS and changes[1][1] <= count - RATE_TASKS:
            changes.popleft()
        since, before = changes[0]
        return max(count - before, 0) / (now - since) if now > since else 0.0


def _over(gpu: dict[str, Any]) -> int:
    total: int = gpu["completed"] + gpu["failed"] + gpu["timeouts"]
    return total


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _time(seconds: float) -> str:
    seconds = max(seconds, 0.0)
    if seconds < 0.1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
