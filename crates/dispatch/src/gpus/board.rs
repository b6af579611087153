//! What all places of a run show: which leases are held, and the news about them.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use gpupool_client::local::Notice;

use super::{GpuNews, Granted};

/// Shared by the places of one keeper. A lock rather than messages: it is held for a look, or for one piece of news, and all
/// of them are tasks of one thread.
#[derive(Clone)]
pub(super) struct Board(Arc<Mutex<Inner>>);

struct Inner {
    tell: Box<dyn FnMut(GpuNews) + Send>,
    held: Vec<Option<Held>>,
    /// Places that miss the agent.
    away: BTreeSet<usize>,
}

/// A lease that is held now.
#[derive(Debug, Clone)]
pub(super) struct Held {
    pub granted: Granted,
    /// Whether the agent watches our process.
    pub is_to_process: bool,
}

impl Board {
    pub fn new(places: usize, tell: Box<dyn FnMut(GpuNews) + Send>) -> Self {
        Self(Arc::new(Mutex::new(Inner { tell, held: vec![None; places], away: BTreeSet::new() })))
    }

    /// What is held, place by place.
    pub fn held(&self) -> Vec<Option<Held>> {
        self.lock().held.clone()
    }

    pub fn tell(&self, news: GpuNews) {
        (self.lock().tell)(news);
    }

    pub fn granted(&self, held: Held) {
        let (place, granted) = (held.granted.place, held.granted.clone());
        let mut inner = self.lock();
        inner.held[place] = Some(held);
        (inner.tell)(GpuNews::Granted(granted));
    }

    pub fn lost(&self, place: usize, why: String) {
        // Whoever says so is there.
        self.notice(place, Notice::Back);
        let mut inner = self.lock();
        inner.held[place] = None;
        (inner.tell)(GpuNews::Lost { place, why });
    }

    /// It is given back, or about to be: nobody starts anything on it any more.
    pub fn gives_back(&self, place: usize) {
        self.lock().held[place] = None;
    }

    /// Tells what happens around a lease; once where it happens to all of them.
    pub fn notice(&self, place: usize, notice: Notice) {
        let mut inner = self.lock();
        let text = match notice {
            Notice::Away(error) => {
                let is_first = inner.away.is_empty();
                inner.away.insert(place);
                is_first.then(|| format!("the agent is away, the work goes on ({error})"))
            }
            Notice::Back => {
                let was_away = inner.away.remove(&place);
                (was_away && inner.away.is_empty()).then(|| "the agent is back".into())
            }
            Notice::TakenSoon(reason) => {
                let gpus = inner.held[place].as_ref().map(|held| numbers(&held.granted)).unwrap_or_default();
                let reason = reason.map(|reason| format!(": {reason}")).unwrap_or_default();
                Some(format!("GPU {gpus} will be taken back soon{reason}"))
            }
        };
        if let Some(text) = text {
            (inner.tell)(GpuNews::Note(text));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn numbers(granted: &Granted) -> String {
    granted.gpu_ids().iter().map(u32::to_string).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;

    use super::*;

    #[test]
    fn an_agent_that_all_places_miss_is_told_of_once() {
        let (sender, told) = channel();
        let board = Board::new(3, Box::new(move |news| sender.send(news).unwrap()));
        for place in 0..3 {
            board.notice(place, Notice::Away(format!("try {place}")));
        }
        for place in 0..3 {
            board.notice(place, Notice::Back);
        }
        board.notice(1, Notice::Back);
        let told: Vec<GpuNews> = told.try_iter().collect();
        let note = |text: &str| GpuNews::Note(text.into());
        assert_eq!(told, [note("the agent is away, the work goes on (try 0)"), note("the agent is back")]);
    }
}
