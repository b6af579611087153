//! What to start.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::process::Stdio;

/// What a job has to do with the terminal this program runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TerminalUse {
    /// Nothing: it runs in a process group of its own, in the background.
    #[default]
    Background,
    /// What it would have if started by hand: the keyboard, Ctrl-C and Ctrl-Z are the job's while we are in the
    /// foreground. Without a terminal, or in the background, the same as [`TerminalUse::Background`].
    Foreground,
}

/// A program to run, with its arguments, environment and streams.
#[derive(Debug)]
pub struct JobSpec {
    pub(super) program: OsString,
    pub(super) arguments: Vec<OsString>,
    /// `None` removes a variable; all others are inherited.
    pub(super) environment: Vec<(OsString, Option<OsString>)>,
    pub(super) directory: Option<PathBuf>,
    pub(super) streams: Option<[Stdio; 3]>,
    pub(super) terminal: TerminalUse,
    pub(super) keeper: PathBuf,
}

impl JobSpec {
    /// Runs this program, looked up in the job's `PATH` unless it holds a `/`.
    pub fn new(program: impl Into<OsString>) -> Self {
        Self {
            program: program.into(),
            arguments: Vec::new(),
            environment: Vec::new(),
            directory: None,
            streams: None,
            terminal: TerminalUse::default(),
            // The running program itself, also when its file has been replaced or removed since.
            keeper: PathBuf::from("/proc/self/exe"),
        }
    }

    /// Adds arguments.
    pub fn args(mut self, arguments: impl IntoIterator<Item = impl Into<OsString>>) -> Self {
        self.arguments.extend(arguments.into_iter().map(Into::into));
        self
    }

    /// Sets a variable of the job's environment, which else is ours.
    pub fn env(mut self, name: impl AsRef<OsStr>, value: impl AsRef<OsStr>) -> Self {
        self.environment.push((name.as_ref().to_owned(), Some(value.as_ref().to_owned())));
        self
    }

    /// Removes a variable from the job's environment.
    pub fn env_remove(mut self, name: impl AsRef<OsStr>) -> Self {
        self.environment.push((name.as_ref().to_owned(), None));
        self
    }

    /// The directory to run in, else ours.
    pub fn directory(mut self, directory: impl Into<PathBuf>) -> Self {
        self.directory = Some(directory.into());
        self
    }

    /// Standard input, output and error, else ours. Of pipes, our ends are taken by [`super::Job::take_streams`].
    pub fn streams(mut self, input: impl Into<Stdio>, output: impl Into<Stdio>, error: impl Into<Stdio>) -> Self {
        self.streams = Some([input.into(), output.into(), error.into()]);
        self
    }

    /// What the job has to do with our terminal.
    pub fn terminal(mut self, terminal: TerminalUse) -> Self {
        self.terminal = terminal;
        self
    }

    /// Another program to act as keeper: one whose `main` calls [`crate::keeper::main_if_asked`]. For programs that
    /// cannot do so themselves, such as an interpreter that loaded this crate.
    pub fn keeper(mut self, program: impl Into<PathBuf>) -> Self {
        self.keeper = program.into();
        self
    }
}
