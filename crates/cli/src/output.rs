//! Writing answers to whoever reads them, and ending with the right number where there is none.

use std::fmt;
use std::io::{self, Write};

use anyhow::Context;
use serde::Serialize;

/// Takes the outcome of writing an answer. Whoever stopped reading, as in `| head`, has read enough.
pub(crate) fn written(result: io::Result<()>) -> anyhow::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write the answer"),
    }
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

/// What was asked for makes no sense, whatever the state of things: the program ends with 2 in place of 1.
#[derive(Debug)]
pub(crate) struct WrongUsage(String);

impl WrongUsage {
    pub fn of(what: impl fmt::Display) -> Self {
        Self(what.to_string())
    }
}

impl fmt::Display for WrongUsage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongUsage {}
