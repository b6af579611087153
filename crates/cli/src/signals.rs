//! Signals that a command handles so that it can clean up before it ends.

use std::future::poll_fn;
use std::io;
use std::task::Poll;

use anyhow::Context;
use gpupool_confine::Signal;
use tokio::signal::unix::{Signal as TokioSignal, SignalKind, signal};

/// Receives signals one by one. A signal with a listener no longer ends the process automatically.
#[derive(Debug)]
pub(crate) struct SignalListener {
    ignored_mask: u64,
    listeners: Vec<(Signal, TokioSignal)>,
}

impl SignalListener {
    /// Listens for signals that end the command or are passed on to it. Signals that were ignored at the start stay
    /// ignored, as `nohup` requires.
    pub fn listen_all() -> anyhow::Result<Self> {
        let status = std::fs::read_to_string("/proc/self/status").context("cannot read which signals are ignored")?;
        let signal_number = [Signal::INT, Signal::TERM, Signal::QUIT, Signal::HUP, Signal::USR1, Signal::USR2];
        Self { ignored_mask: ignored_mask(&status).unwrap_or(0), listeners: Vec::new() }.with(&signal_number)
    }

    /// Listens for termination signals, even if they were ignored at the start.
    pub fn listen_for_termination() -> anyhow::Result<Self> {
        Self { ignored_mask: 0, listeners: Vec::new() }.with(&[Signal::INT, Signal::TERM, Signal::HUP])
    }

    fn with(mut self, signal_number: &[Signal]) -> anyhow::Result<Self> {
        self.add(signal_number).context("cannot listen for signals")?;
        Ok(self)
    }

    /// Listens for additional signals.
    pub fn add(&mut self, more: &[Signal]) -> io::Result<()> {
        for signal_number in more {
            let number = signal_number.as_raw();
            let is_ignored = self.ignored_mask & (1_u64 << (number - 1)) != 0;
            if !is_ignored {
                self.listeners.push((*signal_number, signal(SignalKind::from_raw(number))?));
            }
        }
        Ok(())
    }

    /// Waits for the next signal. Cancel safe.
    pub async fn next_signal(&mut self) -> Signal {
        poll_fn(|context| {
            for (signal, listener) in &mut self.listeners {
                if listener.poll_recv(context).is_ready() {
                    return Poll::Ready(*signal);
                }
            }
            Poll::Pending
        })
        .await
    }

    /// Waits for the next signal that asks the command to end. Cancel safe.
    pub async fn next_termination(&mut self) -> Signal {
        loop {
            let signal = self.next_signal().await;
            if signal != Signal::USR1 && signal != Signal::USR2 {
                return signal;
            }
        }
    }
}

/// Parses the mask of ignored signals from `/proc/self/status`.
fn ignored_mask(status: &str) -> Option<u64> {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"))?;
    u64::from_str_radix(mask.trim(), 16).ok()
}

/// Returns the shell's exit code for a process ended by a signal.
pub(crate) fn exit_code(signal: Signal) -> u8 {
    u8::try_from(128 + signal.as_raw()).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mask_of_ignored_signals_is_parsed() {
        assert_eq!(ignored_mask("Name:\tx\nSigIgn:\t0000000000001001\n"), Some(0x1001));
        assert_eq!(ignored_mask("Name:\tx\n"), None);
        assert_eq!((exit_code(Signal::INT), exit_code(Signal::TERM)), (130, 143));
    }
}
