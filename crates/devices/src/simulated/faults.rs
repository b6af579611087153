//! Faults of simulated devices, and their text form.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use serde::{Deserialize, Serialize};

/// A fault of a device until it is cleared. A device has at most one fault of each kind, but any number of squatters.
///
/// As text, a fault is its name and its numbers: `lost`, `hot:97`, `squatter:4242:2048:35`. As JSON it is an object:
/// `{"fault":"hot","temperature_c":97}`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(tag = "fault", rename_all = "snake_case", deny_unknown_fields)]
pub enum SimulatedFault {
    /// The device fell off the bus: it is still listed, but no value can be read.
    Lost,
    /// The device is not listed.
    Vanish,
    /// The chip has this temperature, regardless of load.
    Hot { temperature_c: i16 },
    /// The device counted uncorrectable memory errors.
    Ecc {
        uncorrectable: u32,
        /// State of the bad rows.
        #[serde(default)]
        remap: RowRemapState,
    },
    /// The driver hangs: a reading of any device blocks until the fault is cleared or the time is over.
    HungDriver {
        /// Maximum time in seconds; then the reading fails.
        #[serde(default = "hung_seconds")]
        seconds: u32,
    },
    /// Every reading takes this long.
    Slow {
        /// Delay in milliseconds.
        millis: u32,
    },
    /// The driver and its library have different versions: every reading of any device fails.
    Mismatch,
    /// The device does not support these fields.
    NotAvailable { fields: Vec<DeviceField> },
    /// Reading these fields fails.
    FailedField { fields: Vec<DeviceField> },
    /// The device always reports full utilization.
    StuckUtilization,
    /// A process without a lease uses the device.
    Squatter {
        pid: u32,
        /// Device memory in use, in MiB.
        memory_mib: u64,
        /// Utilization in percent.
        #[serde(default)]
        utilization: u8,
    },
}

/// State of memory rows with errors.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum RowRemapState {
    /// The rows were remapped.
    #[default]
    Done,
    /// The rows will be remapped after a reset.
    RemapPending,
    /// No spare rows are left.
    RemapFailed,
}

/// A field of a device that a fault can remove.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeviceField {
    /// Total, reserved and used memory.
    Memory,
    Utilization,
    Temperature,
    Power,
    PowerLimit,
    Processes,
}

/// An invalid fault, and the allowed values.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{field}: {value:?} is not allowed; allowed: {allowed}")]
pub struct FaultError {
    pub field: &'static str,
    /// Rejected value.
    pub value: String,
    pub allowed: &'static str,
}

/// Maximum time that a hung driver blocks or a slow one takes, in seconds.
const MAX_DELAY_SECS: u32 = 3600;
/// Maximum memory of a squatter in MiB.
const MAX_SQUATTER_MIB: u64 = 1 << 24;

const FAULT_FORMS: &str = "lost, vanish, hot:CELSIUS, ecc:ERRORS[:remap_pending|remap_failed], hung_driver[:SECONDS], \
                     slow:MILLIS, mismatch, not_available:FIELD+FIELD…, failed_field:FIELD+FIELD…, \
                     stuck_utilization, squatter:PID:MIB[:PERCENT]";
