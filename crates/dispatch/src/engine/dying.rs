//! A worker's end: its process is seen off by a thread, what it still said is heard, and somebody takes its place.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use gpupool_confine::bounds::Excess;
use gpupool_confine::spawn::JobEnd;
use rustix::event::epoll;

use super::post::Message;
use super::slot::{Phase, Remains, Stage};
use super::{Engine, Progress};
use crate::error::DispatchError;
use crate::event::Event;
use crate::limits::SETUP_TRIES;
use crate::process::{Process, cause_of_death, see_off};
use crate::signals::untaken_by_threads_of;
use crate::{Cause, Outcome};

impl Engine {
    /// Ends a worker that is alive: killed after a grace, in which it may end by itself. Once it is gone, `buried` goes on.
    pub(super) fn bury(&mut self, at: usize, cause: Option<Cause>, grace: Duration) {
        let slot = &mut self.slots[at];
        if !matches!(slot.stage, Stage::Alive(..)) {
            return;
        }
        let Stage::Alive(process, phase) = std::mem::replace(&mut slot.stage, Stage::Gone) else { return };
        let Process { job, held, mut wire, counters, writes, spool } = *process;
        for gone in [epoll::delete(&self.epoll, &wire), epoll::delete(&self.epoll, &job)] {
            debug_assert!(gone.is_ok(), "{gone:?}");
        }
        if let Some(writes) = &writes {
            let _ = epoll::delete(&self.epoll, writes);
        }
        if !grace.is_zero() {
            wire.hang_up();
        }
        slot.stage = Stage::Dying(Box::new(Remains { wire, counters, writes, spool, phase, cause }));
        let (generation, post) = (slot.generation, Arc::clone(&self.post));
        let job = Arc::new(Mutex::new(Some((job, held))));
        let see_off = {
            let (job, post) = (Arc::clone(&job), Arc::clone(&post));
            move || {
                // Taken by whoever comes first; both never do.
                let job = job.lock().ok().and_then(|mut job| job.take());
                let (end, excess) = job.map_or((None, None), |(job, held)| see_off(job, held.as_ref(), grace));
                post.send(Message::Buried { slot: at, generation, end, excess });
            }
        };
        let thread = std::thread::Builder::new().name("gpupool-bury".into());
        if untaken_by_threads_of(|| thread.spawn(see_off.clone())).is_err() {
            // No thread can be had: then it takes as long as it takes.
            see_off();
        }
    }

    pub(super) fn buried(
        &mut self,
        at: usize,
        generation: u64,
        end: Option<JobEnd>,
        excess: Option<Excess>,
        now: Instant,
    ) {
        if self.slots.get(at).is_none_or(|slot| slot.generation != generation) {
            return;
        }
        self.hear_the_rest(at, now);
        let slot = &mut self.slots[at];
        let worker = slot.place.id;
        let Stage::Dying(remains) = &slot.stage else { return };
        let phase = remains.phase;
        let cause = remains.cause.clone().unwrap_or_else(|| cause_of_death(end, excess));
        let counted = remains.counters.read();
        if let (Some(task), _) = self.ledger.at(worker) {
            self.keep_output(at, task, &Outcome::Cancelled);
        }
        self.ledger.gone(worker, counted, &cause, &mut self.effects);
        self.obey_effects(now);
        self.ended(at, phase, cause, now);
    }

    /// What it said before it died is heard.
    fn hear_the_rest(&mut self, at: usize, now: Instant) {
        let mut words = bytes::BytesMut::new();
        loop {
            let Stage::Dying(remains) = &mut self.slots[at].stage else { return };
            // Nonsense is not listened to any further.
            if matches!(remains.cause, Some(Cause::Nonsense(_))) || !matches!(remains.wire.read(), Ok(true)) {
                break;
            }
            self.hear(at, now);
        }
        self.hear_the_unsent(at, now);
        let slot = &mut self.slots[at];
        if let Stage::Dying(remains) = &mut slot.stage
            && let Some(writes) = &remains.writes
        {
            while matches!(crate::protocol::read_into(&mut words, 64 * 1024, writes), Ok(read) if read > 0) {}
        }
        slot.hear_words(&words);
        if self.plan.output == crate::plan::WorkerOutput::Told && !words.is_empty() {
            self.delivery.tell(Event::Wrote { worker: slot.place.id, bytes: words.freeze() });
        }
    }

    /// What it had to say and could not send any more.
    fn hear_the_unsent(&mut self, at: usize, now: Instant) {
        let Stage::Dying(remains) = &mut self.slots[at].stage else { return };
        if matches!(remains.cause, Some(Cause::Nonsense(_))) {
            return;
        }
        if remains.wire.hear_unsent(&remains.counters) {
            self.hear(at, now);
        }
    }

    /// Its process is gone: who comes next, if anybody.
    pub(super) fn ended(&mut self, at: usize, phase: Phase, cause: Cause, now: Instant) {
        let is_open = self.progress == Progress::Open && !self.ledger.is_cancelled();
        let slot = &mut self.slots[at];
        let worker = slot.place.id;
        let last_words = slot.take_last_words();
        let is_withdrawn = slot.withdrawn.is_some();
        let mut is_wanted = is_open && !is_withdrawn;
        slot.deaths += u32::from(!matches!(phase, Phase::Stopping(_)));
        // What a worker says that was interrupted came of that.
        let is_interrupted = self.ledger.is_cancelled() && matches!(cause, Cause::Stopped);
        let own_words = slot.setup_failure.take().filter(|_| !is_interrupted);
        let is_setup_failure = matches!(phase, Phase::SettingUp(_)) && (is_wanted || own_words.is_some());
        let why = own_words.unwrap_or_else(|| with_words(&cause, &last_words));
        if is_setup_failure {
            is_wanted &= slot.has_worked && slot.deaths <= SETUP_TRIES;
            self.delivery.tell(Event::SetupFailed { worker, why: Arc::clone(&why) });
        }
        slot.counts.replaced += u64::from(is_wanted);
        slot.stage = if is_wanted { Stage::Waiting(now + slot.backoff()) } else { Stage::Gone };
        if !matches!(phase, Phase::SettingUp(_)) || is_withdrawn {
            self.delivery.tell(Event::Gone { worker, cause, last_words, is_last: !is_wanted });
        }
        if is_open && !is_wanted && !is_withdrawn {
            self.check_somebody_is_left(at, why);
        }
    }

    fn check_somebody_is_left(&mut self, last: usize, why: Arc<str>) {
        // A place that was taken away may come back.
        if self.slots.iter().any(|slot| !matches!(slot.stage, Stage::Gone) || slot.withdrawn.is_some()) {
            return;
        }
        let worker = self.slots[last].place.id;
        self.give_up(if self.slots.iter().any(|slot| slot.has_worked) {
            DispatchError::NoneLeft { worker, why }
        } else {
            DispatchError::AllFailedSetup { worker, why }
        });
    }
}

fn with_words(cause: &Cause, last_words: &str) -> Arc<str> {
    match last_words.trim_end() {
        "" => cause.to_string().into(),
        words => format!("{cause}; its last words:\n{words}").into(),
    }
}
