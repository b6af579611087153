//! What tasks wrote goes out here, a task's whole output at once, above the progress where there is one.

use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::os::fd::AsFd;

use anyhow::Context;
use gpupool_dispatch::command::TaskOutput;
use indicatif::MultiProgress;

/// Our standard output and error, for what tasks wrote.
#[derive(Debug)]
pub(super) struct Outlet {
    out: BufWriter<File>,
    err: File,
    /// Lines of progress on the same terminal.
    bars: Option<MultiProgress>,
}

/// Small outputs are collected up to this.
const COLLECTED_BYTES: usize = 1 << 16;

impl Outlet {
    pub fn new(bars: Option<MultiProgress>) -> anyhow::Result<Self> {
        let out = own(io::stdout()).context("standard output is not open")?;
        let err = own(io::stderr()).context("standard error is not open")?;
        Ok(Self { out: BufWriter::with_capacity(COLLECTED_BYTES, out), err, bars })
    }

    /// Writes what a task's command wrote, each line after the tag where there is one. How much of it was standard output.
    pub fn output(&mut self, output: &TaskOutput, tag: Option<&[u8]>) -> io::Result<u64> {
        let (out_length, err_length) = output.lengths();
        if out_length + err_length == 0 {
            return Ok(0);
        }
        self.above(|out, err| {
            match tag {
                None => output.copy_stdout_to(out)?,
                Some(tag) => output.copy_stdout_to(&mut Tagged::new(out, tag))?,
            };
            if err_length > 0 {
                // In the order of time where both go to one place.
                out.flush()?;
                // Nobody may be reading it, which is no reason to stop.
                let _ = match tag {
                    None => output.copy_stderr_to(err),
                    Some(tag) => output.copy_stderr_to(&mut Tagged::new(err, tag)),
                };
            }
            Ok(())
        })?;
        Ok(out_length)
    }

    /// Writes a result, or whatever else is a line.
    pub fn line(&mut self, bytes: &[u8], tag: Option<&[u8]>) -> io::Result<()> {
        self.above(|out, _| {
            if let Some(tag) = tag {
                out.write_all(tag)?;
            }
            out.write_all(bytes)?;
            out.write_all(b"\n")
        })
    }

    /// Writes to standard error what a worker wrote there.
    pub fn words(&mut self, bytes: &[u8]) {
        // Nobody may be reading it, which is no reason to stop.
        let _ = self.above(|_, err| err.write_all(bytes));
    }

    /// Lets go of what was collected.
    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }

    fn above(&mut self, write: impl FnOnce(&mut BufWriter<File>, &mut File) -> io::Result<()>) -> io::Result<()> {
        let Self { out, err, bars } = self;
        match bars {
            Some(bars) => bars.suspend(|| write(out, err).and_then(|()| out.flush())),
            None => write(out, err),
        }
    }
}

fn own(stream: impl AsFd) -> io::Result<File> {
    stream.as_fd().try_clone_to_owned().map(File::from)
}

/// Puts a tag before each line.
struct Tagged<'a, W> {
    to: &'a mut W,
    tag: &'a [u8],
    is_at_start: bool,
}

impl<'a, W: Write> Tagged<'a, W> {
    fn new(to: &'a mut W, tag: &'a [u8]) -> Self {
        Self { to, tag, is_at_start: true }
    }
}

impl<W: Write> Write for Tagged<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for line in bytes.split_inclusive(|byte| *byte == b'\n') {
            if self.is_at_start {
                self.to.write_all(self.tag)?;
            }
            self.to.write_all(line)?;
            self.is_at_start = line.ends_with(b"\n");
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.to.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_line_has_its_tag_however_it_is_cut() {
        let mut to = Vec::new();
        let mut tagged = Tagged::new(&mut to, b"a\t");
        for piece in [&b"on"[..], b"e\ntwo\n", b"", b"\nthr", b"ee"] {
            tagged.write_all(piece).unwrap();
        }
        assert_eq!(to, b"a\tone\na\ttwo\na\t\na\tthree");
    }
}
