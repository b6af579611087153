//! What was seen on a machine, as plain data. What could not be read is recorded as such and stops nothing.

mod confinement;
mod kernel;
mod nodes;
mod surroundings;
mod user;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use gpupool_core::device::Vendor;

use crate::kernel_log::{self, Said};
use crate::pci_bus::{self, PciGpu};
use crate::places::Places;
use crate::snapshot::Snapshot;
use crate::source::{SourceError, SourceKind};
use crate::told::Told;

pub use confinement::{Cgroup, CgroupMode, Confinement};
pub use kernel::NvidiaVersions;
pub use nodes::{Access, Node};
pub use user::{Group, User};

/// What one source answered when the caller asked it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceResult {
    /// Which source.
    pub kind: SourceKind,
    /// Its answer.
    pub result: Result<Snapshot, SourceError>,
}

/// Everything the doctor knows of a machine.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Evidence {
    /// Display adapters and accelerators on the PCI bus.
    pub gpus: Told<Vec<PciGpu>>,
    /// Which of the kernel modules that matter are loaded, spelled with `_`.
    pub modules: Told<BTreeSet<String>>,
    /// The versions of NVIDIA's kernel module and library.
    pub nvidia: NvidiaVersions,
    /// What the sources answered.
    pub sources: Vec<SourceResult>,
    /// The device nodes of GPUs.
    pub nodes: Told<Vec<Node>>,
    /// Who is looking.
    pub user: User,
    /// How this process is confined.
    pub confinement: Confinement,
    /// The running kernel.
    pub kernel_release: Told<String>,
    /// Whether NVIDIA's persistence daemon runs.
    pub persistence_daemon: Told<bool>,
    /// What the kernel's log says went wrong since the last boot, where a log was given.
    pub kernel_log: Vec<Said>,
    /// Set variables that hide devices from programs.
    pub variables: BTreeMap<&'static str, String>,
    /// Where each tool is; `None` where it is not on the `PATH`.
    pub tools: BTreeMap<SourceKind, Option<PathBuf>>,
}

impl Evidence {
    /// Looks at the machine at `places`; `environment` looks up a variable, `sources` is what the sources answered.
    ///
    /// Opens no device node and reads only what the kernel keeps in its own memory, so no device is woken.
    pub fn gather(places: &Places, environment: &dyn Fn(&str) -> Option<String>, sources: Vec<SourceResult>) -> Self {
        Self {
            gpus: pci_bus::scan(&places.sys).map(|bus| bus.gpus),
            modules: kernel::modules(&places.proc, &places.sys),
            nvidia: NvidiaVersions::read(places),
            sources,
            nodes: nodes::nodes(&places.dev, &places.sys),
            user: User::current(&places.etc),
            confinement: Confinement::look(places, environment),
            kernel_release: kernel::release(&places.proc),
            persistence_daemon: kernel::persistence_daemon(places),
            kernel_log: kernel_log::troubles(&kernel::log(&places.dev)),
            variables: surroundings::hiding_variables(environment),
            tools: surroundings::tools(places, environment),
        }
    }

    /// The same machine, with another log of its kernel.
    #[cfg(test)]
    pub(crate) fn with_kernel_log(mut self, text: &str) -> Self {
        self.kernel_log = kernel_log::troubles(text);
        self
    }

    /// The GPUs of one vendor on the bus.
    pub(crate) fn gpus_of(&self, vendor: Vendor) -> impl Iterator<Item = &PciGpu> {
        self.gpus.value().into_iter().flatten().filter(move |gpu| gpu.vendor == vendor)
    }

    /// Whether a kernel module is loaded; `false` also where that cannot be told.
    pub(crate) fn has_module(&self, name: &str) -> bool {
        self.modules.value().is_some_and(|modules| modules.contains(name))
    }

    /// The device nodes.
    pub(crate) fn nodes(&self) -> &[Node] {
        self.nodes.value().map_or(&[], Vec::as_slice)
    }

    /// Whether this process runs in a container.
    pub(crate) fn in_container(&self) -> bool {
        !self.confinement.container.is_empty()
    }

    /// What the sources that answered said, those of one vendor only.
    pub(crate) fn answers_about(&self, vendor: Vendor) -> impl Iterator<Item = &Snapshot> {
        let of_vendor = move |answer: &&SourceResult| vendor_of(answer.kind) == Some(vendor);
        self.sources.iter().filter(of_vendor).filter_map(|answer| answer.result.as_ref().ok())
    }

    /// Why sources gave nothing.
    pub(crate) fn failures(&self) -> impl Iterator<Item = (SourceKind, &SourceError)> {
        self.sources.iter().filter_map(|answer| Some((answer.kind, answer.result.as_ref().err()?)))
    }

    /// What all sources together say of the devices.
    pub(crate) fn machine(&self) -> Snapshot {
        let mut machine = Snapshot::default();
        for snapshot in self.sources.iter().filter_map(|answer| answer.result.as_ref().ok()) {
            machine.merge(snapshot.clone());
        }
        machine
    }
}

/// Whose devices a source tells of.
pub(crate) const fn vendor_of(kind: SourceKind) -> Option<Vendor> {
    match kind {
        SourceKind::Nvml | SourceKind::NvidiaSmi => Some(Vendor::Nvidia),
        SourceKind::AmdSysfs | SourceKind::AmdSmi | SourceKind::RocmSmi => Some(Vendor::Amd),
        SourceKind::Simulated => None,
    }
}

/// The root of the file system that `/etc` belongs to.
fn root_of(places: &Places) -> &Path {
    places.etc.parent().unwrap_or(Path::new("/"))
}

/// The names in a folder, sorted; none where it cannot be listed.
pub(super) fn names_in(folder: &Path) -> std::io::Result<Vec<String>> {
    let entries = std::fs::read_dir(folder)?;
    let mut names: Vec<String> =
        entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok()).take(crate::limits::PROCESSES).collect();
    names.sort_unstable();
    Ok(names)
}
