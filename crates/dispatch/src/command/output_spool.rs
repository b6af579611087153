//! Output of commands: files of the dispatcher that a runner's commands append to.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt as _;
use std::process::Stdio;
use std::sync::{Arc, Mutex};

use gpupool_confine::lock;
use rustix::fs::{FallocateFlags, MemfdFlags, Mode, OFlags, fallocate, memfd_create, open};

use crate::limits::PUNCH_BYTES;

/// The two anonymous output files of one runner. They are freed with their last descriptor.
#[derive(Debug)]
pub(crate) struct OutputSpool {
    files: [Arc<SpoolFile>; 2],
}

impl OutputSpool {
    pub(crate) fn new() -> io::Result<Self> {
        Ok(Self { files: [Arc::new(SpoolFile::new()?), Arc::new(SpoolFile::new()?)] })
    }

    /// Returns standard output and error for a runner.
    pub(crate) fn streams(&self) -> io::Result<[Stdio; 2]> {
        let [out, err] = &self.files;
        Ok([out.file.try_clone()?.into(), err.file.try_clone()?.into()])
    }

    /// Returns the output of a task's command, as the runner reported it, or everything since the last report.
    pub(crate) fn output(&self, written: Option<[Option<(u64, u64)>; 2]>) -> CommandOutput {
        let [out, err] = written.unwrap_or([None, None]);
        CommandOutput { out: SpoolRegion::new(&self.files[0], out), err: SpoolRegion::new(&self.files[1], err) }
    }
}

#[derive(Debug)]
struct SpoolFile {
    file: File,
    read: Mutex<ConsumedBytes>,
}

/// Byte ranges that are no longer needed.
#[derive(Debug, Default)]
struct ConsumedBytes {
    /// End of the range that was freed on the disk.
    freed: u64,
    /// End of the contiguous consumed range.
    consumed: u64,
    /// Consumed ranges beyond it, from start to end.
    consumed_beyond: BTreeMap<u64, u64>,
    /// End of the last task's reported output.
    reported: u64,
}

impl SpoolFile {
    fn new() -> io::Result<Self> {
        let flags = OFlags::RDWR | OFlags::APPEND | OFlags::CLOEXEC;
        let unnamed = open(std::env::temp_dir(), flags | OFlags::TMPFILE, Mode::RUSR | Mode::WUSR);
        let file = match unnamed {
            Ok(file) => file,
            // Some file systems lack anonymous files.
            Err(_) => {
                let file = memfd_create("gpupool-output", MemfdFlags::CLOEXEC)?;
                rustix::fs::fcntl_setfl(&file, OFlags::APPEND)?;
                file
            }
        };
        Ok(Self { file: file.into(), read: Mutex::default() })
    }

    fn consume(&self, from: u64, to: u64) {
        let mut read = lock(&self.read);
        read.consumed_beyond.insert(from, to);
        while let Some((from, to)) = read.consumed_beyond.first_key_value().map(|(from, to)| (*from, *to))
            && from <= read.consumed
        {
            read.consumed_beyond.remove(&from);
            read.consumed = read.consumed.max(to);
        }
        if read.consumed - read.freed >= PUNCH_BYTES {
            let length = read.consumed - read.freed;
            let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
            // Without hole punching, the space is freed at the end.
            let _ = fallocate(&self.file, flags, read.freed, length);
            read.freed = read.consumed;
        }
    }
}

/// Output of one task's command. Dropping it frees its disk space.
#[derive(Debug)]
pub struct CommandOutput {
    out: SpoolRegion,
    err: SpoolRegion,
}

impl CommandOutput {
    /// Copies the standard output.
    pub fn copy_stdout_to(&self, to: &mut impl Write) -> io::Result<u64> {
        self.out.copy_from(self.out.from, to)
    }

    /// Copies the standard error.
    pub fn copy_stderr_to(&self, to: &mut impl Write) -> io::Result<u64> {
        self.err.copy_from(self.err.from, to)
    }

    /// Returns the last bytes of the standard error as text.
    pub fn stderr_tail(&self, bytes: u64) -> String {
        let from = self.err.to.saturating_sub(bytes).max(self.err.from);
        let mut tail = Vec::new();
        // Unreadable output is omitted; the outcome holds the actual error.
        let _ = self.err.copy_from(from, &mut tail);
        String::from_utf8_lossy(&tail).into_owned()
    }

    /// Returns the lengths of standard output and standard error.
    pub fn stream_lengths(&self) -> (u64, u64) {
        (self.out.to - self.out.from, self.err.to - self.err.from)
    }
}

#[derive(Debug)]
struct SpoolRegion {
    file: Arc<SpoolFile>,
    from: u64,
    to: u64,
}

impl SpoolRegion {
    fn new(file: &Arc<SpoolFile>, written: Option<(u64, u64)>) -> Self {
        let mut read = lock(&file.read);
        let from = read.reported;
        // The reported range is clamped: no task gets another task's bytes or bytes past the end.
        let end = file.file.metadata().map_or(from, |metadata| metadata.len());
        let to = written.map_or(end, |(_, to)| to.min(end)).max(from);
        read.reported = to;
        drop(read);
        Self { file: Arc::clone(file), from, to }
    }

    fn copy_from(&self, mut from: u64, to: &mut impl Write) -> io::Result<u64> {
        let begin = from;
        let mut buffer = vec![0; usize::try_from(self.to - from).unwrap_or(usize::MAX).min(256 * 1024)];
        while from < self.to {
            let wanted = usize::try_from(self.to - from).unwrap_or(usize::MAX).min(buffer.len());
            match self.file.file.read_at(&mut buffer[..wanted], from)? {
                0 => break,
                read => {
                    to.write_all(&buffer[..read])?;
                    from += read as u64;
                }
            }
        }
        Ok(from - begin)
    }
}

impl Drop for SpoolRegion {
    fn drop(&mut self) {
        if self.to > self.from {
            self.file.consume(self.from, self.to);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    fn write(spool: &OutputSpool, bytes: &[u8]) {
        (&spool.files[0].file).write_all(bytes).unwrap();
    }

    fn read(output: &CommandOutput) -> Vec<u8> {
        let mut bytes = Vec::new();
        output.copy_stdout_to(&mut bytes).unwrap();
        bytes
    }

    #[test]
    fn each_task_has_its_own_bytes_despite_wrong_reports() {
        let spool = OutputSpool::new().unwrap();
        write(&spool, b"onetwothree");
        let output = |to| spool.output(Some([Some((0, to)), None]));
        assert_eq!(read(&output(3)), b"one");
        assert_eq!(read(&output(6)), b"two");
        assert_eq!(read(&output(4)), b"", "a report that moves back");
        assert_eq!(read(&output(1_000)), b"three", "a report past the end");
        write(&spool, b"the rest");
        assert_eq!(read(&spool.output(None)), b"the rest");
    }

    #[test]
    fn consumed_output_is_freed_on_the_disk() {
        let spool = OutputSpool::new().unwrap();
        let large = vec![7; 4 << 20];
        let outputs: Vec<CommandOutput> = (0..3)
            .map(|_| {
                write(&spool, &large);
                spool.output(None)
            })
            .collect();
        let [first, second, third] = <[CommandOutput; 3]>::try_from(outputs).unwrap();
        let blocks = || spool.files[0].file.metadata().unwrap().blocks() * 512;
        drop(second);
        assert!(blocks() >= 12 << 20, "the first output is still needed: {}", blocks());
        drop(first);
        assert!(blocks() < 5 << 20, "{}", blocks());
        assert_eq!(read(&third), large);
    }
}
