//! `CUDA_VISIBLE_DEVICES` of this service: the GPUs that are listed, and with that leased.
//!
//! Pure: the setting and the devices in, numbers out. The rule is milder than CUDA's, which cuts the list at the first
//! invalid entry: unset means all, empty means none; invalid entries are ignored with a warning, and a list of invalid
//! entries only means all. A well-formed entry is valid even if its device is absent: hiding all but one GPU must not show
//! all of them when that one is gone.

use std::collections::BTreeSet;

use gpupool_core::GpuId;
use gpupool_devices::{DetectedDevice, DevicePartition};

/// The number of entries of `CUDA_VISIBLE_DEVICES` that are read.
const FILTER_TOKENS: usize = 4096;
/// The number of characters of such an entry that a warning repeats.
const FILTER_WORDS: usize = 64;
/// The number of warnings about such entries.
const FILTER_WARNINGS: usize = 32;
/// The number of digits from which an entry without a prefix counts as the beginning of an id.
const FILTER_ID_DIGITS: usize = 8;

/// The filter as it was set.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DeviceFilter {
    set: Option<String>,
}

/// The devices that a filter selects.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VisibleDevices {
    /// The devices that are listed; `None` means all.
    pub ids: Option<BTreeSet<GpuId>>,
    /// Warnings about entries that select nothing.
    pub warnings: Vec<String>,
}

impl VisibleDevices {
    /// Whether a device is listed.
    pub fn shows(&self, gpu_id: GpuId) -> bool {
        self.ids.as_ref().is_none_or(|ids| ids.contains(&gpu_id))
    }
}

impl DeviceFilter {
    /// Returns the filter of a variable's value; `None` if the variable is not set.
    pub fn new(set: Option<String>) -> Self {
        Self { set }
    }

    /// Returns the setting.
    pub fn as_set(&self) -> Option<&str> {
        self.set.as_deref()
    }

    /// Returns which of these devices are listed.
    ///
    /// An entry is a number, a UUID or the beginning of one. A GPU in MIG mode is listed with its instances.
    pub fn among(&self, devices: &[(GpuId, &DetectedDevice)]) -> VisibleDevices {
        let Some(set) = &self.set else { return VisibleDevices::default() };
        let tokens: Vec<&str> = set.split(|c: char| c == ',' || c.is_whitespace()).filter(|t| !t.is_empty()).collect();
        let (mut ids, mut warnings, mut any_valid) = (BTreeSet::new(), Vec::new(), tokens.is_empty());
        for token in tokens.iter().take(FILTER_TOKENS) {
            match match_entry(token, devices) {
                FilterEntryMatch::Devices(these) => {
                    any_valid = true;
                    ids.extend(these);
                }
                FilterEntryMatch::Absent => {
                    any_valid = true;
                    warn(&mut warnings, token, "is no GPU of this machine and is left out");
                }
                FilterEntryMatch::Invalid => {
                    warn(&mut warnings, token, "is neither a GPU's number nor its UUID and is ignored")
                }
            }
        }
        if !any_valid {
            warnings.push("CUDA_VISIBLE_DEVICES names no GPU at all: all are listed".to_owned());
            return VisibleDevices { ids: None, warnings };
        }
        VisibleDevices { ids: Some(ids), warnings }
    }
}

fn warn(warnings: &mut Vec<String>, token: &str, what: &str) {
    if warnings.len() < FILTER_WARNINGS {
        let token: String = token.chars().take(FILTER_WORDS).collect();
        warnings.push(format!("CUDA_VISIBLE_DEVICES: {token:?} {what}"));
    }
}

/// The result of matching one entry.
enum FilterEntryMatch {
    Devices(Vec<GpuId>),
    Absent,
    Invalid,
}

fn match_entry(token: &str, devices: &[(GpuId, &DetectedDevice)]) -> FilterEntryMatch {
    let index = token.bytes().all(|byte| byte.is_ascii_digit()).then(|| token.parse().ok().map(GpuId));
    let numbered = index.flatten().filter(|index| devices.iter().any(|(gpu_id, _)| gpu_id == index));
    let named = |(_, found): &&(GpuId, &DetectedDevice)| is_named(found, token);
    let chosen: Vec<GpuId> = match numbered {
        Some(index) => vec![index],
        None => devices.iter().filter(named).map(|(gpu_id, _)| *gpu_id).collect(),
    };
    if !chosen.is_empty() {
        return FilterEntryMatch::Devices(with_instances(chosen, devices));
    }
    if index.is_some() || is_uuid_like(token) { FilterEntryMatch::Absent } else { FilterEntryMatch::Invalid }
}

