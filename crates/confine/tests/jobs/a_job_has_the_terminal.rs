//! A foreground job owns the terminal as if started by hand, and returns it.

use std::ffi::OsStr;
use std::fs::File;
use std::io::Write;
use std::os::unix::ffi::OsStrExt;
use std::process::{Command, Stdio};

use crate::support::{StarterProcess, expect_exited, job_with_escapes, starter_program};
use gpupool_confine::Signal;
use gpupool_confine::process::ProcFs;
use rustix::process::{Pid, WaitOptions, kill_process, waitpid};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::{LocalModes, tcgetattr, tcgetpgrp};

const CTRL_C: &[u8] = b"\x03";
const CTRL_Z: &[u8] = b"\x1a";

/// A terminal with a starter as the leader of its session, in its foreground.
struct TerminalSession {
    /// The side of keyboard and screen.
    master: File,
    starter: StarterProcess,
}

impl TerminalSession {
    fn start(job: &[impl AsRef<str>]) -> Self {
        let mut command = Command::new("setsid");
        command.arg("--ctty").arg(starter_program()).args(["--foreground", "--"]);
        command.args(job.iter().map(AsRef::as_ref));
        Self::run(command)
    }

    fn run(mut command: Command) -> Self {
        let master = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC).unwrap();
        grantpt(&master).unwrap();
        unlockpt(&master).unwrap();
        let path = ptsname(&master, Vec::new()).unwrap();
        let slave =
            || Stdio::from(File::options().read(true).write(true).open(OsStr::from_bytes(path.to_bytes())).unwrap());
        let child = command.stdin(slave()).stdout(slave()).stderr(slave()).spawn().unwrap();
        let master = File::from(master);
        Self { starter: StarterProcess::follow_output(child, master.try_clone().unwrap()), master }
    }

    fn press(&mut self, keys: &[u8]) {
        self.master.write_all(keys).unwrap();
    }

    fn foreground(&self) -> u32 {
        tcgetpgrp(&self.master).unwrap().as_raw_nonzero().get().cast_unsigned()
    }

    /// Waits for the job's first output and returns its pid.
    fn wait_ready(&mut self) -> u32 {
        let job = self.starter.expect("prepared ").parse().unwrap();
        self.starter.expect("ready");
        job
    }

    /// Waits until the starter has stopped itself, as its shell would.
    fn expect_starter_stopped(&self) {
        let starter = Pid::from_child(&self.starter.child);
        let (_, status) = waitpid(Some(starter), WaitOptions::UNTRACED).unwrap().unwrap();
        assert!(status.stopped(), "{status:?}");
    }
}

#[test]
fn a_foreground_job_reads_the_terminal() {
    let mut session = TerminalSession::start(&["sh", "-c", "echo ready; read line; echo got $line"]);
    let job = session.wait_ready();
    assert_eq!(session.foreground(), job);
    session.press(b"hello\n");
    assert_eq!(session.starter.expect("got "), "hello");
    assert_eq!(session.starter.expect("ended "), "exited 0");
}

#[test]
fn ctrl_c_reaches_only_the_job() {
    let mut session = TerminalSession::start(&["sh", "-c", "echo ready; exec sleep 600"]);
    session.wait_ready();
    session.press(CTRL_C);
    assert_eq!(session.starter.expect("ended "), "signalled 2");
    assert_eq!(session.starter.exit_code(), Some(130));
}

#[test]
fn ctrl_z_stops_job_and_starter_and_both_go_on_together() {
    let mut session = TerminalSession::start(&["sh", "-c", "echo ready; read line; exit 6"]);
    let job = session.wait_ready();
    session.press(CTRL_Z);
    assert_eq!(session.starter.expect("stopped "), "20");
    session.expect_starter_stopped();
    assert_eq!(session.foreground(), session.starter.child.id(), "the shell was to find the terminal with the starter");
    assert_eq!(ProcFs::system().stat(job).unwrap().unwrap().state, 'T');

    kill_process(Pid::from_child(&session.starter.child), Signal::CONT).unwrap();
    session.starter.expect("continued");
    assert_eq!(session.foreground(), job);
    session.press(b"\n");
    assert_eq!(session.starter.expect("ended "), "exited 6");
}

#[test]
fn terminal_settings_are_restored_after_a_killed_job() {
    let mut session = TerminalSession::start(&["sh", "-c", "stty -echo; kill -9 $$"]);
    assert_eq!(session.starter.expect("ended "), "signalled 9");
    assert!(tcgetattr(&session.master).unwrap().local_modes.contains(LocalModes::ECHO));

    let mut session = TerminalSession::start(&["stty", "-echo"]);
    assert_eq!(session.starter.expect("ended "), "exited 0");
    assert!(!tcgetattr(&session.master).unwrap().local_modes.contains(LocalModes::ECHO), "a setting meant was undone");
}

#[test]
fn in_a_pipeline_the_job_shares_the_process_group_of_its_starter() {
    let mut command = Command::new("setsid");
    let pipeline =
        "\"$0\" --foreground -- sh -c 'echo ready; read line; echo got $line; exec sleep 600' | cat; echo after";
    command.args(["--ctty", "sh", "-c", pipeline]).arg(starter_program());
    let mut session = TerminalSession::run(command);
    let job = session.wait_ready();
    let group = ProcFs::system().stat(job).unwrap().unwrap().group;
    assert_eq!(group.cast_unsigned(), session.starter.child.id(), "the group of the shell that runs the pipeline");
    session.press(b"hello\n");
    assert_eq!(session.starter.expect("got "), "hello");
    let job = crate::support::open_process(job);
    session.press(CTRL_C);
    expect_exited([&job]);
}

#[test]
fn a_hang_up_of_the_starter_ends_the_job() {
    let mut session = TerminalSession::start(&job_with_escapes("time.sleep(600)"));
    let escaped = session.starter.escaped_processes();
    // The kernel sends this to the session leader when the terminal goes away.
    kill_process(Pid::from_child(&session.starter.child), Signal::HUP).unwrap();
    expect_exited(&escaped);
}
