//! What a device reported at a time, and what of it is foreign: load that no lease explains.

use serde::{Deserialize, Serialize};

use crate::ids::LeaseId;
use crate::units::{Bytes, Percent, Time};

/// One field of a reading. Never a made-up zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Field<T> {
    /// The device said so.
    Value(T),
    /// The device cannot say.
    Unsupported,
    /// The device can, and failed to this time.
    Failed,
}

impl<T: Copy> Field<T> {
    /// The value, where there is one.
    pub const fn value(self) -> Option<T> {
        match self {
            Self::Value(value) => Some(value),
            Self::Unsupported | Self::Failed => None,
        }
    }
}

/// Who a process on a device belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Attribution {
    /// It runs under this lease; a squatter on devices the lease does not hold.
    Lease(LeaseId),
    /// It runs under none: a squatter.
    Foreign,
    /// It cannot be told (another PID namespace).
    Unknown,
}

/// A process that uses a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessUse {
    pub attribution: Attribution,
    /// Device memory it uses, where the driver tells.
    pub memory: Option<Bytes>,
}

/// What a device reported at a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reading {
    /// When it was taken. Not ahead of the pool's clock: until then it would shut out every other reading.
    pub at: Time,
    /// Memory in use, without what the driver keeps for itself.
    pub memory_used: Field<Bytes>,
    /// How busy the device is.
    pub utilization: Field<Percent>,
    /// Temperature in °C.
    pub temperature_c: Field<i16>,
    /// Every process on the device; a value only where the list is complete.
    pub processes: Option<Vec<ProcessUse>>,
    /// The pool's time of the state by which the processes were attributed to leases; `None` where that is `at`. A lease
    /// that changed later is not known to the list.
    #[serde(default)]
    pub leases_as_of: Option<Time>,
}

impl Reading {
    /// A reading of an idle device that reports everything.
    pub fn idle(at: Time) -> Self {
        Self {
            at,
            memory_used: Field::Value(Bytes::ZERO),
            utilization: Field::Value(Percent(0)),
            temperature_c: Field::Value(30),
            processes: Some(Vec::new()),
            leases_as_of: None,
        }
    }

    /// Whether the processes were attributed by a state that has a change of leases at this time.
    pub(crate) fn knows_of(&self, change: Time) -> bool {
        self.leases_as_of.is_none_or(|as_of| change <= as_of)
    }
}

/// The part of a reading that no lease explains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Foreign {
    /// Memory no lease explains; `None` where the device cannot report memory.
    pub memory: Option<Bytes>,
    /// Utilization no lease explains; `None` where the device cannot report it.
    pub utilization: Option<Percent>,
    /// Processes that run under no lease.
    pub processes: u32,
}

/// What one lease was promised on the device a reading is about.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Promised {
    pub lease: LeaseId,
    pub memory: Bytes,
    pub utilization: Percent,
}

impl Foreign {
    /// Nothing foreign.
    pub const NONE: Self = Self { memory: Some(Bytes::ZERO), utilization: Some(Percent(0)), processes: 0 };

