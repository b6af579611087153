"""Progress display of `gpu_dispatch.ui`: a line for the whole run, and one for each GPU.

A thread of `rich` redraws the display during the run. Output of workers appears above it.
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

# A rate covers the last RATE_SECS seconds or the last RATE_TASKS tasks, whichever period is longer.
RATE_SECS = 15.0
RATE_TASKS = 10
# Minimum terminal width for each column; a narrower terminal omits the column.
MIN_WIDTHS = {"Rate": 76, "Last": 66, "Since": 58, "Timeouts": 50, "Failed": 42, "Task": 32}

_STYLES = {"busy": "green", "idle": "dim", "starting": "yellow", "failed": "bold red"}


def can_draw(console: Console) -> bool:
    """Return whether the console is a terminal that can redraw lines."""
    return (console.is_terminal and not console.is_dumb_terminal) or console.is_jupyter


class ProgressDisplay:
    """Live display of a run. At the end it restores the terminal and leaves its last state on the screen."""

    def __init__(self, console: Console, refresh_rate: float, stats: Callable[[], dict[str, Any]]) -> None:
        self._console = console
        self._stats = stats
        self._rate_meters: dict[Optional[int], _RateMeter] = {}
        self._partial_line = b""
        self._live = Live(console=console, refresh_per_second=refresh_rate, get_renderable=self._render)

    def __enter__(self) -> ProgressDisplay:
        self._live.start()
        return self

    def __exit__(self, *_error: Any) -> None:
        if self._partial_line:
            self.write(b"\n")
        self._live.stop()

    def write(self, output: bytes) -> None:
        """Write the complete lines of a worker's output above the display."""
        *lines, self._partial_line = (self._partial_line + output).split(b"\n")
        if lines:
            text = b"\n".join(lines).decode(errors="replace")
            self._console.print(Text.from_ansi(text), soft_wrap=True, highlight=False)

    def _render(self) -> RenderableType:
        stats, now = self._stats(), time.time()
        return Group(self._render_summary(stats, now), self._render_gpus(stats["gpu_status"], now))

    def _render_summary(self, stats: dict[str, Any], now: float) -> RenderableType:
        finished, expected = stats["total"], stats["expected_total"]
        start, end = stats["start_time"] or now, stats["end_time"]
        rate = finished / max(end - start, 1e-9) if end is not None else self._rate(None, finished, now)
        parts = [f"{finished}/{expected}" if expected is not None else f"{finished} tasks", f"{_format_number(rate)}/s"]
        if end is not None:
            parts.append(f"took {_format_duration(end - start)}")
        elif expected is not None and finished < expected:
            parts.append(f"ETA {_format_duration((expected - finished) / rate)}" if rate > 0 else "ETA –")
        else:
            parts.append(_format_duration(now - start))
        parts += [f"{stats[name]} {name}" for name in ("failed", "timeouts") if stats[name]]
        if stats["setup_failures"]:
            parts.append(f"{stats['setup_failures']} failed to set up")
        line = Text("  ".join(parts), no_wrap=True, overflow="ellipsis")
        space = self._console.width - line.cell_len - 2
        if expected is None or space < 5:
            return line
        grid = Table.grid(padding=(0, 2))
        total = max(expected, 1)
        grid.add_row(ProgressBar(total=total, completed=min(finished, total), width=min(space, 40)), line)
        return grid

    def _render_gpus(self, gpus: dict[int, dict[str, Any]], now: float) -> RenderableType:
        start = "task_start_time"
        columns: dict[str, Callable[[int, dict[str, Any]], str]] = {
            "GPU": lambda gpu_id, gpu: str(gpu_id),
            "State": lambda gpu_id, gpu: str(gpu["status"]),
            "Task": lambda gpu_id, gpu: "–" if gpu["current_task"] is None else str(gpu["current_task"]),
            "Since": lambda gpu_id, gpu: "–" if gpu[start] is None else _format_duration(now - gpu[start]),
            "Last": lambda gpu_id, gpu: "–" if gpu["last_duration"] is None else _format_duration(gpu["last_duration"]),
            "Done": lambda gpu_id, gpu: str(gpu["completed"]),
            "Failed": lambda gpu_id, gpu: str(gpu["failed"]),
            "Timeouts": lambda gpu_id, gpu: str(gpu["timeouts"]),
            "Rate": lambda gpu_id, gpu: f"{_format_number(self._rate(gpu_id, _finished_tasks(gpu), now))}/s",
        }
        shown = [name for name in columns if self._console.width >= MIN_WIDTHS.get(name, 0)]
        table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
        for name in shown:
            table.add_column(name, justify="left" if name == "State" else "right", no_wrap=True, overflow="ellipsis")
        for gpu_id, gpu in gpus.items():
            table.add_row(*(columns[name](gpu_id, gpu) for name in shown), style=_STYLES.get(gpu["status"]))
        return table

    def _rate(self, gpu_id: Optional[int], count: int, now: float) -> float:
        return self._rate_meters.setdefault(gpu_id, _RateMeter()).update(count, now)


class _RateMeter:
    """Recent rate of finished tasks per second."""

    def __init__(self) -> None:
        self._changes: deque[tuple[float, int]] = deque()

    def update(self, count: int, now: float) -> float:
        changes = self._changes
        if not changes or changes[-1][1] != count:
            changes.append((now, count))
        while len(changes) > 2 and changes[1][0] <= now - RATE_SECS and changes[1][1] <= count - RATE_TASKS:
            changes.popleft()
        since, before = changes[0]
        return max(count - before, 0) / (now - since) if now > since else 0.0


def _finished_tasks(gpu: dict[str, Any]) -> int:
    total: int = gpu["completed"] + gpu["failed"] + gpu["timeouts"]
    return total


def _format_number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2f}"


def _format_duration(seconds: float) -> str:
    seconds = max(seconds, 0.0)
    if seconds < 0.1:
        return f"{seconds * 1000:.0f}ms"
    if seconds < 60:
        return f"{seconds:.1f}s"
    minutes, seconds = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}"
