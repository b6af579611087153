//! What can be made to go wrong with a simulated device, and how it is written.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// Something that goes wrong with a device until it is cleared. A device has at most one of each kind, but any number
/// of squatters.
///
/// As text it is its name and its numbers, as in `lost`, `hot:97`, `squatter:4242:2048:35`; in JSON an object, as in
/// `{"fault":"hot","temperature_c":97}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "fault", rename_all = "snake_case", deny_unknown_fields)]
pub enum SimulatedFault {
    /// It fell off the bus: still listed, nothing of it can be read.
    Lost,
    /// It is not listed at all.
    Vanish,
    /// Its chip is this hot, whatever it does.
    Hot { temperature_c: i16 },
    /// It counted errors of memory that could not be corrected.
    Ecc {
        uncorrectable: u32,
        /// What became of the bad rows.
        #[serde(default)]
        remap: RowRemapState,
    },
    /// The driver answers nobody: a reading of any device blocks until this is cleared, or for so long.
    HungDriver {
        /// For at most so many seconds; then the reading fails.
        #[serde(default = "hung_seconds")]
        seconds: u32,
    },
    /// Every reading takes so long.
    Slow {
        /// In thousandths of a second.
        millis: u32,
    },
    /// The driver and its library are of different versions: no reading of any device succeeds.
    Mismatch,
    /// It does not support these fields.
    NotAvailable { fields: Vec<DeviceField> },
    /// It fails to tell these fields.
    FailedField { fields: Vec<DeviceField> },
    /// It says to be fully busy, whatever it does.
    StuckUtilization,
    /// A process of nobody uses it.
    Squatter {
        /// Number of the process.
        pid: u32,
        /// Device memory it uses, in MiB.
        memory_mib: u64,
        /// How busy it keeps the device, in percent.
        #[serde(default)]
        utilization: u8,
    },
}

/// What became of the rows of memory with errors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowRemapState {
    /// Others took their place.
    #[default]
    Done,
    /// Others will take their place after a reset.
    RemapPending,
    /// There are no others left.
    RemapFailed,
}

/// A field of a device that a fault can take away.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceField {
    /// Total, reserved and used memory.
    Memory,
    /// How busy it is.
    Utilization,
    /// How warm it is.
    Temperature,
    /// What it draws.
    Power,
    /// The most it may draw.
    PowerLimit,
    /// Who uses it.
    Processes,
}

/// A fault that cannot be, and what is allowed.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {value:?} is not allowed; allowed: {allowed}")]
pub struct FaultError {
    /// Which part of the fault.
    pub field: &'static str,
    /// What it was.
    pub value: String,
    /// What it may be.
    pub allowed: &'static str,
}

/// Longest time a hung driver blocks or a slow one takes, in seconds.
const PATIENCE_SECS: u32 = 3600;
/// Largest memory of a squatter, in MiB.
const MOST_MIB: u64 = 1 << 24;

const FORMS: &str = "lost, vanish, hot:CELSIUS, ecc:ERRORS[:remap_pending|remap_failed], hung_driver[:SECONDS], \
                     slow:MILLIS, mismatch, not_available:FIELD+FIELD…, failed_field:FIELD+FIELD…, \
                     stuck_utilization, squatter:PID:MIB[:PERCENT]";
const FIELDS: &str = "memory, utilization, temperature, power, power_limit, processes";

const fn hung_seconds() -> u32 {
    600
}

impl SimulatedFault {
    /// Names of all kinds, as in text and JSON.
    pub const KINDS: [&'static str; 11] = [
        "lost",
        "vanish",
        "hot",
        "ecc",
        "hung_driver",
        "slow",
        "mismatch",
        "not_available",
        "failed_field",
        "stuck_utilization",
        "squatter",
    ];