    /// What is left of `reading` when the leases' part is taken out.
    ///
    /// A lease's part of the memory is what its processes were measured to use where the process list says whose each
    /// is, else what was promised (or measured, if that is more). Utilization is not known per process, so a lease's
    /// part is its promised share; but where the list shows no foreign process none of it is foreign, because
    /// counters are known to stick at 100 % with nothing running.
    pub(crate) fn judge(reading: &Reading, promised: impl Iterator<Item = Promised>) -> Self {
        let promised: Vec<Promised> = promised.collect();
        let processes = reading.processes.as_deref();
        let counted = |wanted: &dyn Fn(Attribution) -> bool| {
            processes.map(|list| list.iter().filter(|process| wanted(process.attribution)).count())
        };
        let is_foreign = |attribution| match attribution {
            Attribution::Foreign => true,
            // A lease explains load where it holds something, nowhere else.
            Attribution::Lease(lease) => promised.iter().all(|promise| promise.lease != lease),
            Attribution::Unknown => false,
        };
        let foreign_processes = counted(&is_foreign).unwrap_or(0) as u32;
        let none_unknown = counted(&|attribution| attribution == Attribution::Unknown) == Some(0);
        let all_attributed =
            none_unknown && processes.is_some_and(|list| list.iter().all(|process| process.memory.is_some()));
        let measured = |lease| {
            let of_lease = processes.unwrap_or_default().iter().filter(|p| p.attribution == Attribution::Lease(lease));
            of_lease.fold(Bytes::ZERO, |sum, process| sum.saturating_add(process.memory.unwrap_or_default()))
        };

        let (mut leased_memory, mut leased_utilization) = (Bytes::ZERO, Percent(0));
        for promise in &promised {
            let measured = measured(promise.lease);
            let part = if all_attributed { measured } else { measured.max(promise.memory) };
            leased_memory = leased_memory.saturating_add(part);
            leased_utilization = Percent(leased_utilization.0.saturating_add(promise.utilization.0));
        }
        let nobody_foreign = foreign_processes == 0 && none_unknown;
        Self {
            memory: reading.memory_used.value().map(|used| used.saturating_sub(leased_memory)),
            utilization: reading
                .utilization
                .value()
                .map(|busy| if nobody_foreign { Percent(0) } else { busy.saturating_sub(leased_utilization) }),
            processes: foreign_processes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn half_held() -> Promised {
        Promised { lease: LeaseId(1), memory: Bytes(40 * GIB), utilization: Percent(50_000) }
    }

    fn reading(used_gib: u64, busy: u32, processes: Option<Vec<ProcessUse>>) -> Reading {
        Reading {
            memory_used: Field::Value(Bytes(used_gib * GIB)),
            utilization: Field::Value(Percent(busy * 1000)),
            processes,
            ..Reading::idle(Time(0))
        }
    }

    fn process(attribution: Attribution, gib: u64) -> ProcessUse {
        ProcessUse { attribution, memory: Some(Bytes(gib * GIB)) }
    }

    #[test]
    fn without_a_process_list_the_promise_explains_the_load() {
        let foreign = Foreign::judge(&reading(50, 60, None), [half_held()].into_iter());
        assert_eq!(foreign.memory, Some(Bytes(10 * GIB)));
        assert_eq!(foreign.utilization, Some(Percent(10_000)));
    }

    #[test]
    fn a_squatter_does_not_hide_behind_a_promise_that_is_not_used() {
        let list = vec![process(Attribution::Lease(LeaseId(1)), 5), process(Attribution::Foreign, 30)];
        let foreign = Foreign::judge(&reading(35, 90, Some(list)), [half_held()].into_iter());
        assert_eq!(foreign.memory, Some(Bytes(30 * GIB)));
        assert_eq!(foreign.processes, 1);
        assert_eq!(foreign.utilization, Some(Percent(40_000)));
    }

    #[test]
    fn a_stuck_counter_with_nothing_running_is_not_load() {
        let foreign = Foreign::judge(&reading(0, 100, Some(Vec::new())), std::iter::empty());
        assert_eq!(foreign, Foreign::NONE);
    }

    #[test]
    fn a_process_that_cannot_be_attributed_counts_for_the_lease_first() {
        let list = vec![process(Attribution::Unknown, 45)];
        let foreign = Foreign::judge(&reading(45, 80, Some(list)), [half_held()].into_iter());
        assert_eq!(foreign.memory, Some(Bytes(5 * GIB)));
        assert_eq!(foreign.utilization, Some(Percent(30_000)));
        assert_eq!(foreign.processes, 0);
    }

    #[test]
    fn what_a_device_cannot_report_stays_unknown() {
        let silent =
            Reading { memory_used: Field::Unsupported, utilization: Field::Unsupported, ..Reading::idle(Time(0)) };
        let foreign = Foreign::judge(&silent, std::iter::empty());
        assert_eq!((foreign.memory, foreign.utilization), (None, None));
    }
}
