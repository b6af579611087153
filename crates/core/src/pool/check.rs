//! Whether a pool's books agree with each other: what tests ask after every step.

use std::collections::BTreeMap;

use crate::ids::{DeviceId, LeaseId};
use crate::lease::LeaseState;
use crate::units::{Bytes, MilliCpus, Share};

use super::{Pool, ending};

impl Pool {
    /// Checks every invariant the pool's own books can show; the error says which is broken.
    pub fn sanity_check(&self) -> Result<(), String> {
        self.check_devices()?;
        self.check_hosts()?;
        self.check_leases()?;
        self.inventory.check()
    }

    fn check_devices(&self) -> Result<(), String> {
        let mut books: BTreeMap<DeviceId, (Share, Bytes, Vec<LeaseId>)> = BTreeMap::new();
        for lease in self.leases.values() {
            for promise in lease.promises.iter() {
                let book = books.entry(promise.device).or_default();
                book.0 += promise.share;
                book.1 += promise.memory;
                book.2.push(lease.id);
            }
        }
        for (number, slot) in self.inventory.devices.iter().enumerate() {
            let (share, memory, mut leases) = books.remove(&DeviceId(number as u32)).unwrap_or_default();
            let mut listed = slot.leases.clone();
            leases.sort_unstable();
            listed.sort_unstable();
            if (slot.promised, slot.promised_memory) != (share, memory) || listed != leases {
                return Err(format!("device {number}: books say {share}/{memory} to {leases:?}, slot {slot:?}"));
            }
            if slot.promised > Share::WHOLE {
                return Err(format!("device {number}: {} promised of one GPU", slot.promised));
            }
        }
        match books.is_empty() {
            true => Ok(()),
            false => Err(format!("promises on unknown devices: {books:?}")),
        }
    }

    fn check_hosts(&self) -> Result<(), String> {
        for (number, slot) in self.inventory.nodes.iter().enumerate() {
            let here = self.leases.values().filter(|lease| {
                lease.node.is_some_and(|node| node.index() == number) && (lease.state.is_granted() || lease.draining)
            });
            let (cpus, memory) = here.fold((MilliCpus::ZERO, Bytes::ZERO), |(cpus, memory), lease| {
                (cpus + lease.request.cpus, memory + lease.request.host_memory)
            });
            if (slot.cpus_promised, slot.memory_promised) != (cpus, memory) {
                return Err(format!("node {number}: host books say {cpus}/{memory}, slot {slot:?}"));
            }
        }
        Ok(())
    }

    fn check_leases(&self) -> Result<(), String> {
        let mut held: BTreeMap<&str, u64> = BTreeMap::new();
        let (mut waiting, mut deadlines) = (0, 0);
        for lease in self.leases.values() {
            let id = lease.id;
            if lease.state.is_granted() {
                *held.entry(&lease.request.owner).or_default() += self.inventory.gpu_share(&lease.promises);
            }
            if !lease.state.is_granted() && !lease.draining && !lease.promises.is_empty() {
                return Err(format!("lease {id} is {:?} and still holds {:?}", lease.state, lease.promises));
            }
            if lease.state.is_ended() != lease.cause.is_some() || lease.state.is_ended() != lease.ended_at.is_some() {
                return Err(format!("lease {id} is {:?} and ended for {:?}", lease.state, lease.cause));
            }
            waiting += usize::from(lease.state == LeaseState::Queued);
            if lease.deadline != ending::deadline_of(lease, self.settings) {
                return Err(format!("lease {id} has the wrong deadline {:?}", lease.deadline));
            }
            if let Some(at) = lease.deadline {
                deadlines += 1;
                if !self.deadlines.contains(&(at, id)) {
                    return Err(format!("the deadline of lease {id} is not kept"));
                }
            }
        }
        if (waiting, deadlines) != (self.queue.len(), self.deadlines.len()) {
            return Err(format!("{waiting} wait, {} are queued; {deadlines} deadlines", self.queue.len()));
        }
        for account in self.owners.all() {
            if account.held != held.remove(&*account.name).unwrap_or(0) {
                return Err(format!("{} holds something else than {}", account.name, account.held));
            }
        }
        match held.values().all(|held| *held == 0) {
            true => Ok(()),
            false => Err(format!("owners without an account: {held:?}")),
        }
    }
}
