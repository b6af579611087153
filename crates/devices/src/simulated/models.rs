//! What the GPU models that can be simulated are, and how a person names one.

use gpupool_core::device::{LinkKind, Vendor};
use gpupool_core::units::{Bytes, Share};

pub use super::model_table::MODELS;

/// A GPU model, as its driver tells of it.
#[derive(Debug, PartialEq, Eq)]
pub struct Model {
    /// How it is named in a description of simulated devices.
    pub key: &'static str,
    /// Other names for it.
    pub aliases: &'static [&'static str],
    /// Its name as the driver gives it.
    pub name: &'static str,
    /// Who makes it.
    pub vendor: Vendor,
    /// Memory of one device in MiB; nothing where it shares the memory of the host.
    pub memory_mib: u64,
    /// What the driver keeps of that in MiB; nothing where the driver does not tell.
    pub reserved_mib: u64,
    /// What a card draws idle and at most, in watts.
    pub watts: (u32, u32),
    /// How warm the chip is idle and at full load, in °C.
    pub celsius: (i16, i16),
    /// How it is joined to others of its kind; `None` where only by PCIe.
    pub fabric: Option<Fabric>,
    /// Devices on one card.
    pub dies: u16,
    /// The MIG cuts it offers; none where it has no MIG.
    pub mig: &'static [MigProfile],
    /// The AMD partition modes it offers besides SPX.
    pub modes: &'static [Mode],
    /// Its class on the PCI bus: display controller, 3D controller, processing accelerator.
    pub pci_class: u32,
}

/// How devices of a model are joined, other than by PCIe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fabric {
    /// What joins two of them.
    pub link: LinkKind,
    /// How many are joined with each other; the next ones form another group.
    pub group: usize,
}

/// A MIG cut.
#[derive(Debug, PartialEq, Eq)]
pub struct MigProfile {
    /// Its name: `1g.10gb`.
    pub name: &'static str,
    /// Compute slices it takes.
    pub compute: u32,
    /// Memory slices it takes.
    pub memory: u32,
    /// Its memory in MiB.
    pub memory_mib: u64,
}

/// An AMD partition mode.
#[derive(Debug, PartialEq, Eq)]
pub struct Mode {
    /// Its name: `CPX`.
    pub name: &'static str,
    /// Into how many parts it cuts a device.
    pub parts: u16,
}

/// A name that means no model, with the names there are, the likeliest first.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("model: {asked:?} is not known; allowed, likeliest first: {}", allowed.join(", "))]
pub struct UnknownModel {
    /// What was asked for.
    pub asked: String,
    /// Every name there is.
    pub allowed: Vec<&'static str>,
}

impl Model {
    /// The model that a person means: `H100`, `h100-80gb`, `RTX 4090`, `nvidia geforce rtx 4090`.
    pub fn find(asked: &str) -> Result<&'static Self, UnknownModel> {
        let wanted = bare(asked);
        let named = |model: &&Self| model.names().any(|name| bare(name) == wanted);
        MODELS.iter().find(named).ok_or_else(|| unknown(asked, &wanted))
    }

    /// Its memory, or `None` where it shares the memory of the host.
    pub fn memory(&self) -> Option<Bytes> {
        Bytes::from_mib(self.memory_mib).filter(|memory| !memory.is_zero())
    }

    /// The cut of this name.
    pub fn mig_profile(&self, name: &str) -> Option<&'static MigProfile> {
        self.mig.iter().find(|profile| profile.name.eq_ignore_ascii_case(name.trim()))
    }

    /// The partition mode of this name.
    pub fn mode(&self, name: &str) -> Option<&'static Mode> {
        self.modes.iter().find(|mode| mode.name.eq_ignore_ascii_case(name.trim()))
    }

    /// Compute slices it can be cut into.
    pub fn compute_slices(&self) -> u32 {
        self.mig.iter().map(|profile| profile.compute).max().unwrap_or(0)
    }

    /// Memory slices it can be cut into.
    pub fn memory_slices(&self) -> u32 {
        self.mig.iter().map(|profile| profile.memory).max().unwrap_or(0)
    }

    fn names(&self) -> impl Iterator<Item = &'static str> {
        [self.key, self.name].into_iter().chain(self.aliases.iter().copied())
    }
}

