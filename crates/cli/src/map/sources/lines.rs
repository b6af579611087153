//! Lines of a file or a pipe, one when it is asked for, each with a bound.

use std::io::{BufRead, Read};

use anyhow::{Context, bail};
use bytes::Bytes;

use crate::map::limits::LINE_BYTES;

/// Lines, or whatever else a separator ends.
#[derive(Debug)]
pub(super) struct Lines<R> {
    reader: R,
    separator: u8,
    name: String,
    number: u64,
}

impl<R: BufRead> Lines<R> {
    pub fn new(reader: R, separator: u8, name: String) -> Self {
        Self { reader, separator, name, number: 0 }
    }

    /// The next one without its end.
    pub fn next(&mut self) -> anyhow::Result<Option<Bytes>> {
        self.number += 1;
        let mut line = Vec::new();
        let mut reader = self.reader.by_ref().take(LINE_BYTES as u64 + 1);
        let read = reader.read_until(self.separator, &mut line);
        if read.with_context(|| format!("{}: line {} cannot be read", self.name, self.number))? == 0 {
            return Ok(None);
        }
        if line.last() == Some(&self.separator) {
            line.pop();
        } else if line.len() > LINE_BYTES {
            bail!("{}: line {} is longer than 16 MiB, which is the most", self.name, self.number);
        }
        Ok(Some(Bytes::from(line)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_without_an_end_is_refused_before_it_is_held() {
        let mut lines = Lines::new(std::io::BufReader::new(std::io::repeat(b'x')), b'\n', "pipe".into());
        let error = lines.next().unwrap_err().to_string();
        assert!(error.contains("pipe: line 1") && error.contains("16 MiB"), "{error}");
    }
}