    /// The name of its kind.
    pub(crate) const fn kind(&self) -> &'static str {
        match self {
            Self::Lost => "lost",
            Self::Vanish => "vanish",
            Self::Hot { .. } => "hot",
            Self::Ecc { .. } => "ecc",
            Self::HungDriver { .. } => "hung_driver",
            Self::Slow { .. } => "slow",
            Self::Mismatch => "mismatch",
            Self::NotAvailable { .. } => "not_available",
            Self::FailedField { .. } => "failed_field",
            Self::StuckUtilization => "stuck_utilization",
            Self::Squatter { .. } => "squatter",
        }
    }

    /// Whether its numbers make sense; one that came as JSON may hold any.
    pub fn check(&self) -> Result<(), FaultError> {
        let wrong =
            |field, value: &dyn fmt::Display, allowed| Err(FaultError { field, value: value.to_string(), allowed });
        match self {
            Self::Hot { temperature_c } if !(0..=150).contains(temperature_c) => {
                wrong("temperature_c", temperature_c, "0 to 150")
            }
            Self::HungDriver { seconds } if *seconds > PATIENCE_SECS => wrong("seconds", seconds, "0 to 3600"),
            Self::Slow { millis } if *millis > PATIENCE_SECS * 1000 => wrong("millis", millis, "0 to 3600000"),
            Self::NotAvailable { fields } | Self::FailedField { fields } if fields.is_empty() || fields.len() > 16 => {
                wrong("fields", &format_args!("{} fields", fields.len()), FIELDS)
            }
            Self::Squatter { pid: 0, .. } => wrong("pid", &0, "1 to 4294967295"),
            Self::Squatter { memory_mib, .. } if *memory_mib > MOST_MIB => {
                wrong("memory_mib", memory_mib, "0 to 16777216")
            }
            Self::Squatter { utilization, .. } if *utilization > 100 => wrong("utilization", utilization, "0 to 100"),
            _ => Ok(()),
        }
    }

    pub(crate) fn check_kind(kind: &str) -> Result<(), FaultError> {
        if Self::KINDS.contains(&kind) { Ok(()) } else { Err(refused("fault", kind, FORMS)) }
    }

    /// Whether it is of the whole GPU, with every partition of it, rather than of one device.
    pub(crate) const fn of_whole_gpu(&self) -> bool {
        matches!(self, Self::Lost | Self::Vanish | Self::Hot { .. } | Self::Ecc { .. })
    }

    /// Whether one takes the place of the other on the same device.
    pub(crate) fn replaces(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Squatter { pid, .. }, Self::Squatter { pid: other, .. }) => pid == other,
            _ => self.kind() == other.kind(),
        }
    }

    /// How long it holds up a reading.
    pub(crate) const fn slowness(&self) -> Duration {
        match self {
            Self::Slow { millis } => Duration::from_millis(*millis as u64),
            _ => Duration::ZERO,
        }
    }
}

impl FromStr for SimulatedFault {
    type Err = FaultError;

    fn from_str(text: &str) -> Result<Self, FaultError> {
        let mut parts = text.trim().split(':').map(str::trim);
        let kind = parts.next().unwrap_or("");
        let mut next = || parts.next();
        let fault = match kind {
            "lost" => Self::Lost,
            "vanish" => Self::Vanish,
            "hot" => Self::Hot { temperature_c: number("temperature_c", next())? },
            "ecc" => Self::Ecc { uncorrectable: number("uncorrectable", next())?, remap: remap(next())? },
            "hung_driver" => {
                let seconds = next().map_or(Ok(hung_seconds()), |seconds| number("seconds", Some(seconds)))?;
                Self::HungDriver { seconds }
            }
            "slow" => Self::Slow { millis: number("millis", next())? },
            "mismatch" => Self::Mismatch,
            "not_available" => Self::NotAvailable { fields: fields(next())? },
            "failed_field" => Self::FailedField { fields: fields(next())? },
            "stuck_utilization" => Self::StuckUtilization,
            "squatter" => Self::Squatter {
                pid: number("pid", next())?,
                memory_mib: number("memory_mib", next())?,
                utilization: next().map_or(Ok(0), |percent| number("utilization", Some(percent)))?,
            },
            _ => return Err(refused("fault", text, FORMS)),
        };
        match next() {
            None => fault.check().map(|()| fault),
            Some(_) => Err(refused("fault", text, FORMS)),
        }
    }
}

impl fmt::Display for SimulatedFault {
    /// The text it can be read from.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind())?;
        match self {
            Self::Lost | Self::Vanish | Self::Mismatch | Self::StuckUtilization => Ok(()),
            Self::Hot { temperature_c } => write!(f, ":{temperature_c}"),
            Self::Ecc { uncorrectable, remap: RowRemapState::Done } => write!(f, ":{uncorrectable}"),
            Self::Ecc { uncorrectable, remap: RowRemapState::RemapPending } => {
                write!(f, ":{uncorrectable}:remap_pending")
            }
            Self::Ecc { uncorrectable, remap: RowRemapState::RemapFailed } => {
                write!(f, ":{uncorrectable}:remap_failed")
            }
            Self::HungDriver { seconds } => write!(f, ":{seconds}"),
            Self::Slow { millis } => write!(f, ":{millis}"),
            Self::NotAvailable { fields } | Self::FailedField { fields } => {
                let names: Vec<&str> = fields.iter().map(|field| field.name()).collect();
                write!(f, ":{}", names.join("+"))
            }
            Self::Squatter { pid, memory_mib, utilization } => write!(f, ":{pid}:{memory_mib}:{utilization}"),
        }
    }
}

