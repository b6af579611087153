//! Readings of devices, and the foreign part of their load: load that no lease explains.

use serde::{Deserialize, Serialize};

use crate::ids::LeaseId;
use crate::units::{Bytes, Percent, PoolTime};

/// One field of a reading; never an invented zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ReadingField<T> {
    /// The device reported this value.
    Value(T),
    /// The device cannot report it.
    Unsupported,
    /// The device can report it, but failed this time.
    Failed,
}

impl<T: Copy> ReadingField<T> {
    /// Returns the value, if there is one.
    pub const fn value(self) -> Option<T> {
        match self {
            Self::Value(value) => Some(value),
            Self::Unsupported | Self::Failed => None,
        }
    }
}

/// Attribution of a process on a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ProcessAttribution {
    /// Runs under this lease; foreign on devices that the lease does not hold.
    Lease(LeaseId),
    /// Runs under no lease.
    Foreign,
    /// Not attributable (another PID namespace).
    Unknown,
}

/// Use of a device by one process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessUsage {
    pub attribution: ProcessAttribution,
    /// Device memory, if the driver reports it.
    pub memory: Option<Bytes>,
}

/// Reading of a device at one time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct DeviceReading {
    /// Time of the reading. Never ahead of the pool's clock, or it would block every other reading until then.
    pub at: PoolTime,
    /// Memory in use, without the driver's reserve.
    pub memory_used: ReadingField<Bytes>,
    pub utilization: ReadingField<Percent>,
    pub temperature_c: ReadingField<i16>,
    /// Every process on the device; `None` if the list is incomplete.
    pub processes: Option<Vec<ProcessUsage>>,
    /// Pool time of the state by which the processes were attributed; `None` if that is `at`. The list does not reflect
    /// leases that changed later.
    #[serde(default)]
    pub leases_as_of: Option<PoolTime>,
}

impl DeviceReading {
    /// Returns a complete reading of an idle device.
    pub fn idle(at: PoolTime) -> Self {
        Self {
            at,
            memory_used: ReadingField::Value(Bytes::ZERO),
            utilization: ReadingField::Value(Percent(0)),
            temperature_c: ReadingField::Value(30),
            processes: Some(Vec::new()),
            leases_as_of: None,
        }
    }

    /// Whether the attribution includes a change of leases at this time.
    pub(crate) fn includes_change_at(&self, change: PoolTime) -> bool {
        self.leases_as_of.is_none_or(|as_of| change <= as_of)
    }
}

/// Part of a reading that no lease explains.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ForeignLoad {
    /// Foreign memory; `None` if the device cannot report memory.
    pub memory: Option<Bytes>,
    /// Foreign utilization; `None` if the device cannot report utilization.
    pub utilization: Option<Percent>,
    /// Number of processes under no lease.
    pub processes: u32,
}

/// Part of a device that one lease was promised.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PromisedLoad {
    pub lease: LeaseId,
    pub memory: Bytes,
    pub utilization: Percent,
}

impl ForeignLoad {
    /// No foreign load.
    pub const NONE: Self = Self { memory: Some(Bytes::ZERO), utilization: Some(Percent(0)), processes: 0 };

