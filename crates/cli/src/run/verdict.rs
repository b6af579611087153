//! How it went: the exit code, and what has to be said about it.

use gpupool_confine::spawn::JobEnd;

use crate::units::shown_finely;

use super::Run;
use super::follow::Cut;

/// Everything known about the end of a command.
#[derive(Debug)]
pub(super) struct Ended {
    pub end: JobEnd,
    /// Why we ended it, where we did.
    pub cut: Option<Cut>,
    /// Processes the kernel killed for want of memory.
    pub kills: u64,
    /// Processes that could not be killed.
    pub stuck: u32,
    /// That the lease had been lost, where only giving it back showed it.
    pub lost: Option<String>,
}

impl Ended {
    /// What a script can rely on.
    pub fn exit_code(&self) -> u8 {
        match (&self.cut, &self.lost) {
            (Some(Cut::TimedOut), _) => 124,
            (Some(Cut::Memory(_)), _) => 137,
            (Some(Cut::Lost(_)), _) | (None, Some(_)) => 1,
            (None, None) => u8::try_from(self.end.exit_code()).unwrap_or(u8::MAX),
        }
    }

    /// What went wrong, where something did.
    pub fn messages(&self, asked: &Run) -> Vec<String> {
        let most = asked.wish.host_memory.unwrap_or_default();
        let mut messages = Vec::new();
        match (&self.cut, &self.lost) {
            (Some(Cut::TimedOut), _) => {
                let time = shown_finely(asked.timeout.unwrap_or_default());
                messages.push(format!("the command was ended after {time} (--timeout)"));
            }
            (Some(Cut::Memory(excess)), _) => messages.push(format!("the command was killed: {excess}")),
            // Said when it happened.
            (Some(Cut::Lost(_)), _) | (None, None) => {}
            (None, Some(why)) => messages.push(format!("the lease was lost ({why})")),
        }
        if self.kills > 0 && !matches!(self.cut, Some(Cut::Memory(_))) {
            let killed = processes(self.kills);
            messages.push(format!(
                "the kernel killed {killed} of the command: it used more than {most} MiB of host memory"
            ));
        }
        if self.stuck > 0 {
            let left = processes(self.stuck.into());
            messages.push(format!("{left} of the command could not be killed, and may still use the GPU"));
        }
        messages
    }
}

fn processes(count: u64) -> String {
    if count == 1 { "1 process".into() } else { format!("{count} processes") }
}

#[cfg(test)]
mod tests {
    use gpupool_confine::bounds::Excess;

    use super::*;

    #[test]
    fn what_we_did_to_the_command_decides_before_how_it_ended() {
        let ended = |end, cut, lost: Option<&str>| {
            let lost = lost.map(str::to_owned);
            Ended { end, cut, kills: 0, stuck: 0, lost }.exit_code()
        };
        let lost = || Some(Cut::Lost("revoked".into()));
        let too_much = Excess::HostMemory { used: Some(2), allowed: 1 };
        assert_eq!(ended(JobEnd::Exited(3), None, None), 3);
        assert_eq!(ended(JobEnd::Signalled(15), None, None), 143);
        assert_eq!(ended(JobEnd::Exited(0), Some(Cut::TimedOut), None), 124);
        assert_eq!(ended(JobEnd::Signalled(9), Some(Cut::TimedOut), Some("expired")), 124);
        assert_eq!(ended(JobEnd::Signalled(9), Some(Cut::Memory(too_much)), None), 137);
        assert_eq!(ended(JobEnd::Signalled(15), lost(), None), 1);
        assert_eq!(ended(JobEnd::Exited(0), None, Some("revoked")), 1);
    }
}
