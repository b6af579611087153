//! Progress at a terminal: a table of at most 80 columns below the output of tasks.

use std::process::Command;
use std::time::Instant;

use gpupool_testkit::DEADLINE;

use crate::support::{BINARY, skipped, without_variables};

/// Terminal of 80 columns that runs a command; closed on drop.
struct TmuxTerminal {
    socket: tempfile::TempDir,
}

impl TmuxTerminal {
    /// Starts the terminal; `None` if tmux is missing.
    fn with(line: &str) -> Option<Self> {
        if Command::new("tmux").arg("-V").output().is_err() {
            skipped("progress at a terminal", "the program `tmux` is not there");
            return None;
        }
        let terminal = Self { socket: tempfile::tempdir().unwrap() };
        let status = terminal.tmux(&["-f", "/dev/null", "new-session", "-d", "-x", "80", "-y", "24", line]).status();
        assert!(status.unwrap().success(), "tmux did not start");
        Some(terminal)
    }

    fn tmux(&self, arguments: &[&str]) -> Command {
        let mut command = without_variables(Command::new("tmux"));
        command.env("TERM", "xterm").env("LC_ALL", "C.UTF-8").env("SHELL", "/bin/sh");
        command.arg("-S").arg(self.socket.path().join("socket")).args(arguments);
        command
    }

    /// Waits until the screen meets a condition and returns it.
    fn wait_until_shown(&self, what: &str, wanted: impl Fn(&str) -> bool) -> String {
        let begun = Instant::now();
        loop {
            let output = self.tmux(&["capture-pane", "-p"]).output().unwrap();
            let screen = String::from_utf8_lossy(&output.stdout).into_owned();
            if wanted(&screen) {
                return screen;
            }
            assert!(begun.elapsed() < DEADLINE, "it never showed {what}:\n{screen}");
        }
    }
}

impl Drop for TmuxTerminal {
    fn drop(&mut self) {
        let _ = self.tmux(&["kill-server"]).output();
    }
}

#[test]
fn progress_is_drawn_below_the_output_and_cleared_at_the_end() {
    let dir = tempfile::tempdir().unwrap();
    let go = dir.path().join("go");
    // The first tasks finish at once; the last ones wait for a file.
    let task = format!("echo out {{}}; [ {{#}} -le 3 ] || while ! test -e {}; do sleep 0.01; done", go.display());
    let line = format!(
        "'{BINARY}' map --gpus 0 -j2 \"{task}\" ::: a b c d-{} e; echo ended $?; exec sleep 600",
        "x".repeat(90)
    );
    let Some(terminal) = TmuxTerminal::with(&line) else { return };
    let screen = terminal.wait_until_shown("two tasks that wait", |screen| {
        screen.contains("done 3 of 5") && screen.matches("busy").count() == 2 && screen.contains("d-xxx")
    });
    let lines: Vec<&str> = screen.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    assert_eq!(lines.len(), 3 + 4, "{screen}");
    let mut output = lines[..3].to_vec();
    output.sort_unstable();
    assert_eq!(output, ["out a", "out b", "out c"], "{screen}");
    assert_eq!(lines[3], "WORKER  STATE  DONE  FAILED  TIMEOUTS  RATE  TASK", "{screen}");
    assert!(lines[4].starts_with("1       busy  ") && lines[5].starts_with("2       busy  "), "{screen}");
    assert!(lines[4..6].iter().any(|line| line.ends_with('…')), "a long name is cut:\n{screen}");
    assert!(lines[6].starts_with("done 3 of 5, failed 0, timeouts 0, "), "{screen}");
    std::fs::write(&go, "").unwrap();
    let screen = terminal.wait_until_shown("the end", |screen| screen.contains("ended 0"));
    let lines: Vec<&str> = screen.lines().map(str::trim_end).filter(|line| !line.is_empty()).collect();
    assert!(!screen.contains("WORKER") && !screen.contains("busy"), "{screen}");
    assert!(lines.iter().any(|line| line.starts_with("gpupool: done 5, failed 0, timeouts 0")), "{screen}");
}

#[test]
fn ctrl_c_stops_the_run_and_clears_the_progress() {
    let line =
        format!("trap : INT; '{BINARY}' map --gpus 0 -j1 'sleep {{}}' ::: 600 600; echo ended $?; exec sleep 600");
    let Some(terminal) = TmuxTerminal::with(&line) else { return };
    terminal.wait_until_shown("a task that runs", |screen| screen.contains("busy"));
    assert!(terminal.tmux(&["send-keys", "C-c"]).status().unwrap().success());
    let screen = terminal.wait_until_shown("the end", |screen| screen.contains("ended 130"));
    assert!(screen.contains("cancelled 2") && !screen.contains("busy"), "{screen}");
}
