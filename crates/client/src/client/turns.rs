//! The order in which requests were made, for those that are under way at once: whoever finds no room enters the queues after
//! those who asked before, though their answers may come in another order.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use tokio::time::timeout;

use super::running::locked;
use crate::changes::Changes;
use crate::limits::DIRECT_PATIENCE;

/// Who asked and does not know yet whether there is room, by number.
#[derive(Debug, Default)]
pub(super) struct Turns {
    undecided: Mutex<Undecided>,
    changes: Arc<Changes>,
}

#[derive(Debug, Default)]
struct Undecided {
    last: u64,
    numbers: BTreeSet<u64>,
}

impl Turns {
    /// The next one.
    pub fn take(self: &Arc<Self>) -> Turn {
        let mut undecided = locked(&self.undecided);
        undecided.last += 1;
        let number = undecided.last;
        undecided.numbers.insert(number);
        Turn { turns: self.clone(), number }
    }
}

/// A place in that order, until it is dropped.
#[derive(Debug)]
pub(super) struct Turn {
    turns: Arc<Turns>,
    number: u64,
}

impl Turn {
    /// Waits until nobody who came before is undecided; not for long, because one of them may ask a server that hangs.
    pub async fn comes(&self) {
        let mut changes = self.turns.changes.follow();
        let is_first = || locked(&self.turns.undecided).numbers.first() == Some(&self.number);
        let comes = async {
            while !is_first() {
                changes.changed().await;
            }
        };
        let _ = timeout(DIRECT_PATIENCE, comes).await;
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        locked(&self.turns.undecided).numbers.remove(&self.number);
        self.turns.changes.tell();
    }
}
