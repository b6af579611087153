//! What joins the devices: NVLinks counted end to end, through switches too, and the PCIe tree.

use gpupool_core::device::LinkKind;
use nvml_wrapper_sys::bindings as nvml;

use super::library::Library;
use super::opened::Opened;
use crate::address;

/// Links between opened devices, named by their places among them.
pub(super) fn between(library: &Library, devices: &[Opened]) -> Vec<(usize, usize, LinkKind)> {
    let ends: Vec<Ends> = devices.iter().map(|device| Ends::of(library, device, devices)).collect();
    let pairs = (0..devices.len()).flat_map(|a| (a + 1..devices.len()).map(move |b| (a, b)));
    let kind = |(a, b): (usize, usize)| {
        let kind = lanes(&ends, a, b).or_else(|| near(library, &devices[a], &devices[b]))?;
        Some((a, b, kind))
    };
    pairs.filter_map(kind).collect()
}

/// Where the NVLinks of one device end.
struct Ends {
    /// How many end at each of the other devices.
    at: Vec<u8>,
    /// How many end at a switch, which joins them to every other device that has such links.
    at_switches: u8,
}

impl Ends {
    fn of(library: &Library, device: &Opened, devices: &[Opened]) -> Self {
        let mut ends = Self { at: vec![0; devices.len()], at_switches: 0 };
        for link in 0..nvml::NVML_NVLINK_MAX_LINKS {
            if library.nvlink_up(device.handle, link) != Ok(true) {
                continue;
            }
            if library.nvlink_ends_at_switch(device.handle, link) == Ok(true) {
                ends.at_switches += 1;
                continue;
            }
            let remote = library.nvlink_remote(device.handle, link).ok().and_then(|text| address::parse(&text));
            let place = devices.iter().position(|other| remote.is_some() && other.facts.pci == remote);
            if let Some(place) = place {
                ends.at[place] += 1;
            }
        }
        ends
    }
}

fn lanes(ends: &[Ends], a: usize, b: usize) -> Option<LinkKind> {
    // Either end may fail to tell where a link goes.
    let direct = ends[a].at[b].max(ends[b].at[a]);
    let lanes = direct + ends[a].at_switches.min(ends[b].at_switches);
    (lanes > 0).then_some(LinkKind::NvLink(lanes))
}

fn near(library: &Library, one: &Opened, other: &Opened) -> Option<LinkKind> {
    match library.common_ancestor(one.handle, other.handle).ok()? {
        nvml::nvmlGpuLevel_enum_NVML_TOPOLOGY_INTERNAL | nvml::nvmlGpuLevel_enum_NVML_TOPOLOGY_SINGLE => {
            Some(LinkKind::PcieSwitch)
        }
        nvml::nvmlGpuLevel_enum_NVML_TOPOLOGY_MULTIPLE => Some(LinkKind::PcieSwitches),
        nvml::nvmlGpuLevel_enum_NVML_TOPOLOGY_HOSTBRIDGE => Some(LinkKind::HostBridge),
        nvml::nvmlGpuLevel_enum_NVML_TOPOLOGY_NODE => Some(LinkKind::SameNuma),
        nvml::nvmlGpuLevel_enum_NVML_TOPOLOGY_SYSTEM => Some(LinkKind::CrossNuma),
        _ => None,
    }
}
