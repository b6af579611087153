//! Looking at a worker now and then: whether its task takes too long, and whether others wait behind one that does.

use std::time::Instant;

use super::{Effect, Ledger, Skill, Worker};
use crate::WorkerId;
use crate::limits::RECALL_AFTER;
use crate::protocol::Counted;

/// What a look at a worker finds.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    /// Which.
    pub worker: WorkerId,
    /// What it counted.
    pub counted: Counted,
    /// When its last task was begun by this clock, where it tells.
    pub begun: Option<Instant>,
    /// When it was looked at.
    pub now: Instant,
}

impl Ledger {
    /// When a worker has to be looked at next, because of its task's time or of what waits behind that.
    pub fn look(&mut self, seen: Seen, effects: &mut Vec<Effect>) -> Option<Instant> {
        let behind = self.look_behind(seen, effects);
        let late = self.look_at_time(seen, effects);
        behind.into_iter().chain(late).min()
    }

    /// Whether others wait behind a task that takes long.
    fn look_behind(&mut self, seen: Seen, effects: &mut Vec<Effect>) -> Option<Instant> {
        let Seen { worker, counted, begun, now } = seen;
        let here = self.workers.get_mut(&worker).filter(|here| here.skill == Skill::Recalls && !here.is_slow)?;
        let begun_here = counted.started.saturating_sub(here.answers);
        if here.is_killed || here.inbox.len() as u64 <= begun_here.max(1) {
            return None;
        }
        let is_amid = counted.started > counted.finished;
        let due = begun.or(here.begun).filter(|_| is_amid).unwrap_or(now) + RECALL_AFTER;
        if now < due {
            return Some(due);
        }
        here.is_slow = true;
        effects.push(Effect::Recall { worker });
        None
    }

    /// A worker claimed so many tasks since it is set up; the others of its inbox are not its own any more.
    pub fn recalled(&mut self, worker: WorkerId, claimed: u64, effects: &mut Vec<Effect>) {
        let Some(here) = self.workers.get_mut(&worker) else { return };
        let keeps = usize::try_from(claimed.saturating_sub(here.answers)).unwrap_or(usize::MAX);
        let back = here.inbox.split_off(keeps.min(here.inbox.len()));
        self.give_back(back, effects);
    }

    /// Whether tasks a worker has not begun can be taken back from it.
    pub fn can_recall(&self, worker: WorkerId) -> bool {
        self.workers.get(&worker).is_some_and(|here| here.skill == Skill::Recalls)
    }

    /// Whether tasks wait behind the one a worker has first, and could be taken back.
    pub fn has_behind(&self, worker: WorkerId) -> bool {
        let can = |here: &Worker| here.skill == Skill::Recalls && !here.is_slow && here.inbox.len() > 1;
        self.workers.get(&worker).is_some_and(can)
    }

    /// Whether its task takes longer than it may.
    fn look_at_time(&mut self, seen: Seen, effects: &mut Vec<Effect>) -> Option<Instant> {
        let Seen { worker, counted, begun, now } = seen;
        let timeout = self.rules.task_timeout?;
        let here = self.workers.get_mut(&worker).filter(|here| !here.is_killed)?;
        if let Some((_, until)) = here.interrupted {
            if now < until {
                return Some(until);
            }
            here.is_killed = true;
            effects.push(Effect::Kill { worker });
            return None;
        }
        // Between two tasks nothing runs; the next one is looked at when it has.
        let is_amid = !here.counts() || counted.started > counted.finished;
        let begun = begun.or(here.begun).filter(|_| is_amid && !here.inbox.is_empty());
        let Some(due) = begun.map(|begun| begun + timeout) else { return Some(now + timeout) };
        if now < due {
            return Some(due);
        }
        let nth = if here.counts() { counted.started.saturating_sub(here.answers).saturating_sub(1) } else { 0 };
        let task = usize::try_from(nth).ok().and_then(|nth| here.inbox.get(nth).copied())?;
        here.interrupted = Some((task, now + self.rules.grace));
        effects.push(Effect::Interrupt { worker, begun: counted.started });
        Some(now + self.rules.grace)
    }
}
