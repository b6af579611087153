//! Writing answers to whoever reads them.

use std::io;

use anyhow::Context;

/// Takes the outcome of writing an answer. Whoever stopped reading, as in `| head`, has read enough.
pub(crate) fn written(result: io::Result<()>) -> anyhow::Result<()> {
    match result {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        result => result.context("cannot write the answer"),
    }
}
