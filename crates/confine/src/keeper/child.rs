//! The job's process between fork and exec.

use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::process::CommandExt;

use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal, setpgid};

use super::order::{Order, Placement};
use super::signals;

/// What ties the waiting process to its keeper.
#[derive(Debug)]
pub(super) struct Gate {
    /// A byte here opens the gate; its end closes it for ever.
    pub(super) opened: OwnedFd,
    /// Where a failed exec is told; a successful one closes it.
    pub(super) failure: OwnedFd,
}

/// Waits at the gate and becomes the job's program.
pub(super) fn become_job(order: &Order, gate: &Gate, keeper: Pid) -> ! {
    if let Err(error) = prepare_and_exec(order, gate, keeper) {
        let errno = error.raw_os_error().unwrap_or(libc::EIO);
        // If nobody listens any more, nobody needs to know.
        let _ = rustix::io::write(&gate.failure, &errno.to_le_bytes());
    }
    // Not exit(): the clean-up registered in this program is the keeper's to run.
    leave_at_once(127)
}

fn prepare_and_exec(order: &Order, gate: &Gate, keeper: Pid) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if getppid() != Some(keeper) {
        return Ok(()); // The keeper died before the line above could matter.
    }
    setpgid(None, group(order))?;
    let mut byte = [0_u8];
    loop {
        match rustix::io::read(&gate.opened, &mut byte) {
            Ok(1) => break,
            Ok(_) => return Ok(()),
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(error.into()),
        }
    }
    signals::as_for_a_fresh_program()?;
    Err(std::process::Command::new(&order.program).args(&order.arguments).exec())
}

/// The process group the job joins; `None` for its own.
pub(super) fn group(order: &Order) -> Option<Pid> {
    match order.placement {
        Placement::OwnGroup => None,
        Placement::GroupOfStarter(group) => Pid::from_raw(group),
    }
}

/// Gives up standard input, output and error, so that who reads the job's output sees its end when the job closes it.
pub(super) fn let_go_of_streams() -> io::Result<()> {
    let null: OwnedFd = std::fs::OpenOptions::new().read(true).write(true).open("/dev/null")?.into();
    rustix::stdio::dup2_stdin(&null)?;
    rustix::stdio::dup2_stdout(&null)?;
    rustix::stdio::dup2_stderr(&null)?;
    Ok(())
}

#[allow(unsafe_code, reason = "_exit has no safe wrapper")]
fn leave_at_once(code: i32) -> ! {
    // SAFETY: _exit takes any number and does not return.
    unsafe { libc::_exit(code) }
}