/// Whether the device's UUID begins with the entry, or the entry names its MIG instance in the older spelling
/// `MIG-GPU-<uuid>/<gi>/<ci>`.
fn is_named(found: &DetectedDevice, token: &str) -> bool {
    let starts = |uuid: &str| uuid.get(..token.len()).is_some_and(|start| start.eq_ignore_ascii_case(token));
    if (is_uuid_like(token) || is_bare_id(token)) && found.uuid.as_deref().is_some_and(starts) {
        return true;
    }
    let Some(DevicePartition::Mig { parent_uuid: Some(parent), gpu_instance: Some(gi), compute_instance, .. }) =
        &found.partition
    else {
        return false;
    };
    token.eq_ignore_ascii_case(&format!("MIG-{parent}/{gi}/{}", compute_instance.unwrap_or(0)))
}

fn is_uuid_like(token: &str) -> bool {
    let Some((kind, rest)) = token.split_once('-') else { return false };
    let known = kind.eq_ignore_ascii_case("GPU") || kind.eq_ignore_ascii_case("MIG");
    let rest = rest.strip_prefix("GPU-").unwrap_or(rest);
    known && !rest.is_empty() && rest.bytes().all(|byte| byte.is_ascii_hexdigit() || byte == b'-' || byte == b'/')
}

