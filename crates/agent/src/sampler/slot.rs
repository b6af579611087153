//! A source at work: its probe, how it does, and what is known of the processes on its devices.

use std::io;
use std::time::Duration;

use gpupool_devices::{Places, Probe, ProbeAnswer, Source};

use super::evidence::{Dossier, LookedUp};
use crate::stats::{SourceSeen, SourceState};

/// A source at work.
#[derive(Debug)]
pub struct Slot {
    probe: Probe,
    dossier: Dossier,
    state: SourceState,
    /// Whether it was asked in this round, and is worth waiting for.
    asked_now: bool,
}

impl Slot {
    /// Starts its thread. Processes are looked up at `places`, where they are real.
    pub fn start(
        source: Box<dyn Source>,
        places: Option<&Places>,
        deadline: Duration,
        answered: impl Fn() + Send + 'static,
    ) -> io::Result<Self> {
        let (source, dossier): (Box<dyn Source>, Dossier) = match places {
            Some(places) => {
                let (source, dossier) = LookedUp::new(source, places);
                (Box::new(source), dossier)
            }
            None => (source, Dossier::default()),
        };
        let probe = Probe::start_telling(source, deadline, answered)?;
        Ok(Self { probe, dossier, state: SourceState::Awaited, asked_now: false })
    }

    /// Asks for a reading, unless one is still out.
    pub fn ask(&mut self) {
        self.asked_now = !self.probe.is_out();
        self.probe.ask();
    }

    /// Whether an answer may come soon: one that is out since an earlier round is not waited for.
    pub fn is_awaited(&self) -> bool {
        self.asked_now && self.probe.is_out()
    }

    /// The answer if there is one, or the complaint that there is none for too long.
    pub fn poll(&mut self) -> Option<ProbeAnswer> {
        let answer = self.probe.poll()?;
        self.state = match &answer.result {
            Ok(_) => SourceState::Answers,
            Err(error) => SourceState::Failed(error.clone()),
        };
        Some(answer)
    }

    /// What is known of processes on its devices.
    pub const fn dossier(&self) -> &Dossier {
        &self.dossier
    }

    /// How it does.
    pub fn seen(&self) -> SourceSeen {
        SourceSeen { kind: self.probe.kind(), state: self.state.clone() }
    }
}
