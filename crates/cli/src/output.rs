//! Output of commands: results on standard output, messages on standard error, and the error that means wrong usage.

use std::fmt::{self, Display};
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use anyhow::Context;
use gpupool_core::is_plain;
use indicatif::MultiProgress;
use rustix::termios::tcgetwinsize;
use serde::Serialize;

use crate::terminal::truncate;

/// Prints the value as JSON, or else the text.
pub(crate) fn print_output(
    is_json: bool,
    value: &impl Serialize,
    text: impl FnOnce() -> String,
) -> anyhow::Result<ExitCode> {
    if is_json { print_json(value) } else { print_text(&text()) }.map(|()| ExitCode::SUCCESS)
}

/// Prints JSON to standard output.
pub(crate) fn print_json(value: &impl Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_string_pretty(value)?;
    text.push('\n');
    print_text(&text)
}

/// Prints text to standard output.
pub(crate) fn print_text(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    ignore_closed_pipe(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// Treats a closed pipe, as by `| head`, as success.
pub(crate) fn ignore_closed_pipe(result: io::Result<()>) -> anyhow::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write to standard output"),
    }
}

/// Prints a line to standard error and ignores write errors.
pub(crate) fn print_note(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// Error in the arguments or settings; the program then exits with 2 instead of 1.
#[derive(Debug)]
pub(crate) struct UsageError(String);

impl UsageError {
    pub fn new(what: impl Display) -> Self {
        Self(what.to_string())
    }
}

impl Display for UsageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for UsageError {}

/// Prints messages of `run` and `map` to standard error, above the progress display. Write errors are ignored.
#[derive(Debug, Clone)]
pub(crate) struct MessagePrinter {
    /// Whether only warnings are printed.
    pub is_quiet: bool,
    /// Progress display on the same terminal.
    pub bars: Option<MultiProgress>,
}

impl MessagePrinter {
    /// Prints an informational message unless quiet.
    pub fn info(&self, text: impl Display) {
        if !self.is_quiet {
            self.warn(text);
        }
    }

    pub fn warn(&self, text: impl Display) {
        let say = || drop(writeln!(io::stderr().lock(), "gpupool: {text}"));
        match &self.bars {
            Some(bars) => bars.suspend(say),
            None => say(),
        }
    }

    /// Returns a line that is redrawn in place, if standard error is a terminal and not quiet.
    pub fn progress_line(&self) -> Option<ProgressLine> {
        (!self.is_quiet && io::stderr().is_terminal()).then_some(ProgressLine { is_shown: false })
    }
}

/// Line of the terminal that is redrawn in place and cleared on drop.
#[derive(Debug)]
pub(crate) struct ProgressLine {
    is_shown: bool,
}

/// Width of the line if the terminal does not report one.
const LINE_WIDTH: usize = 80;

impl ProgressLine {
    pub fn show(&mut self, text: &str) {
        let width = tcgetwinsize(io::stderr()).map_or(0, |size| usize::from(size.ws_col));
        let width = if width == 0 { LINE_WIDTH } else { width };
        let mut out = io::stderr().lock();
        // The last column stays free because writing there makes some terminals start a new line.
        let _ = write!(out, "\r{}\x1b[K", fit_line(text, width - 1));
        let _ = out.flush();
        self.is_shown = true;
    }
}

impl Drop for ProgressLine {
    fn drop(&mut self) {
        if self.is_shown {
            let mut out = io::stderr().lock();
            let _ = write!(out, "\x1b[2K\r");
            let _ = out.flush();
        }
    }
}

/// Fits the text into the width and replaces characters that are not shown as themselves.
fn fit_line(text: &str, width: usize) -> String {
    truncate(&text.replace(|c| !is_plain(c), " "), width)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_fits_and_contains_no_control_characters() {
        assert_eq!(fit_line("short", 10), "short");
        assert_eq!(fit_line("a\x1b[2Jb\n", 10), "a [2Jb ");
        assert_eq!(fit_line("a\u{202e}b", 10), "a b");
        assert_eq!(fit_line("much too long", 6), "much …");
        assert_eq!(fit_line("x y", 0), "");
    }
}
