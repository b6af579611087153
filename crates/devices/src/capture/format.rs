//! The formats a capture can have: their names, how each is recognised, and who reads it.

use std::fmt;
use std::path::Path;
use std::str::FromStr;

use crate::snapshot::Snapshot;
use crate::source::SourceError;
use crate::{amd_sysfs, amd_tools, kernel_log, nvidia_smi, pci_bus, topology};

/// A format of captures.
#[derive(Clone, Copy)]
pub struct Format(&'static Entry);

struct Entry {
    name: &'static str,
    reader: Reader,
}

enum Reader {
    Text { looks_like: fn(&str) -> bool, parse: fn(&str) -> Result<Snapshot, SourceError> },
    Tree { looks_like: fn(&Path) -> bool, read: fn(&Path) -> Result<Snapshot, SourceError> },
}

macro_rules! text {
    ($name:literal, $($module:ident)::+) => {
        Entry { name: $name, reader: Reader::Text { looks_like: $($module)::+::looks_like, parse: $($module)::+::parse } }
    };
}

macro_rules! tree {
    ($name:literal, $($module:ident)::+) => {
        Entry { name: $name, reader: Reader::Tree { looks_like: $($module)::+::looks_like, read: $($module)::+::read } }
    };
}

/// Every format. A guess takes the first that recognises a text, so what is more particular stands first.
static FORMATS: &[Entry] = &[
    tree!("sysfs", amd_sysfs),
    tree!("pci", pci_bus::tree),
    text!("nvidia-smi-sections", nvidia_smi::sections),
    text!("nvidia-smi-xml", nvidia_smi::xml),
    text!("nccl-topology", topology::nccl),
    text!("hwloc", topology::hwloc),
    text!("nvidia-smi-table", nvidia_smi::table),
    text!("nvidia-smi-query", nvidia_smi::query),
    text!("nvidia-smi-csv", nvidia_smi::csv),
    text!("nvidia-smi-apps", nvidia_smi::apps),
    text!("nvidia-smi-nvlink", nvidia_smi::nvlink),
    text!("nvidia-smi-list", nvidia_smi::list),
    text!("nvidia-smi-topo", nvidia_smi::topo),
    text!("nvidia-smi-fields", nvidia_smi::help),
    text!("amdgpu-top", amd_tools::amdgpu_top),
    text!("rocm-smi-json", amd_tools::rocm_smi_json),
    text!("amd-smi-json", amd_tools::amd_smi_json),
    text!("rocm-smi-csv", amd_tools::rocm_smi_csv),
    text!("rocm-smi-text", amd_tools::rocm_smi_text),
    text!("rocminfo", amd_tools::rocminfo),
    text!("amd-smi-text", amd_tools::amd_smi_text),
    text!("amdgpu-firmware", amd_tools::firmware_info),
    text!("fdinfo", amd_sysfs::fdinfo),
    text!("lspci", pci_bus::lspci),
    text!("fabric-manager-log", kernel_log::fabric_manager),
    text!("kernel-log", kernel_log),
    text!("nvidia-smi-error", nvidia_smi::errors),
];

/// A format nobody reads.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no format {0:?}; there are {all}", all = Format::names())]
pub struct UnknownFormat(String);

impl Format {
    /// The names of all formats, for people.
    pub fn names() -> String {
        FORMATS.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", ")
    }

    /// All formats.
    pub fn all() -> impl Iterator<Item = Self> {
        FORMATS.iter().map(Self)
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Whether it is the format of a folder.
    pub fn is_tree(self) -> bool {
        matches!(self.0.reader, Reader::Tree { .. })
    }

    /// Whether a text seems to have this format.
    pub fn recognises(self, text: &str) -> bool {
        match self.0.reader {
            Reader::Text { looks_like, .. } => looks_like(text),
            Reader::Tree { .. } => false,
        }
    }

    /// The format a text seems to have.
    pub fn guess(text: &str) -> Option<Self> {
        Self::all().find(|format| format.recognises(text))
    }

    /// The formats of the trees a folder holds.
    pub(crate) fn trees_in(folder: &Path) -> impl Iterator<Item = Self> {
        Self::all().filter(move |format| match format.0.reader {
            Reader::Tree { looks_like, .. } => looks_like(folder),
            Reader::Text { .. } => false,
        })
    }

    /// Reads a text; `None` for the format of a folder.
    pub fn parse(self, text: &str) -> Option<Result<Snapshot, SourceError>> {
        match self.0.reader {
            Reader::Text { parse, .. } => Some(parse(text)),
            Reader::Tree { .. } => None,
        }
    }

    /// Reads a folder; `None` where it holds no such tree, or for the format of a text.
    pub fn read_tree(self, folder: &Path) -> Option<Result<Snapshot, SourceError>> {
        match self.0.reader {
            Reader::Tree { looks_like, read } if looks_like(folder) => Some(read(folder)),
            _ => None,
        }
    }
}

impl FromStr for Format {
    type Err = UnknownFormat;

    fn from_str(text: &str) -> Result<Self, UnknownFormat> {
        let name = text.trim().to_ascii_lowercase().replace('_', "-");
        let name = match &*name {
            "kfd" | "amd-sysfs" | "drm" => "sysfs",
            "xml" => "nvidia-smi-xml",
            "csv" => "nvidia-smi-csv",
            "topo" | "topo-m" => "nvidia-smi-topo",
            "nccl" | "rccl" => "nccl-topology",
            "dmesg" | "kmsg" => "kernel-log",
            other => other,
        };
        Self::all().find(|format| format.name() == name).ok_or_else(|| UnknownFormat(text.to_owned()))
    }
}

impl PartialEq for Format {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for Format {}

impl fmt::Display for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Debug for Format {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Format({})", self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_is_found_by_its_name_and_no_two_share_one() {
        for format in Format::all() {
            assert_eq!(format.name().parse(), Ok(format));
        }
        assert_eq!("KFD".parse::<Format>().map(Format::name), Ok("sysfs"));
        assert!("nonsense".parse::<Format>().unwrap_err().to_string().contains("rocminfo"));
    }
}
