//! What is known after a round of reading, as statistics are made of it.

use std::sync::Arc;

use gpupool_api::pool::Process;
use gpupool_core::Time;
use gpupool_core::device::{DeviceIdentity, Health, Vendor};
use gpupool_core::ids::GpuId;
use gpupool_core::units::Millis;
use gpupool_devices::{Found, SourceError, SourceKind, fresh_until};

/// A device as it is known after a round.
#[derive(Debug, Clone)]
pub struct Seen {
    /// Its small number.
    pub gpu_id: GpuId,
    /// What makes it the same device tomorrow.
    pub identity: DeviceIdentity,
    /// What was last read of it.
    pub found: Arc<Found>,
    /// Which source it is from.
    pub source: SourceKind,
    /// Whether it can be trusted with work.
    pub health: Health,
    /// When it was last read.
    pub read_at: Time,
    /// Whether the filter of this service lists it.
    pub visible: bool,
    /// Who uses it.
    pub processes: Arc<[Process]>,
}

impl Seen {
    /// Whether nothing of it can be read because it is not there.
    pub fn is_lost(&self) -> bool {
        self.health == Health::Lost
    }
}

/// How a source does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SourceState {
    /// It was asked and has not answered yet, not even once.
    Awaited,
    /// It answers.
    Answers,
    /// It failed.
    Failed(SourceError),
}

/// A source and how it does.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceSeen {
    /// Which.
    pub kind: SourceKind,
    /// How it does.
    pub state: SourceState,
}

impl SourceSeen {
    /// What is wrong with it, for people. That it is not on this machine is not wrong.
    pub fn trouble(&self) -> Option<String> {
        match &self.state {
            SourceState::Awaited => Some(format!("{}: has not answered yet", self.kind)),
            SourceState::Answers | SourceState::Failed(SourceError::NotHere { .. }) => None,
            SourceState::Failed(error) => Some(format!("{}: {error}", self.kind)),
        }
    }

    /// Whether devices can be read from it.
    pub fn answers(&self) -> bool {
        self.state == SourceState::Answers
    }
}

/// Everything that is known after a round.
#[derive(Debug, Clone)]
pub struct Round {
    /// When it was put together, on both clocks.
    pub clock: gpupool_store::Clock,
    /// Every device, by number, listed or not.
    pub devices: Vec<Seen>,
    /// Every source.
    pub sources: Vec<SourceSeen>,
    /// When a source last answered, if only that there is nothing.
    pub answered_at: Option<Time>,
    /// How often devices are read.
    pub refresh: Millis,
    /// Set where nothing is read any more: whatever is known is stale.
    pub stopped: bool,
}

impl Round {
    /// The devices that are listed.
    pub fn listed(&self) -> impl Iterator<Item = &Seen> {
        self.devices.iter().filter(|seen| seen.visible)
    }

    /// Whether what was read of a device is too old to be passed off as fresh.
    pub fn is_stale(&self, seen: &Seen) -> bool {
        self.stopped || self.is_old(seen.read_at)
    }

    fn is_old(&self, read_at: Time) -> bool {
        self.clock.pool > self.stale_from(read_at)
    }

    /// Until when a reading is fresh.
    pub fn stale_from(&self, read_at: Time) -> Time {
        fresh_until(read_at, self.refresh)
    }

    /// Whether any listed device that is there, or with none the last answer, is too old to be passed off as fresh.
    pub fn any_stale(&self) -> bool {
        let mut there = self.listed().filter(|seen| !seen.is_lost()).peekable();
        if there.peek().is_none() {
            return self.stopped || self.answered_at.is_none_or(|at| self.is_old(at));
        }
        there.any(|seen| self.is_stale(seen))
    }

    /// As of when everything that is listed was read: the oldest reading of a device that is there.
    pub fn read_at(&self) -> Time {
        let oldest = self.listed().filter(|seen| !seen.is_lost()).map(|seen| seen.read_at).min();
        oldest.or(self.answered_at).unwrap_or(self.clock.pool)
    }

    /// Why devices could not be read, where they could not.
    pub fn error(&self) -> Option<String> {
        let troubles: Vec<String> = self.sources.iter().filter_map(SourceSeen::trouble).collect();
        (!troubles.is_empty()).then(|| troubles.join("; "))
    }

    /// Whether there is nothing to tell because reading failed, rather than because there is no device.
    pub fn has_failed(&self) -> bool {
        self.devices.is_empty() && (self.error().is_some() || self.answered_at.is_none())
    }

    /// Whether devices of NVIDIA can be read, by whatever source.
    pub fn reads_nvidia(&self) -> bool {
        let of_nvidia = |source: &SourceSeen| match source.kind {
            SourceKind::Nvml | SourceKind::NvidiaSmi => true,
            kind => self.devices.iter().any(|seen| seen.source == kind && seen.found.vendor == Vendor::Nvidia),
        };
        !self.stopped && self.sources.iter().any(|source| source.answers() && of_nvidia(source))
    }

    /// A time of the pool for people and programs.
    pub fn told(&self, time: Time) -> String {
        crate::clock::iso_of(time, self.clock)
    }
}
