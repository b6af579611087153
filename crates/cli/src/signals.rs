//! The signals a command gets while there is something to be put in order before its end.

use std::future::poll_fn;
use std::io;
use std::task::Poll;

use anyhow::Context;
use gpupool_confine::Signal;
use tokio::signal::unix::{Signal as Listener, SignalKind, signal};

/// Signals that arrived, one after the other. Those that are listened for end nothing by themselves any more.
#[derive(Debug)]
pub(crate) struct Signals {
    ignored: u64,
    listened: Vec<(Signal, Listener)>,
}

impl Signals {
    /// Listens for what tells us to end, or tells our command something. Signals that were ignored when we were started stay
    /// so, for us and for the command: that is how `nohup` works.
    pub fn listen() -> anyhow::Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status").context("cannot read which signals are ignored")?;
        let wanted = [Signal::INT, Signal::TERM, Signal::QUIT, Signal::HUP, Signal::USR1, Signal::USR2];
        Self { ignored: ignored(&status).unwrap_or(0), listened: Vec::new() }.with(&wanted)
    }

    /// Listens for what tells us to end, ignored before or not.
    pub fn listen_for_end() -> anyhow::Result<Self> {
        Self { ignored: 0, listened: Vec::new() }.with(&[Signal::INT, Signal::TERM, Signal::HUP])
    }

    fn with(mut self, wanted: &[Signal]) -> anyhow::Result<Self> {
        self.add(wanted).context("cannot listen for signals")?;
        Ok(self)
    }

    /// Listens for these too.
    pub fn add(&mut self, more: &[Signal]) -> io::Result<()> {
        for wanted in more {
            let number = wanted.as_raw();
            let is_ignored = self.ignored & (1_u64 << (number - 1)) != 0;
            if !is_ignored {
                self.listened.push((*wanted, signal(SignalKind::from_raw(number))?));
            }
        }
        Ok(())
    }

    /// The next signal. Can be dropped and asked for again.
    pub async fn next(&mut self) -> Signal {
        poll_fn(|context| {
            for (signal, listener) in &mut self.listened {
                if listener.poll_recv(context).is_ready() {
                    return Poll::Ready(*signal);
                }
            }
            Poll::Pending
        })
        .await
    }

    /// The next one that asks us to end.
    pub async fn next_to_end(&mut self) -> Signal {
        loop {
            let signal = self.next().await;
            if signal != Signal::USR1 && signal != Signal::USR2 {
                return signal;
            }
        }
    }
}

/// The mask of ignored signals in a `status` text.
fn ignored(status: &str) -> Option<u64> {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}

/// The exit code of a program that a signal ended.
pub(crate) fn exit_code(signal: Signal) -> u8 {
    u8::try_from(128 + signal.as_raw()).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_of_ignored_signals_is_read() {
        assert_eq!(ignored("Name:\tx\nSigIgn:\t0000000000001001\n"), Some(0x1001));
        assert_eq!(ignored("Name:\tx\n"), None);
        assert_eq!((exit_code(Signal::INT), exit_code(Signal::TERM)), (130, 143));
    }
}
