//! Handing the terminal to the job and taking it back.
//!
//! A terminal has one process group in its foreground, which may read from it and gets Ctrl-C and Ctrl-Z. If we are that
//! group, and alone in it, the job's group takes our place while it runs. If others are in it with us (a pipeline, a
//! script), taking the terminal away would stop them: then the job joins our group instead.

use std::fs::File;
use std::io;

use rustix::process::{Pid, getpgrp};
use rustix::termios::{OptionalActions, Termios, tcgetattr, tcgetpgrp, tcsetattr, tcsetpgrp};

use super::spec::TerminalUse;
use crate::keeper::{Placement, from_the_background};
use crate::process::ProcFs;

/// The terminal we run on.
#[derive(Debug)]
pub(super) struct Terminal {
    device: File,
    ours: Pid,
    /// How it was set up when it was handed over; a job killed at work may leave it without echo.
    modes: Option<Termios>,
}

/// What becomes of the terminal's settings when it is taken back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Modes {
    /// The job ended in order, and may have meant what it set.
    Keep,
    /// The job was cut off, and had no chance to tidy up.
    Restore,
}

/// Which process group the job gets, and the terminal to hand over to it, if any.
pub(super) fn arrange(wish: TerminalUse) -> io::Result<(Placement, Option<Terminal>)> {
    if wish == TerminalUse::Background {
        return Ok((Placement::OwnGroup, None));
    }
    let Ok(device) = File::options().read(true).write(true).open("/dev/tty") else {
        return Ok((Placement::OwnGroup, None));
    };
    let terminal = Terminal { device, ours: getpgrp(), modes: None };
    let group = terminal.ours.as_raw_nonzero().get();
    let shared = || -> io::Result<bool> {
        Ok(ProcFs::here().all()?.iter().any(|stat| stat.group == group && stat.pid != std::process::id()))
    };
    if terminal.is_ours() && shared()? {
        return Ok((Placement::GroupOfStarter(group), None));
    }
    Ok((Placement::OwnGroup, Some(terminal)))
}

impl Terminal {
    /// Whether we are in its foreground right now.
    pub(super) fn is_ours(&self) -> bool {
        tcgetpgrp(&self.device) == Ok(self.ours)
    }

    /// Hands it to the job's group, if it is ours at the moment.
    pub(super) fn give_to(&mut self, group: Pid) -> io::Result<()> {
        if self.is_ours() {
            self.modes = tcgetattr(&self.device).ok();
            from_the_background(|| tcsetpgrp(&self.device, group))?;
        }
        Ok(())
    }

    /// Takes it back if the job's group has it; a shell may have given it to somebody else meanwhile.
    pub(super) fn take_back(&self, group: Pid, modes: Modes) -> io::Result<()> {
        if tcgetpgrp(&self.device)? != group {
            return Ok(());
        }
        from_the_background(|| {
            tcsetpgrp(&self.device, self.ours)?;
            match (&self.modes, modes) {
                (Some(before), Modes::Restore) => tcsetattr(&self.device, OptionalActions::Drain, before),
                _ => Ok(()),
            }
        })?;
        Ok(())
    }
}
