//! Which simulated devices somebody means.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use gpupool_core::device::PciAddress;

use super::layout::Device;
use crate::address;

/// A simulated device's place among all of its node, lost and vanished ones included; it never changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Place(pub usize);

/// Which devices are meant. As text: `all`, `place:3`, `3` (the source's number), a UUID, or a PCI address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Target {
    /// All of them.
    All,
    /// The one at this place.
    Place(Place),
    /// The one with this number in the source's listing.
    Index(u32),
    /// Every one that carries this UUID.
    Uuid(Arc<str>),
    /// Every one at this place on the bus.
    Pci(PciAddress),
}

impl Target {
    pub(crate) fn means(&self, place: usize, device: &Device) -> bool {
        match self {
            Self::All => true,
            Self::Place(wanted) => wanted.0 == place,
            Self::Index(wanted) => device.index == Some(*wanted),
            Self::Uuid(wanted) => device.uuid.eq_ignore_ascii_case(wanted),
            Self::Pci(wanted) => device.pci == *wanted,
        }
    }
}

impl FromStr for Target {
    type Err = std::convert::Infallible;

    /// Any text is a target; whether there is such a device shows when it is used.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let text = text.trim();
        if text.eq_ignore_ascii_case("all") {
            return Ok(Self::All);
        }
        if let Some(place) = text.strip_prefix("place:").and_then(|place| place.parse().ok()) {
            return Ok(Self::Place(Place(place)));
        }
        if let Ok(index) = text.parse() {
            return Ok(Self::Index(index));
        }
        Ok(address::parse(text).map_or_else(|| Self::Uuid(text.into()), Self::Pci))
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::Place(place) => write!(f, "place:{}", place.0),
            Self::Index(index) => index.fmt(f),
            Self::Uuid(uuid) => f.write_str(uuid),
            Self::Pci(address) => address.fmt(f),
        }
    }
}

/// No simulated device is meant.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("no simulated device is {target}; there are: {}", there_are.join(", "))]
pub struct NoSuchDevice {
    /// What was asked for.
    pub target: String,
    /// UUIDs of those there are, the first few.
    pub there_are: Vec<String>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_survives_text() {
        for text in ["all", "place:3", "7", "GPU-0123456789abcdef", "MIG-1-2", "0000:c1:00.0"] {
            assert_eq!(text.parse::<Target>().unwrap().to_string(), text);
        }
        assert!(matches!("c1:00.0".parse(), Ok(Target::Pci(_))));
    }
}