impl DeviceField {
    pub(crate) const ALL: [Self; 6] =
        [Self::Memory, Self::Utilization, Self::Temperature, Self::Power, Self::PowerLimit, Self::Processes];

    const fn name(self) -> &'static str {
        match self {
            Self::Memory => "memory",
            Self::Utilization => "utilization",
            Self::Temperature => "temperature",
            Self::Power => "power",
            Self::PowerLimit => "power_limit",
            Self::Processes => "processes",
        }
    }
}

fn number<T: FromStr>(field: &'static str, text: Option<&str>) -> Result<T, FaultError> {
    let text = text.unwrap_or("");
    text.parse().map_err(|_| refused(field, text, FORMS))
}

fn remap(text: Option<&str>) -> Result<RowRemapState, FaultError> {
    match text {
        None => Ok(RowRemapState::Done),
        Some("remap_pending") => Ok(RowRemapState::RemapPending),
        Some("remap_failed") => Ok(RowRemapState::RemapFailed),
        Some(other) => Err(refused("remap", other, "remap_pending, remap_failed, or nothing")),
    }
}

fn fields(text: Option<&str>) -> Result<Vec<DeviceField>, FaultError> {
    let field = |name: &str| {
        let named = DeviceField::ALL.into_iter().find(|field| field.name() == name.trim());
        named.ok_or_else(|| refused("fields", name, FIELDS))
    };
    text.unwrap_or("").split('+').map(field).collect()
}

fn refused(field: &'static str, value: &str, allowed: &'static str) -> FaultError {
    FaultError { field, value: value.chars().take(64).collect(), allowed }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXTS: [&str; 14] = [
        "lost",
        "vanish",
        "hot:97",
        "ecc:2",
        "ecc:2:remap_pending",
        "ecc:1:remap_failed",
        "hung_driver:600",
        "slow:1500",
        "mismatch",
        "not_available:power+power_limit",
        "failed_field:memory+temperature+processes",
        "not_available:utilization",
        "stuck_utilization",
        "squatter:4242:2048:35",
    ];

    #[test]
    fn every_fault_survives_text_and_json() {
        for text in TEXTS {
            let fault: SimulatedFault = text.parse().unwrap();
            assert_eq!(fault.to_string(), text);
            let json = serde_json::to_string(&fault).unwrap();
            assert!(json.starts_with(&format!("{{\"fault\":\"{}\"", fault.kind())), "{json}");
            assert_eq!(serde_json::from_str::<SimulatedFault>(&json).unwrap(), fault);
        }
        for kind in SimulatedFault::KINDS {
            assert!(TEXTS.iter().any(|text| text.starts_with(kind)), "{kind}");
            assert!(FORMS.contains(kind), "{kind}");
        }
    }

    #[test]
    fn numbers_that_may_be_left_out_have_a_meaning() {
        assert_eq!("hung_driver".parse(), Ok(SimulatedFault::HungDriver { seconds: 600 }));
        assert_eq!("squatter:1:2".parse(), Ok(SimulatedFault::Squatter { pid: 1, memory_mib: 2, utilization: 0 }));
        let json: SimulatedFault = serde_json::from_str(r#"{"fault":"ecc","uncorrectable":3}"#).unwrap();
        assert_eq!(json, SimulatedFault::Ecc { uncorrectable: 3, remap: RowRemapState::Done });
    }

    #[test]
    fn a_wrong_fault_is_answered_with_what_is_allowed() {
        let error = "melted".parse::<SimulatedFault>().unwrap_err();
        assert!(SimulatedFault::KINDS.iter().all(|kind| error.to_string().contains(kind)), "{error}");
        for (text, field) in [
            ("hot", "temperature_c"),
            ("hot:999", "temperature_c"),
            ("ecc:2:maybe", "remap"),
            ("squatter:0:1", "pid"),
            ("squatter:1:1:101", "utilization"),
            ("not_available:colour", "fields"),
            ("slow:99999999", "millis"),
            ("lost:1", "fault"),
        ] {
            assert_eq!(text.parse::<SimulatedFault>().unwrap_err().field, field, "{text}");
        }
        let json = serde_json::from_str::<SimulatedFault>(r#"{"fault":"hot","temperature_c":97,"colour":1}"#);
        assert!(json.is_err(), "an unknown field is refused");
    }
}
