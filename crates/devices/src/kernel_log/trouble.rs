//! What can go wrong with a GPU as the kernel's log tells it, and what each says of its health.

use gpupool_core::device::Health;

use crate::nvml::xid::{self, Severity};

/// Something that went wrong with a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Trouble {
    /// NVIDIA's driver reports an error by number.
    Xid(u32),
    /// An NVSwitch reports an error by number; it is no GPU.
    SwitchError {
        /// The number.
        number: u32,
        /// Whether the switch says it is fatal.
        fatal: bool,
    },
    /// It no longer answers on the bus.
    FellOffTheBus,
    /// The driver could not start it.
    StartFailed,
    /// A job hung on it.
    RingTimeout,
    /// The driver began to reset it.
    ResetBegun,
    /// A reset succeeded.
    ResetSucceeded,
    /// A reset failed.
    ResetFailed,
    /// Memory or logic went wrong beyond repair.
    Uncorrectable,
}

impl Trouble {
    /// What it says of the device's health.
    pub(crate) fn health(self) -> Health {
        match (self, self.severity()) {
            (Self::FellOffTheBus | Self::Xid(79), _) => Health::Lost,
            (_, Severity::Unhealthy) => Health::Unhealthy(format!("{}: {}", self.name(), self.meaning()).into()),
            (_, Severity::Application | Severity::Warn) => Health::Healthy,
        }
    }

    /// How bad it is.
    pub(crate) fn severity(self) -> Severity {
        match self {
            Self::Xid(number) => xid::judge(number).severity,
            Self::RingTimeout | Self::ResetBegun | Self::ResetSucceeded | Self::SwitchError { fatal: false, .. } => {
                Severity::Warn
            }
            Self::FellOffTheBus
            | Self::StartFailed
            | Self::ResetFailed
            | Self::Uncorrectable
            | Self::SwitchError { fatal: true, .. } => Severity::Unhealthy,
        }
    }

    /// Its count in a sentence: `Xid 13 ×629: …; the GPU is fine`.
    pub(super) fn sentence(self, count: u64) -> String {
        let advice = match (self, self.severity()) {
            (_, Severity::Application) => "the GPU is fine",
            (Self::Xid(_), _) => self.remedy(),
            _ => "",
        };
        let joint = if advice.is_empty() { "" } else { "; " };
        format!("{}{joint}{advice}", self.counted(count))
    }

    /// What happened how often: `Xid 79 ×1: the GPU fell off the bus`.
    pub(crate) fn counted(self, count: u64) -> String {
        format!("{} ×{count}: {}", self.name(), self.meaning())
    }

    /// What a person can do about it; empty where there is nothing to do. What has no number of its own is dealt with
    /// as the Xid that says the same.
    pub(crate) fn remedy(self) -> &'static str {
        let like = match self {
            Self::Xid(number) => number,
            Self::FellOffTheBus => 79,
            Self::StartFailed | Self::ResetFailed => 143,
            Self::Uncorrectable => 48,
            Self::RingTimeout | Self::ResetBegun => 16,
            Self::SwitchError { fatal: true, .. } => 74,
            Self::SwitchError { fatal: false, .. } | Self::ResetSucceeded => return "",
        };
        xid::judge(like).remedy
    }

    pub(crate) fn name(self) -> String {
        match self {
            Self::Xid(number) => format!("Xid {number}"),
            Self::SwitchError { number, .. } => format!("NVSwitch SXid {number}"),
            Self::FellOffTheBus => "off the bus".into(),
            Self::StartFailed => "start failed".into(),
            Self::RingTimeout => "ring timeout".into(),
            Self::ResetBegun => "reset begun".into(),
            Self::ResetSucceeded => "reset succeeded".into(),
            Self::ResetFailed => "reset failed".into(),
            Self::Uncorrectable => "uncorrectable error".into(),
        }
    }

    fn meaning(self) -> &'static str {
        match self {
            Self::Xid(number) => xid::judge(number).meaning,
            Self::SwitchError { fatal: true, .. } => "a fatal error of a switch between the GPUs",
            Self::SwitchError { fatal: false, .. } => "an error that a switch between the GPUs got over",
            Self::FellOffTheBus => "the GPU no longer answers on the bus",
            Self::StartFailed => "the driver could not start the GPU",
            Self::RingTimeout => "a job hung on the GPU",
            Self::ResetBegun => "the driver reset the GPU",
            Self::ResetSucceeded => "the GPU came back from a reset",
            Self::ResetFailed => "the GPU did not come back from a reset",
            Self::Uncorrectable => "memory or logic of the GPU went wrong beyond repair",
        }
    }
}
