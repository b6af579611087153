//! The order of requests that are under way at once. A request that finds no capacity enters the queues after all
//! earlier ones, although their responses may come in another order.

use std::collections::BTreeSet;
use std::sync::{Arc, Mutex};

use tokio::time::timeout;

use super::change_notifier::ChangeNotifier;
use super::running_client::lock_unpoisoned;
use crate::limits::DIRECT_REQUEST_TIMEOUT;

/// Open tickets, by number.
#[derive(Debug, Default)]
pub(super) struct TicketSet {
    last: u64,
    pub numbers: BTreeSet<u64>,
}

impl TicketSet {
    /// Issues the next number.
    pub(super) fn issue(&mut self) -> u64 {
        self.last += 1;
        self.numbers.insert(self.last);
        self.last
    }
}

/// Requests for which it is not known yet whether there is capacity.
#[derive(Debug, Default)]
pub(super) struct ArrivalOrder {
    undecided: Mutex<TicketSet>,
    changes: Arc<ChangeNotifier>,
}

impl ArrivalOrder {
    /// Issues the ticket of the next request.
    pub(super) fn issue_ticket(self: &Arc<Self>) -> ArrivalTicket {
        ArrivalTicket { order: self.clone(), number: lock_unpoisoned(&self.undecided).issue() }
    }
}

/// Position in the arrival order, until it is dropped.
#[derive(Debug)]
pub(super) struct ArrivalTicket {
    order: Arc<ArrivalOrder>,
    number: u64,
}

impl ArrivalTicket {
    /// Waits until all earlier requests are decided, with a time limit, because one of them may wait for a server that
    /// hangs.
    pub(super) async fn wait_turn(&self) {
        let mut changes = self.order.changes.observe();
        let is_first = || lock_unpoisoned(&self.order.undecided).numbers.first() == Some(&self.number);
        let first = async {
            while !is_first() {
                changes.changed().await;
            }
        };
        let _ = timeout(DIRECT_REQUEST_TIMEOUT, first).await;
    }
}

impl Drop for ArrivalTicket {
    fn drop(&mut self) {
        lock_unpoisoned(&self.order.undecided).numbers.remove(&self.number);
        self.order.changes.notify();
    }
}