    /// Subtracts the leases' part from `reading`.
    ///
    /// A lease's part of the memory is the measured use of its processes if every process is attributed, else the
    /// larger of its promise and the measured use. Utilization is not known per process, so a lease's part is its
    /// promised share. If the list shows no foreign process, no utilization is foreign, because counters are known to
    /// stick at 100 % with nothing running.
    pub(crate) fn from_reading(reading: &DeviceReading, promised: impl Iterator<Item = PromisedLoad>) -> Self {
        let promised: Vec<PromisedLoad> = promised.collect();
        let processes = reading.processes.as_deref();
        let counted = |wanted: &dyn Fn(ProcessAttribution) -> bool| {
            processes.map(|list| list.iter().filter(|process| wanted(process.attribution)).count())
        };
        let is_foreign = |attribution| match attribution {
            ProcessAttribution::Foreign => true,
            // A lease explains load only on devices that it holds.
            ProcessAttribution::Lease(lease) => promised.iter().all(|promise| promise.lease != lease),
            ProcessAttribution::Unknown => false,
        };
        let foreign_processes = counted(&is_foreign).unwrap_or(0) as u32;
        let none_unknown = counted(&|attribution| attribution == ProcessAttribution::Unknown) == Some(0);
        let all_attributed =
            none_unknown && processes.is_some_and(|list| list.iter().all(|process| process.memory.is_some()));
        let measured = |lease| {
            let of_lease =
                processes.unwrap_or_default().iter().filter(|p| p.attribution == ProcessAttribution::Lease(lease));
            of_lease.fold(Bytes::ZERO, |sum, process| sum.saturating_add(process.memory.unwrap_or_default()))
        };

        let (mut leased_memory, mut leased_utilization) = (Bytes::ZERO, Percent(0));
        for promise in &promised {
            let measured = measured(promise.lease);
            let part = if all_attributed { measured } else { measured.max(promise.memory) };
            leased_memory = leased_memory.saturating_add(part);
            leased_utilization = Percent(leased_utilization.0.saturating_add(promise.utilization.0));
        }
        let none_foreign = foreign_processes == 0 && none_unknown;
        Self {
            memory: reading.memory_used.value().map(|used| used.saturating_sub(leased_memory)),
            utilization: reading
                .utilization
                .value()
                .map(|busy| if none_foreign { Percent(0) } else { busy.saturating_sub(leased_utilization) }),
            processes: foreign_processes,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn half_held() -> PromisedLoad {
        PromisedLoad { lease: LeaseId(1), memory: Bytes(40 * GIB), utilization: Percent(50_000) }
    }

    fn reading(used_gib: u64, busy: u32, processes: Option<Vec<ProcessUsage>>) -> DeviceReading {
        DeviceReading {
            memory_used: ReadingField::Value(Bytes(used_gib * GIB)),
            utilization: ReadingField::Value(Percent(busy * 1000)),
            processes,
            ..DeviceReading::idle(PoolTime(0))
        }
    }

    fn process(attribution: ProcessAttribution, gib: u64) -> ProcessUsage {
        ProcessUsage { attribution, memory: Some(Bytes(gib * GIB)) }
    }

    #[test]
    fn without_a_process_list_promises_explain_the_load() {
        let foreign = ForeignLoad::from_reading(&reading(50, 60, None), [half_held()].into_iter());
        assert_eq!(foreign.memory, Some(Bytes(10 * GIB)));
        assert_eq!(foreign.utilization, Some(Percent(10_000)));
    }

    #[test]
    fn an_unused_promise_does_not_hide_a_foreign_process() {
        let list = vec![process(ProcessAttribution::Lease(LeaseId(1)), 5), process(ProcessAttribution::Foreign, 30)];
        let foreign = ForeignLoad::from_reading(&reading(35, 90, Some(list)), [half_held()].into_iter());
        assert_eq!(foreign.memory, Some(Bytes(30 * GIB)));
        assert_eq!(foreign.processes, 1);
        assert_eq!(foreign.utilization, Some(Percent(40_000)));
    }

    #[test]
    fn a_stuck_counter_with_nothing_running_is_not_load() {
        let foreign = ForeignLoad::from_reading(&reading(0, 100, Some(Vec::new())), std::iter::empty());
        assert_eq!(foreign, ForeignLoad::NONE);
    }

    #[test]
    fn a_process_that_cannot_be_attributed_counts_for_the_lease_first() {
        let list = vec![process(ProcessAttribution::Unknown, 45)];
        let foreign = ForeignLoad::from_reading(&reading(45, 80, Some(list)), [half_held()].into_iter());
        assert_eq!(foreign.memory, Some(Bytes(5 * GIB)));
        assert_eq!(foreign.utilization, Some(Percent(30_000)));
        assert_eq!(foreign.processes, 0);
    }

    #[test]
    fn unreported_fields_stay_unknown() {
        let silent = DeviceReading {
            memory_used: ReadingField::Unsupported,
            utilization: ReadingField::Unsupported,
            ..DeviceReading::idle(PoolTime(0))
        };
        let foreign = ForeignLoad::from_reading(&silent, std::iter::empty());
        assert_eq!((foreign.memory, foreign.utilization), (None, None));
    }
}