/// Whether the entry may be an AMD unique id, which has no prefix. A few digits are a number instead.
fn is_bare_id(token: &str) -> bool {
    let digits = token.strip_prefix("0x").unwrap_or(token);
    digits.len() >= FILTER_ID_DIGITS && digits.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// Adds the instances of the chosen GPUs in MIG mode.
fn with_instances(chosen: Vec<GpuId>, devices: &[(GpuId, &DetectedDevice)]) -> Vec<GpuId> {
    let is_chosen = |gpu_id: &GpuId| chosen.contains(gpu_id);
    let cards: BTreeSet<_> = devices
        .iter()
        .filter(|(gpu_id, found)| is_chosen(gpu_id) && !found.takes_work())
        .filter_map(|(_, found)| found.pci)
        .collect();
    let is_instance =
        |found: &DetectedDevice| found.partition.is_some() && found.pci.is_some_and(|pci| cards.contains(&pci));
    let meant = |(gpu_id, found): &&(GpuId, &DetectedDevice)| is_chosen(gpu_id) || is_instance(found);
    devices.iter().filter(meant).map(|(gpu_id, _)| *gpu_id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpupool_core::Vendor;
    use gpupool_devices::parse_pci_address;
    use proptest::prelude::*;

    const UUIDS: [&str; 4] = ["GPU-aaaa1111", "GPU-aaaa2222", "GPU-bbbb3333", "0x52f4d8e9c0b1a2d3"];

    fn gpus() -> Vec<DetectedDevice> {
        let gpu = |uuid: &str| DetectedDevice { uuid: Some(uuid.into()), ..DetectedDevice::new(Vendor::Nvidia) };
        UUIDS.map(gpu).to_vec()
    }

    fn numbered(found: &[DetectedDevice]) -> Vec<(GpuId, &DetectedDevice)> {
        found.iter().enumerate().map(|(place, found)| (GpuId(place as u32), found)).collect()
    }

    /// Returns the listed GPUs (`None` for all) and the number of warnings.
    fn visible(set: &str) -> (Option<Vec<u32>>, usize) {
        let gpus = gpus();
        let visible = DeviceFilter::new(Some(set.to_owned())).among(&numbered(&gpus));
        (visible.ids.map(|ids| ids.into_iter().map(|id| id.0).collect()), visible.warnings.len())
    }

    #[test]
    fn unset_is_all_and_empty_is_none() {
        assert_eq!(DeviceFilter::default().among(&numbered(&gpus())), VisibleDevices::default());
        assert_eq!(visible(""), (Some(vec![]), 0));
        assert_eq!(visible(" , "), (Some(vec![]), 0));
    }

    #[test]
    fn commas_and_blanks_separate_numbers() {
        for set in ["2,0", "0 2", "0, 2", " 2,,0 ", "0\t2\n", "2 2,0"] {
            assert_eq!(visible(set), (Some(vec![0, 2]), 0), "{set:?}");
        }
    }

    #[test]
    fn absent_devices_are_ignored_with_a_warning() {
        assert_eq!(visible("1,9"), (Some(vec![1]), 1));
        assert_eq!(visible("9"), (Some(vec![]), 1));
        assert_eq!(visible("99999999999999999999"), (Some(vec![]), 1));
        assert_eq!(visible("GPU-cccc"), (Some(vec![]), 1), "hiding all but a GPU that is gone shows none");
    }

    #[test]
    fn a_uuid_or_its_beginning_selects_every_gpu_that_it_fits() {
        assert_eq!(visible("GPU-bbbb3333"), (Some(vec![2]), 0));
        assert_eq!(visible("gpu-AAAA"), (Some(vec![0, 1]), 0));
        assert_eq!(visible("GPU-aaaa2,2"), (Some(vec![1, 2]), 0));
        assert_eq!(visible("0x52f4d8e9"), (Some(vec![3]), 0));
    }

    #[test]
    fn invalid_entries_are_ignored_and_only_invalid_entries_mean_all() {
        assert_eq!(visible("one,1,-1"), (Some(vec![1]), 2));
        assert_eq!(visible("all"), (None, 2));
        assert_eq!(visible("-1"), (None, 2));
        assert_eq!(visible("GPU-"), (None, 2));
    }

    #[test]
    fn a_gpu_cut_by_mig_is_listed_with_its_instances_and_an_instance_alone() {
        let mut parent =
            DetectedDevice { uuid: Some("GPU-aaaa".into()), mig: Some(true), ..DetectedDevice::new(Vendor::Nvidia) };
        parent.pci = parse_pci_address("0000:01:00.0");
        let mut instance = DetectedDevice { uuid: Some("MIG-1234".into()), ..parent.clone() };
        instance.partition = Some(DevicePartition::Mig {
            parent_uuid: Some("GPU-aaaa".into()),
            gpu_instance: Some(7),
            compute_instance: Some(0),
            profile: None,
        });
        let other = DetectedDevice { uuid: Some("GPU-bbbb".into()), ..DetectedDevice::new(Vendor::Nvidia) };
        let all = [parent, other, instance];
        let of = |set: &str| DeviceFilter::new(Some(set.to_owned())).among(&numbered(&all)).ids.unwrap();
        assert_eq!(of("0"), BTreeSet::from([GpuId(0), GpuId(2)]));
        for set in ["MIG-12", "2", "MIG-GPU-aaaa/7/0"] {
            assert_eq!(of(set), BTreeSet::from([GpuId(2)]), "{set}");
        }
    }

    proptest! {
        #[test]
        fn only_present_devices_are_listed(set in ".{0,80}") {
            let gpus = gpus();
            let known = numbered(&gpus);
            let visible = DeviceFilter::new(Some(set)).among(&known);
            let exists = |id: &GpuId| (id.0 as usize) < known.len();
            prop_assert!(visible.ids.as_ref().is_none_or(|ids| ids.iter().all(exists)));
            prop_assert!(visible.ids.is_some() || !visible.warnings.is_empty());
        }

        #[test]
        fn present_numbers_are_listed_between_any_other_entries(
            ids in prop::collection::vec(0u32..4, 1..8),
            separators in prop::collection::vec("[, ]{1,3}", 8),
            nonsense in "[g-z]{0,4}",
        ) {
            let mut set = nonsense;
            for (id, separator) in ids.iter().zip(&separators) {
                set.push_str(&format!("{separator}{id}"));
            }
            let wanted: BTreeSet<u32> = ids.into_iter().collect();
            prop_assert_eq!(visible(&set).0, Some(wanted.into_iter().collect::<Vec<_>>()));
        }
    }
}
