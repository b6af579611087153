//! Running `gpupool map` to its end, and looking at all it said.

use std::io::Write;
use std::process::{Command, Output, Stdio};
use std::sync::mpsc::channel;

use gpupool_testkit::DEADLINE;

use crate::run_support::{BINARY, bare};

/// What a run said, and how it ended.
#[derive(Debug)]
#[allow(dead_code, reason = "the command is for whoever reads a failure")]
pub struct Said {
    pub command: String,
    pub code: Option<i32>,
    pub out: Vec<u8>,
    pub err: String,
}

/// `gpupool map` without GPUs, in an environment that nothing else can change.
pub fn map(arguments: &[&str]) -> Command {
    let mut command = bare(Command::new(BINARY));
    command.args(["map", "--gpus", "0"]).args(arguments);
    command
}

/// Runs it to its end, with nothing on its standard input.
pub fn said(arguments: &[&str]) -> Said {
    with_input(map(arguments), b"")
}

/// Runs a command to its end, with this on its standard input.
pub fn with_input(mut command: Command, input: &[u8]) -> Said {
    let text = format!("{command:?}");
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = command.spawn().unwrap_or_else(|error| panic!("{text}: {error}"));
    let (pid, mut stdin, input) = (child.id(), child.stdin.take().unwrap(), input.to_vec());
    std::thread::spawn(move || {
        // Whoever has enough closes it.
        let _ = stdin.write_all(&input);
    });
    let (tell, told) = channel();
    std::thread::spawn(move || drop(tell.send(child.wait_with_output())));
    let Ok(output) = told.recv_timeout(DEADLINE) else {
        let _ = Command::new("kill").args(["-9", &pid.to_string()]).status();
        panic!("{text} did not end within {DEADLINE:?}");
    };
    let Output { status, stdout, stderr } = output.unwrap();
    Said { command: text, code: status.code(), out: stdout, err: String::from_utf8_lossy(&stderr).into_owned() }
}

impl Said {
    /// What it wrote, where it ended so.
    #[track_caller]
    pub fn with(self, code: i32) -> String {
        assert_eq!(self.code, Some(code), "{self:#?}");
        String::from_utf8(self.out).unwrap()
    }

    /// What it wrote, where all is done.
    #[track_caller]
    pub fn fine(self) -> String {
        self.with(0)
    }

    /// It ended so, and said each of these on standard error.
    #[track_caller]
    pub fn tells(self, code: i32, says: &[&str]) -> Self {
        assert_eq!(self.code, Some(code), "{self:#?}");
        for part in says {
            assert!(self.err.contains(part), "{part:?} is missing in {self:#?}");
        }
        self
    }
}
