//! For tests of the commands: runs the real binary as a person would, with nothing of the tester's own environment.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::io::Write;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use gpupool_testkit::Agent;
use serde_json::Value;

pub const BINARY: &str = env!("CARGO_BIN_EXE_gpupool");
/// A user that owns nothing, on every machine.
const NOBODY: &str = "65534";

/// What a command said.
#[derive(Debug)]
pub struct Said {
    pub command: String,
    pub code: Option<i32>,
    pub out: String,
    pub err: String,
}

impl Said {
    pub fn of(command: &mut Command) -> Self {
        let Output { status, stdout, stderr } = command.stdin(Stdio::null()).output().unwrap();
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        Self { command: format!("{command:?}"), code: status.code(), out: text(stdout), err: text(stderr) }
    }

    /// What it said, where all went well.
    #[track_caller]
    pub fn fine(self) -> String {
        assert_eq!(self.code, Some(0), "{self:#?}");
        self.out
    }

    /// What it said in JSON, where all went well.
    #[track_caller]
    pub fn json(self) -> Value {
        let text = self.fine();
        serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
    }

    /// It ended with this number and said nothing but an error with each of these in it.
    #[track_caller]
    pub fn failed(self, code: i32, says: &[&str]) {
        assert_eq!(self.code, Some(code), "{self:#?}");
        assert_eq!(self.out, "", "{self:#?}");
        assert!(self.err.starts_with("error: "), "{self:#?}");
        assert!(self.err.matches("os error").count() < 2, "the cause is said twice: {self:#?}");
        for part in says {
            assert!(self.err.contains(part), "{part:?} is missing in {self:#?}");
        }
    }
}

/// The command with nothing in its environment but what lets it run; its home is `home`.
pub fn bare(home: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(BINARY);
    command.args(args).env_clear().env("PATH", "/usr/bin:/bin:/usr/sbin:/sbin").env("HOME", home);
    command
        .env("GPUPOOL_STATE_DIR", home.join("state"))
        .env("LLVM_PROFILE_FILE", std::env::var_os("LLVM_PROFILE_FILE").unwrap_or_else(|| "/dev/null".into()));
    command
}

/// The command, asking this agent over its socket, on a page of 80 columns.
pub fn asking(agent: &Agent, args: &[&str]) -> Command {
    let mut command = bare(agent.state_dir(), args);
    command.env("GPU_SERVICE_ENDPOINT", format!("unix:{}", agent.socket().display())).env("COLUMNS", "80");
    command
}

/// What the command says of this agent.
pub fn ask(agent: &Agent, args: &[&str]) -> Said {
    Said::of(&mut asking(agent, args))
}

/// The command as a user who is not the agent's, asking it over loopback; `None`, and said so, where that cannot be tried.
pub fn as_nobody(agent: &Agent, args: &[&str]) -> Option<Command> {
    if !rustix::process::geteuid().is_root() {
        skipped("a command of another user", "only root can become another user");
        return None;
    }
    let become_nobody = |args: &[&str]| {
        let mut command = Command::new("setpriv");
        command.args(["--reuid", NOBODY, "--regid", NOBODY, "--clear-groups", BINARY]).args(args).env_clear();
        command.env("PATH", "/usr/bin:/bin").env("HOME", "/nonexistent").env("GPU_SERVICE_ENDPOINT", agent.address());
        command
    };
    match become_nobody(&["--version"]).output() {
        Ok(output) if output.status.success() => Some(become_nobody(args)),
        tried => {
            skipped("a command of another user", &format!("it cannot run this binary: {tried:?}"));
            None
        }
    }
}

/// Says on the real standard error what was not tried and why; a passing test's own output is not shown.
pub fn skipped(what: &str, why: &str) {
    let _ = std::io::stderr().write_all(format!("skipped {what}: {why}\n").as_bytes());
}
