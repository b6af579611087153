//! What a device is: asked once and kept with its handle.

use std::path::Path;
use std::sync::Arc;

use gpupool_core::device::{PciAddress, Vendor};

use super::code::{Against, Answer, Code};
use super::library::{Handle, Library, Slices};
use crate::found::{Found, Partition};
use crate::{address, kernel_file};

/// A device that could be opened.
pub(super) struct Opened {
    pub handle: Handle,
    /// What it is; readings are added to a copy.
    pub facts: Found,
    pub instances: Vec<Instance>,
    pub repair: Repair,
    pub has_power_limit: bool,
    /// Set where it failed to say who it is or how it is cut, though it can.
    pub is_unsure: bool,
}

/// A MIG instance of a device.
pub(super) struct Instance {
    pub handle: Handle,
    pub facts: Found,
}

/// How a device deals with bad memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Repair {
    /// It puts spare rows in their place.
    Rows,
    /// It puts pages out of use.
    Pages,
    /// It says nothing of it.
    Untold,
}

impl Opened {
    /// Opens the device with this number.
    ///
    /// A fact it does not tell stays unknown.
    pub fn open(library: &Library, index: u32, driver: Option<&Arc<str>>, sys: &Path) -> Answer<Self> {
        let handle = library.device(index)?;
        let mut facts = Found::new(Vendor::Nvidia);
        facts.index = Some(index);
        facts.driver = driver.cloned();
        let (uuid, pci, mig) = (library.uuid(handle), library.pci(handle), library.mig_mode(handle));
        let is_unsure = [uuid.as_ref().err(), pci.as_ref().err(), mig.as_ref().err()].into_iter().flatten().any(passes);
        facts.uuid = fact(uuid)?.map(Into::into);
        facts.name = fact(library.name(handle))?.map(Into::into);
        facts.pci = fact(pci)?.and_then(|text| address::parse(&text));
        facts.minor = fact(library.minor(handle))?;
        facts.numa = facts.pci.and_then(|pci| numa(sys, pci));
        facts.mig = fact(mig)?;
        let repair = match (library.remapped_rows(handle), library.retired_pages_pending(handle)) {
            (Err(code), Err(_)) if is_unsupported(code) => Repair::Untold,
            (Err(code), Ok(_)) if is_unsupported(code) => Repair::Pages,
            _ => Repair::Rows,
        };
        let has_power_limit = library.power_limit(handle).err().is_none_or(|code| !is_unsupported(code));
        let instances = if facts.mig == Some(true) { instances(library, handle, &facts)? } else { Vec::new() };
        Ok(Self { handle, facts, instances, repair, has_power_limit, is_unsure })
    }

    /// Whether MIG was switched, or instances were made or taken away, since the device was opened.
    pub fn is_cut_differently(&self, library: &Library) -> Answer<bool> {
        let Some(on) = self.facts.mig else { return Ok(false) };
        match fact(library.mig_mode(self.handle))? {
            Some(now) if now == on => {}
            Some(_) => return Ok(true),
            None => return Ok(false),
        }
        if !on {
            return Ok(false);
        }
        let mut known = self.instances.iter();
        for (slot, handle) in slots(library, self.handle)? {
            let uuid = fact(library.uuid(handle))?;
            let same = |instance: &Instance| {
                instance.handle == handle
                    && instance.facts.index == Some(slot)
                    && instance.facts.uuid.as_deref() == uuid.as_deref()
            };
            if !known.next().is_some_and(same) {
                return Ok(true);
            }
        }
        Ok(known.next().is_some())
    }
}

fn instances(library: &Library, parent: Handle, of: &Found) -> Answer<Vec<Instance>> {
    let parent_total = fact(library.memory(parent))?.map(|memory| memory.total);
    let open = |(slot, handle)| {
        let mut facts = of.clone();
        facts.index = Some(slot);
        facts.uuid = fact(library.uuid(handle))?.map(Into::into);
        let name = fact(library.name(handle))?;
        let named = name.as_deref().and_then(|name| name.rsplit_once(" MIG ")).map(|(_, profile)| profile.trim());
        let sized = match (named, parent_total) {
            (None, Some(total)) => fact(library.slices(handle))?.and_then(|slices| profile(slices, total)),
            _ => None,
        };
        facts.partition = Some(Partition::Mig {
            parent_uuid: of.uuid.clone(),
            gpu_instance: fact(library.gpu_instance(handle))?,
            compute_instance: fact(library.compute_instance(handle))?,
            profile: named.map(Arc::from).or(sized),
        });
        Ok(Instance { handle, facts })
    };
    slots(library, parent)?.into_iter().map(open).collect()
}

/// The slots with an instance in them. There may be fewer than the most there can be, with holes between.
fn slots(library: &Library, parent: Handle) -> Answer<Vec<(u32, Handle)>> {
    let most = fact(library.mig_slots(parent))?.unwrap_or(0);
    let mut slots = Vec::new();
    for slot in 0..most.min(64) {
        if let Some(handle) = fact(library.mig_instance(parent, slot))? {
            slots.push((slot, handle));
        }
    }
    Ok(slots)
}

/// The name of a cut, as the driver makes it: slices, and the part of the GPU's memory in eighths.
fn profile(slices: Slices, parent_total: u64) -> Option<Arc<str>> {
    let total_gb = u128::from(parent_total).div_ceil(1 << 30);
    let eighths = (u128::from(slices.memory_mib) << 20).checked_mul(8)?.div_ceil(u128::from(parent_total).max(1));
    let gb = (eighths * total_gb + 4) / 8;
    let Slices { gpu, compute, .. } = slices;
    let shared = if compute == gpu { String::new() } else { format!("{compute}c.") };
    (gpu > 0 && gb > 0).then(|| format!("{shared}{gpu}g.{gb}gb").into())
}

/// A fact that may be untold; only that the device is gone or the driver bad goes on, so that a device that needs a
/// reset is known by what it still tells.
fn fact<T>(answer: Answer<T>) -> Answer<Option<T>> {
    match answer {
        Ok(value) => Ok(Some(value)),
        Err(code) if code.against() <= Against::Device => Ok(None),
        Err(code) => Err(code),
    }
}

/// Whether a fact may be told another time.
fn passes(code: &Code) -> bool {
    !is_unsupported(*code) && *code != Code::NO_PERMISSION
}

fn is_unsupported(code: Code) -> bool {
    matches!(code.told::<()>(), crate::told::Told::Unsupported(_))
}

/// The NUMA node the kernel puts a PCI device on; it says -1 for none.
fn numa(sys: &Path, pci: PciAddress) -> Option<u32> {
    kernel_file::number(&sys.join(format!("bus/pci/devices/{pci}/numa_node"))).value().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cut_without_a_name_gets_the_name_the_driver_would_give_it() {
        let h100 = 81_559 << 20;
        let cut = |gpu, compute, memory_mib| profile(Slices { gpu, compute, memory_mib }, h100);
        assert_eq!(cut(1, 1, 9_856).as_deref(), Some("1g.10gb"));
        assert_eq!(cut(3, 3, 40_320).as_deref(), Some("3g.40gb"));
        assert_eq!(cut(7, 7, 80_640).as_deref(), Some("7g.80gb"));
        assert_eq!(cut(3, 1, 40_320).as_deref(), Some("1c.3g.40gb"));
        assert_eq!(cut(0, 0, 0), None);
    }
}