impl MigProfile {
    /// How much of a GPU with so many compute slices it is.
    pub fn of_gpu(&self, slices: u32) -> Share {
        Share(self.compute * 1000 / slices.max(1))
    }
}

/// A name without what people leave out or write differently: case, blanks, hyphens, the maker.
fn bare(name: &str) -> String {
    let lower: String = name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect();
    let mut rest = lower.as_str();
    for maker in ["nvidia", "amd", "tesla", "instinct", "geforce", "radeon"] {
        rest = rest.strip_prefix(maker).unwrap_or(rest);
    }
    rest.to_owned()
}

fn unknown(asked: &str, wanted: &str) -> UnknownModel {
    let mut allowed: Vec<&'static str> = MODELS.iter().map(|model| model.key).collect();
    // A long text is no misspelling, and comparing it would take long.
    let short: String = wanted.chars().take(32).collect();
    allowed.sort_by_key(|key| (edits(&short, &bare(key)), !bare(key).starts_with(&short)));
    UnknownModel { asked: asked.chars().take(64).collect(), allowed }
}

/// How many letters must be added, dropped or replaced to turn one word into the other.
fn edits(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (i, a) in one.bytes().enumerate() {
        let mut diagonal = i;
        row[0] = i + 1;
        for (j, b) in other.bytes().enumerate() {
            let replaced = diagonal + usize::from(a != b);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_model_is_found_however_it_is_written() {
        for (asked, name) in [
            ("h100", "NVIDIA H100 80GB HBM3"),
            ("H100-80GB", "NVIDIA H100 80GB HBM3"),
            ("NVIDIA H100 80GB HBM3", "NVIDIA H100 80GB HBM3"),
            ("RTX 4090", "NVIDIA GeForce RTX 4090"),
            ("rtx4090", "NVIDIA GeForce RTX 4090"),
            ("a100", "NVIDIA A100-SXM4-80GB"),
            ("A100-40GB", "NVIDIA A100-SXM4-40GB"),
            ("v100_32gb", "Tesla V100-SXM2-32GB"),
            ("Instinct MI300X", "AMD Instinct MI300X"),
        ] {
            assert_eq!(Model::find(asked).unwrap().name, name, "{asked}");
        }
    }

    #[test]
    fn a_misspelt_model_is_answered_with_the_likeliest_first() {
        for (asked, likely) in [("H1000", "H100"), ("rtx409", "RTX4090"), ("MI30X", "MI300X"), ("l40", "L40S")] {
            assert_eq!(Model::find(asked).unwrap_err().allowed.first(), Some(&likely), "{asked}");
        }
        let error = Model::find("voodoo2").unwrap_err();
        assert_eq!(error.allowed.len(), MODELS.len());
        assert!(error.to_string().starts_with("model: \"voodoo2\" is not known; allowed"), "{error}");
    }

    #[test]
    fn edits_are_counted() {
        for (one, other, apart) in
            [("", "", 0), ("a", "", 1), ("", "ab", 2), ("h100", "h200", 1), ("kitten", "sitting", 3)]
        {
            assert_eq!((edits(one, other), edits(other, one)), (apart, apart), "{one} {other}");
        }
    }

    #[test]
    fn no_name_means_two_models() {
        let mut seen = BTreeSet::new();
        for model in MODELS {
            let names: BTreeSet<String> = model.names().map(bare).collect();
            for name in names {
                assert!(seen.insert(name.clone()), "{name} of {}", model.key);
            }
        }
    }

    #[test]
    fn every_model_could_exist() {
        for model in MODELS {
            let key = model.key;
            assert!(model.watts.0 < model.watts.1, "{key} draws more under load");
            assert!(model.celsius.0 < model.celsius.1 && model.celsius.1 < 90, "{key} gets warmer, and not too hot");
            assert!(model.reserved_mib * 10 < model.memory_mib.max(1), "{key} keeps most memory for programs");
            assert!(model.mig.is_empty() || model.modes.is_empty(), "{key} is cut in one way");
            for profile in model.mig {
                let most = model.memory_mib * u64::from(profile.memory) / u64::from(model.memory_slices());
                assert!(profile.memory_mib <= most + 1024, "{key} {} takes its slices", profile.name);
                assert!(profile.memory_mib * 10 > most * 8, "{key} {} takes its slices", profile.name);
            }
        }
    }
}
