//! How it went: the exit code, and what has to be said about it.

use gpupool_confine::spawn::JobEnd;

use super::Run;
use super::amounts::shown;
use super::follow::Cut;
use super::tether::Lost;

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
    pub lost: Option<Lost>,
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
        let most = asked.host_memory.unwrap_or_default();
        let mut messages = Vec::new();
        match (&self.cut, &self.lost) {
            (Some(Cut::TimedOut), _) => {
                let time = shown(asked.timeout.unwrap_or_default());
                messages.push(format!("the command was ended after {time} (--timeout)"));
            }
            (Some(Cut::Memory(bytes)), _) => {
                let used = bytes >> 20;
                messages.push(format!("the command was killed: it used {used} MiB of host memory, and may use {most}"));
            }
            // Said when it happened.
            (Some(Cut::Lost(_)), _) | (None, None) => {}
            (None, Some(Lost(why))) => messages.push(format!("the lease was lost ({why})")),
        }
        if self.kills > 0 {
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
    use super::*;

    #[test]
    fn what_we_did_to_the_command_decides_before_how_it_ended() {
        let ended = |end, cut, lost: Option<&str>| {
            let lost = lost.map(|why| Lost(why.into()));
            Ended { end, cut, kills: 0, stuck: 0, lost }.exit_code()
        };
        let lost = || Some(Cut::Lost(Lost("revoked".into())));
        assert_eq!(ended(JobEnd::Exited(3), None, None), 3);
        assert_eq!(ended(JobEnd::Signalled(15), None, None), 143);
        assert_eq!(ended(JobEnd::Exited(0), Some(Cut::TimedOut), None), 124);
        assert_eq!(ended(JobEnd::Signalled(9), Some(Cut::TimedOut), Some("expired")), 124);
        assert_eq!(ended(JobEnd::Signalled(9), Some(Cut::Memory(1)), None), 137);
        assert_eq!(ended(JobEnd::Signalled(15), lost(), None), 1);
        assert_eq!(ended(JobEnd::Exited(0), None, Some("revoked")), 1);
    }
}