const FIELD_NAMES: &str = "memory, utilization, temperature, power, power_limit, processes";

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

    /// Returns the name of the kind.
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

    /// Checks the numbers; a fault parsed from JSON may have any.
    pub fn check(&self) -> Result<(), FaultError> {
        let invalid =
            |field, value: &dyn fmt::Display, allowed| Err(FaultError { field, value: value.to_string(), allowed });
        match self {
            Self::Hot { temperature_c } if !(0..=150).contains(temperature_c) => {
                invalid("temperature_c", temperature_c, "0 to 150")
            }
            Self::HungDriver { seconds } if *seconds > MAX_DELAY_SECS => invalid("seconds", seconds, "0 to 3600"),
            Self::Slow { millis } if *millis > MAX_DELAY_SECS * 1000 => invalid("millis", millis, "0 to 3600000"),
            Self::NotAvailable { fields } | Self::FailedField { fields } if fields.is_empty() || fields.len() > 16 => {
                invalid("fields", &format_args!("{} fields", fields.len()), FIELD_NAMES)
            }
            Self::Squatter { pid: 0, .. } => invalid("pid", &0, "1 to 4294967295"),
            Self::Squatter { memory_mib, .. } if *memory_mib > MAX_SQUATTER_MIB => {
                invalid("memory_mib", memory_mib, "0 to 16777216")
            }
            Self::Squatter { utilization, .. } if *utilization > 100 => invalid("utilization", utilization, "0 to 100"),
            _ => Ok(()),
        }
    }

    pub(crate) fn check_kind(kind: &str) -> Result<(), FaultError> {
        if Self::KINDS.contains(&kind) { Ok(()) } else { Err(invalid_fault("fault", kind, FAULT_FORMS)) }
    }

    /// Whether the fault affects the whole GPU with all its partitions.
    pub(crate) const fn affects_whole_gpu(&self) -> bool {
        matches!(self, Self::Lost | Self::Vanish | Self::Hot { .. } | Self::Ecc { .. })
    }

    /// Whether the fault replaces `other` on the same device.
    pub(crate) fn replaces(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Squatter { pid, .. }, Self::Squatter { pid: other, .. }) => pid == other,
            _ => self.kind() == other.kind(),
        }
    }

    /// Returns the time by which the fault delays a reading.
    pub(crate) const fn delay(&self) -> Duration {
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
            "hot" => Self::Hot { temperature_c: parse_number("temperature_c", next())? },
            "ecc" => Self::Ecc { uncorrectable: parse_number("uncorrectable", next())?, remap: parse_remap(next())? },
            "hung_driver" => {
                let seconds = next().map_or(Ok(hung_seconds()), |seconds| parse_number("seconds", Some(seconds)))?;
                Self::HungDriver { seconds }
            }
            "slow" => Self::Slow { millis: parse_number("millis", next())? },
            "mismatch" => Self::Mismatch,
            "not_available" => Self::NotAvailable { fields: parse_fields(next())? },
            "failed_field" => Self::FailedField { fields: parse_fields(next())? },
            "stuck_utilization" => Self::StuckUtilization,
            "squatter" => Self::Squatter {
                pid: parse_number("pid", next())?,
                memory_mib: parse_number("memory_mib", next())?,
                utilization: next().map_or(Ok(0), |percent| parse_number("utilization", Some(percent)))?,
            },
            _ => return Err(invalid_fault("fault", text, FAULT_FORMS)),
        };
        match next() {
            None => fault.check().map(|()| fault),
            Some(_) => Err(invalid_fault("fault", text, FAULT_FORMS)),
        }
    }
}

impl fmt::Display for SimulatedFault {
    /// Writes the text form.
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

fn parse_number<T: FromStr>(field: &'static str, text: Option<&str>) -> Result<T, FaultError> {
    let text = text.unwrap_or("");
    text.parse().map_err(|_| invalid_fault(field, text, FAULT_FORMS))
}

fn parse_remap(text: Option<&str>) -> Result<RowRemapState, FaultError> {
    match text {
        None => Ok(RowRemapState::Done),
        Some("remap_pending") => Ok(RowRemapState::RemapPending),
        Some("remap_failed") => Ok(RowRemapState::RemapFailed),
        Some(other) => Err(invalid_fault("remap", other, "remap_pending, remap_failed, or nothing")),
    }
}

fn parse_fields(text: Option<&str>) -> Result<Vec<DeviceField>, FaultError> {
    let field = |name: &str| {
        let named = DeviceField::ALL.into_iter().find(|field| field.name() == name.trim());
        named.ok_or_else(|| invalid_fault("fields", name, FIELD_NAMES))
    };
    text.unwrap_or("").split('+').map(field).collect()
}

fn invalid_fault(field: &'static str, value: &str, allowed: &'static str) -> FaultError {
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
    fn every_fault_round_trips_through_text_and_json() {
        for text in TEXTS {
            let fault: SimulatedFault = text.parse().unwrap();
            assert_eq!(fault.to_string(), text);
            let json = serde_json::to_string(&fault).unwrap();
            assert!(json.starts_with(&format!("{{\"fault\":\"{}\"", fault.kind())), "{json}");
            assert_eq!(serde_json::from_str::<SimulatedFault>(&json).unwrap(), fault);
        }
        for kind in SimulatedFault::KINDS {
            assert!(TEXTS.iter().any(|text| text.starts_with(kind)), "{kind}");
            assert!(FAULT_FORMS.contains(kind), "{kind}");
        }
    }

    #[test]
    fn optional_numbers_have_defaults() {
        assert_eq!("hung_driver".parse(), Ok(SimulatedFault::HungDriver { seconds: 600 }));
        assert_eq!("squatter:1:2".parse(), Ok(SimulatedFault::Squatter { pid: 1, memory_mib: 2, utilization: 0 }));
        let json: SimulatedFault = serde_json::from_str(r#"{"fault":"ecc","uncorrectable":3}"#).unwrap();
        assert_eq!(json, SimulatedFault::Ecc { uncorrectable: 3, remap: RowRemapState::Done });
    }

    #[test]
    fn an_invalid_fault_is_refused_with_the_allowed_values() {
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
