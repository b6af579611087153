//! Answers on standard output, remarks on standard error, and the right exit code where there is no answer.

use std::fmt::{self, Display};
use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;

use anyhow::Context;
use indicatif::MultiProgress;
use rustix::termios::tcgetwinsize;
use serde::Serialize;

use crate::terminal::cut;

/// Answers in JSON where that is wanted, else in this text.
pub(crate) fn answer(is_json: bool, value: &impl Serialize, text: impl FnOnce() -> String) -> anyhow::Result<ExitCode> {
    if is_json { write_json(value) } else { write_text(&text()) }.map(|()| ExitCode::SUCCESS)
}

/// Writes an answer for programs.
pub(crate) fn write_json(answer: &impl Serialize) -> anyhow::Result<()> {
    let mut text = serde_json::to_string_pretty(answer)?;
    text.push('\n');
    write_text(&text)
}

/// Writes an answer for people.
pub(crate) fn write_text(text: &str) -> anyhow::Result<()> {
    let mut out = io::stdout().lock();
    written(out.write_all(text.as_bytes()).and_then(|()| out.flush()))
}

/// Takes the outcome of writing an answer. Whoever stopped reading, as in `| head`, has read enough.
pub(crate) fn written(result: io::Result<()>) -> anyhow::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write the answer"),
    }
}

/// Tells whoever looks on, on standard error. Where nobody does any more, that is no reason to stop.
pub(crate) fn note(line: &str) {
    let _ = writeln!(io::stderr(), "{line}");
}

/// What was asked for makes no sense, whatever the state of things: the program ends with 2 in place of 1.
#[derive(Debug)]
pub(crate) struct WrongUsage(String);

impl WrongUsage {
    pub fn of(what: impl Display) -> Self {
        Self(what.to_string())
    }
}

impl Display for WrongUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongUsage {}

/// What `run` and `map` say beside their commands, on standard error, above the progress where there is one. Nobody may be
/// reading it, which is no reason to stop.
#[derive(Debug, Clone)]
pub(crate) struct Voice {
    /// Only what went wrong is said.
    pub is_quiet: bool,
    /// Lines of progress on the same terminal.
    pub bars: Option<MultiProgress>,
}

impl Voice {
    /// Something good to know.
    pub fn note(&self, text: impl Display) {
        if !self.is_quiet {
            self.warn(text);
        }
    }

    /// Something that went wrong.
    pub fn warn(&self, text: impl Display) {
        let say = || drop(writeln!(io::stderr().lock(), "gpupool: {text}"));
        match &self.bars {
            Some(bars) => bars.suspend(say),
            None => say(),
        }
    }

    /// A line that is written over again and again, where there is a terminal to do so and it is wanted.
    pub fn live_line(&self) -> Option<LiveLine> {
        (!self.is_quiet && io::stderr().is_terminal()).then_some(LiveLine { is_shown: false })
    }
}

/// One line of the terminal. Wiped when dropped.
#[derive(Debug)]
pub(crate) struct LiveLine {
    is_shown: bool,
}

/// Width of the live line where the terminal does not tell.
const LINE_WIDTH: usize = 80;

impl LiveLine {
    /// Shows this in place of what was there.
    pub fn show(&mut self, text: &str) {
        let width = tcgetwinsize(io::stderr()).map_or(0, |size| usize::from(size.ws_col));
        let width = if width == 0 { LINE_WIDTH } else { width };
        let mut out = io::stderr().lock();
        // The last column stays free: writing there makes some terminals begin a new line.
        let _ = write!(out, "\r{}\x1b[K", fitted(text, width - 1));
        let _ = out.flush();
        self.is_shown = true;
    }
}

impl Drop for LiveLine {
    fn drop(&mut self) {
        if self.is_shown {
            let mut out = io::stderr().lock();
            let _ = write!(out, "\x1b[2K\r");
            let _ = out.flush();
        }
    }
}

/// As much of a text as fits, without what would move the cursor.
fn fitted(text: &str, width: usize) -> String {
    cut(&text.replace(char::is_control, " "), width)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_fits_and_moves_no_cursor() {
        assert_eq!(fitted("short", 10), "short");
        assert_eq!(fitted("a\x1b[2Jb\n", 10), "a [2Jb ");
        assert_eq!(fitted("much too long", 6), "much …");
        assert_eq!(fitted("x y", 0), "");
    }
}
