//! Reads every device of the node in a steady rhythm, and hands out what was read.
//!
//! One thread keeps the rhythm; each source is read on a thread of its own ([`gpupool_devices::Probe`]), which also looks
//! up the processes on its devices ([`evidence`]). A round asks every source that has answered, waits a short while for
//! all of them together, and tells what there is; an answer that comes later is told when it comes, with the time it was
//! taken. So a hung driver holds up neither the others nor the rhythm. The thread ends with [`Sampler::stop`] or when the
//! sampler is dropped; the thread of a source ends once the source has answered.

pub mod evidence;
pub mod limits;
mod processes;
mod rounds;
mod sample;
mod slot;
mod whose;

use std::io;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use gpupool_devices::{GpuIds, Places, Source};

use crate::stats::Statistics;
use rounds::{Event, Rounds};
use slot::Slot;

pub use sample::{Sample, SampledDevice};
pub use whose::{Holding, Holdings};

/// What a sampler needs.
pub struct SamplerSpec {
    /// Where devices are read from.
    pub sources: Vec<Box<dyn Source>>,
    /// The numbers devices had before.
    pub ids: GpuIds,
    /// How often devices are read.
    pub refresh: Duration,
    /// After how long without an answer a source is unresponsive; usually [`limits::UNRESPONSIVE_AFTER`].
    pub unresponsive_after: Duration,
    /// Where things are on this machine.
    pub places: Places,
    /// Whether devices, and with them the processes on them, are made up.
    pub simulated: bool,
    /// Asked after each reading: who holds what. Must not wait long.
    pub holdings: Box<dyn FnMut() -> Holdings + Send>,
    /// Given what was read, after each round and each late answer. Must not wait long.
    pub deliver: Box<dyn FnMut(Sample) + Send>,
    /// Where statistics are told; its filter says which devices are sampled.
    pub publish: Arc<Statistics>,
}

/// A sampler at work.
#[derive(Debug)]
pub struct Sampler {
    events: Sender<Event>,
    first_told: Receiver<()>,
    thread: Option<JoinHandle<()>>,
}

impl Sampler {
    /// Starts it; the first reading is taken at once.
    pub fn start(spec: SamplerSpec) -> io::Result<Self> {
        let (events, heard) = channel();
        let (tell_first, first_told) = channel();
        let slot = |(number, source)| {
            let events = events.clone();
            let answered = move || drop(events.send(Event::Answered(number)));
            let places = (!spec.simulated).then_some(&spec.places);
            Slot::start(source, places, spec.unresponsive_after, answered)
        };
        let slots = spec.sources.into_iter().enumerate().map(slot).collect::<io::Result<Vec<_>>>()?;
        let book = sample::Book::new(spec.ids, spec.simulated, spec.holdings);
        let rounds = Rounds::new(slots, book, spec.refresh, spec.deliver, spec.publish, heard, tell_first);
        let thread = thread::Builder::new().name("sampler".to_owned()).spawn(move || rounds.run())?;
        Ok(Self { events, first_told, thread: Some(thread) })
    }

    /// Waits until the first round was told, which takes [`limits::FIRST_PATIENCE`] at most and a little; `false` if it
    /// was not by then.
    pub fn wait_for_first(&self, at_most: Duration) -> bool {
        self.first_told.recv_timeout(at_most).is_ok()
    }

    /// Ends it and waits until it has ended. A source that hangs is left behind.
    pub fn stop(mut self) {
        let _ = self.events.send(Event::Stop);
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            tracing::error!("the sampler had ended before by a panic");
        }
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        // Harmless where it has ended. Not waited for: whoever drops may be who it delivers to.
        let _ = self.events.send(Event::Stop);
    }
}
