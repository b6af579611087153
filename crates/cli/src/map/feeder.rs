//! The thread that makes tasks of arguments, no faster than they are done. It ends with its source, when the run takes no
//! more, or with the program, where it waits for a source that says nothing.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, anyhow, bail};
use bytes::Bytes;
use gpupool_dispatch::command::CommandLine;
use gpupool_dispatch::joblog::Finished;
use gpupool_dispatch::{Refused, Remote, TaskId};

use super::sources::Sources;
use super::stop::{Reason, Stop};
use super::tasks::{OpenTasks, Task};
use super::template::Template;

/// What a task is.
#[derive(Debug)]
pub(super) enum Kind {
    /// A command.
    Command(Template),
    /// Its argument, given to a worker.
    Argument,
}

/// Makes tasks.
#[derive(Debug)]
pub(super) struct Feeder {
    pub kind: Kind,
    pub sources: Sources,
    /// What an earlier run did.
    pub finished: Option<Finished>,
    pub tasks: OpenTasks,
    pub remote: Remote,
    pub stop: Stop,
    /// Tasks of this run: as many as there may be, and exactly how many when the source is at its end.
    pub total: Total,
}

/// How many tasks there are in this run, as far as is known.
#[derive(Debug, Clone)]
pub(super) struct Total(Arc<AtomicU64>);

const UNKNOWN: u64 = u64::MAX;

impl Total {
    pub fn new(total: Option<u64>) -> Self {
        Self(Arc::new(AtomicU64::new(total.unwrap_or(UNKNOWN))))
    }

    pub fn get(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Relaxed)).filter(|total| *total != UNKNOWN)
    }

    fn set(&self, total: u64) {
        self.0.store(total, Ordering::Relaxed);
    }
}

impl Feeder {
    /// Begins to make tasks.
    pub fn start(mut self) -> anyhow::Result<()> {
        let feed = move || match self.feed() {
            Ok(()) => self.remote.close(),
            Err(Trouble::Source(error)) => self.stop.after_this(error),
            Err(Trouble::Log(error)) => self.stop.now(Reason::Failed(error)),
        };
        let thread = std::thread::Builder::new().name("gpupool-feeder".into()).spawn(feed);
        thread.map(drop).context("cannot start a thread to read the arguments")
    }

    fn feed(&mut self) -> Result<(), Trouble> {
        let (mut seq, mut put) = (0, 0);
        while let Some(arguments) = self.sources.next().map_err(Trouble::Source)? {
            seq += 1;
            let shown = self.kind.shown(&arguments, seq);
            if let Some(finished) = &mut self.finished
                && finished.has(seq, &shown).map_err(|error| Trouble::Log(error.into()))?
            {
                continue;
            }
            let payload = self.kind.payload(&arguments, seq).map_err(Trouble::Source)?;
            let id = TaskId(put);
            // Told of before it is put: it may be over before this thread goes on.
            self.tasks.insert(id, Task { seq, arguments, shown });
            match self.remote.push(payload) {
                Ok(same) => debug_assert_eq!(same, id),
                Err(refused) => {
                    self.tasks.remove(id);
                    if refused == Refused::Closed {
                        return Ok(());
                    }
                    return Err(Trouble::Source(anyhow!("argument {seq}: {refused}")));
                }
            }
            put += 1;
        }
        self.total.set(put);
        Ok(())
    }
}

enum Trouble {
    /// What was read before is done.
    Source(anyhow::Error),
    /// Nothing more is to be done.
    Log(anyhow::Error),
}

impl Kind {
    /// What a person would type for it.
    pub fn shown(&self, arguments: &[Bytes], seq: u64) -> Bytes {
        match self {
            Self::Command(template) => template.shown(arguments, seq).into(),
            Self::Argument => arguments.first().cloned().unwrap_or_default(),
        }
    }

    fn payload(&self, arguments: &[Bytes], seq: u64) -> anyhow::Result<Bytes> {
        match self {
            Self::Command(template) => {
                if arguments.iter().any(|argument| argument.contains(&0)) {
                    bail!("argument {seq} holds a zero byte, which no command can be given; did you mean --null?");
                }
                Ok(CommandLine::direct(template.argv(arguments, seq)).to_payload())
            }
            Self::Argument => Ok(self.shown(arguments, seq)),
        }
    }
}
