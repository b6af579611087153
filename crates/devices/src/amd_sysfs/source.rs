//! The live source: this machine's own tree, walked when it changed and read otherwise.

use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use super::inventory::{Inventory, Others};
use super::processes::Processes;
use super::{drm, kfd};
use crate::kernel_file;
use crate::places::Places;
use crate::snapshot::Snapshot;
use crate::source::{Source, SourceError, SourceKind};

/// AMD devices as the kernel's own files tell of them; needs no tool and no library.
#[derive(Debug)]
pub struct AmdSysfs {
    drm: PathBuf,
    kfd: PathBuf,
    module: PathBuf,
    proc: PathBuf,
    walked: Option<Walked>,
}

/// What a walk found, and what the tree looked like then.
#[derive(Debug)]
struct Walked {
    outline: Outline,
    inventory: Inventory,
}

/// What changes when devices come, go or are cut: cheap to look at before each reading.
#[derive(Debug, PartialEq, Eq)]
struct Outline {
    cards: Vec<(u32, Option<PathBuf>)>,
    generation: Option<String>,
}

impl AmdSysfs {
    /// A source that looks below `places.sys` and `places.proc`.
    pub fn new(places: &Places) -> Self {
        Self {
            drm: places.sys.join("class/drm"),
            kfd: places.sys.join("class/kfd/kfd"),
            module: places.sys.join("module/amdgpu"),
            proc: places.proc.clone(),
            walked: None,
        }
    }

    fn walk(&self, processes: Processes) -> Result<Inventory, SourceError> {
        let cards = match drm::cards(&self.drm) {
            Ok(cards) => cards,
            Err(error) if error.kind() == ErrorKind::PermissionDenied => {
                return Err(SourceError::NoPermission(format!("{}: {error}", self.drm.display())));
            }
            Err(_) => Vec::new(),
        };
        let nodes = self.kfd.join("topology/nodes");
        let inventory = Inventory::new(cards, kfd::read(&nodes), Others::LeftOut);
        if inventory.is_empty() && !self.module.exists() && !nodes.exists() {
            let why = format!("neither {} nor an AMD card in {}", self.module.display(), self.drm.display());
            return Err(SourceError::NotHere { what: "the amdgpu driver".into(), why });
        }
        let version = kernel_file::text(&self.module.join("version")).value().map(|version| version.as_str().into());
        Ok(inventory.with(version, processes))
    }

    fn outline(&self) -> Outline {
        let numbers = drm::card_numbers(&self.drm).unwrap_or_default();
        let target = |number: u32| fs::read_link(self.drm.join(format!("card{number}"))).ok();
        Outline {
            cards: numbers.into_iter().map(|number| (number, target(number))).collect(),
            generation: generation(&self.kfd),
        }
    }

    fn walk_again(&mut self) -> Result<&mut Walked, SourceError> {
        let fresh = || Processes::new(Some(self.kfd.join("proc")), Some(self.proc.clone()));
        let processes = self.walked.take().map_or_else(fresh, |walked| walked.inventory.into_processes());
        let (outline, inventory) = (self.outline(), self.walk(processes)?);
        Ok(self.walked.insert(Walked { outline, inventory }))
    }
}

/// The compute topology counts its changes.
fn generation(kfd: &Path) -> Option<String> {
    kernel_file::text(&kfd.join("topology/generation_id")).value().cloned()
}

impl Source for AmdSysfs {
    fn kind(&self) -> SourceKind {
        SourceKind::AmdSysfs
    }

    fn read(&mut self) -> Result<Snapshot, SourceError> {
        let outline = self.outline();
        let unchanged = self.walked.as_mut().filter(|walked| walked.outline == outline);
        if let Some(walked) = unchanged {
            let (snapshot, stale) = walked.inventory.read();
            if !stale {
                return Ok(snapshot);
            }
        }
        Ok(self.walk_again()?.inventory.read().0)
    }
}
