//! What AMD's names, ids and versions look like, and which of them are none.

use std::sync::Arc;

use crate::{amd_names, limits};

/// AMD's unique id as its runtime takes it: `GPU-` and 16 hexadecimal digits. `None` for masked, redacted, zero or `N/A`.
pub(crate) fn unique_id(text: &str) -> Option<Arc<str>> {
    let text = text.trim();
    let digits = ["GPU-", "gpu-", "0x", "0X"].iter().find_map(|prefix| text.strip_prefix(prefix)).unwrap_or(text);
    let sound = (1..=16).contains(&digits.len()) && digits.bytes().all(|byte| byte.is_ascii_hexdigit());
    let id = u64::from_str_radix(digits, 16).ok().filter(|&id| sound && id != 0 && id != u64::MAX)?;
    Some(format!("GPU-{id:016x}").into())
}

/// amd-smi's own longer UUID, as it is; `None` for what is masked.
pub(crate) fn long_uuid(text: &str) -> Option<Arc<str>> {
    let text = text.trim();
    let lengths = [8, 4, 4, 4, 12];
    let groups: Vec<&str> = text.split('-').collect();
    let sound = groups.len() == lengths.len()
        && groups
            .iter()
            .zip(lengths)
            .all(|(group, length)| group.len() == length && group.bytes().all(|byte| byte.is_ascii_hexdigit()));
    sound.then(|| text.into())
}

/// The PCI ids of a device, as a tool wrote them.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Model<'a> {
    pub id: &'a str,
    pub revision: Option<&'a str>,
}

impl Model<'_> {
    /// Its name, as far as it is known.
    fn name(self) -> Option<String> {
        let hex = |text: &str| u16::from_str_radix(text.trim().strip_prefix("0x")?, 16).ok();
        let revision = self.revision.and_then(hex).and_then(|revision| revision.try_into().ok());
        amd_names::known(hex(self.id)?, revision)
    }
}

/// The first of `names` that a person would use; else that of the model, as far as it is known; else the first of what
/// is left that says anything.
///
/// Tools that do not find a name print the vendor or the device id in its place.
pub(crate) fn best_name<'a>(names: &[&'a str], model: Option<Model<'a>>, others: &[&'a str]) -> Option<Arc<str>> {
    let names_vendor = |text: &str| text.starts_with("Advanced Micro Devices");
    let sound = |text: &&&str| says_something(text) && !names_vendor(text);
    let bounded = |text: &&str| text.trim().chars().take(limits::WORDS).collect::<String>();
    let name = names.iter().filter(sound).find(|text| !is_hex(text.trim())).map(bounded);
    let by_id = || model.and_then(Model::name);
    let id = model.map(|model| model.id);
    let other = || others.iter().chain(&id).chain(names).find(sound).map(bounded);
    name.or_else(by_id).or_else(other).map(Into::into)
}

/// Whether a text is an answer at all.
pub(crate) fn says_something(text: &str) -> bool {
    let lower = text.trim().to_ascii_lowercase();
    let nothing = ["", "n/a", "none", "unknown", "not supported", "unsupported", "-", "<redacted>"];
    !nothing.contains(&lower.as_str()) && !lower.starts_with("n/a ")
}

fn is_hex(text: &str) -> bool {
    text.strip_prefix("0x").is_some_and(|digits| digits.bytes().all(|byte| byte.is_ascii_hexdigit()))
}

/// The version of a driver. Where the driver is part of the kernel, tools print the kernel's whole banner, with or
/// without its blanks: then it is the kernel's version.
pub(crate) fn driver_version(text: &str) -> Option<Arc<str>> {
    let text = text.trim();
    if !says_something(text) {
        return None;
    }
    let banner = text.strip_prefix("Linux").map(str::trim_start).and_then(|rest| rest.strip_prefix("version"));
    let version = banner.unwrap_or(text).trim_start();
    let end = version.find(|c: char| c.is_whitespace() || c == '(').unwrap_or(version.len());
    let version: String = version[..end].chars().take(limits::WORDS).collect();
    version.contains(|c: char| c.is_ascii_digit()).then(|| version.into())
}

/// A NUMA node, or `None` where the tool printed −1 in one of its spellings.
pub(crate) fn numa_node(text: &str) -> Option<u32> {
    text.trim().parse::<u32>().ok().filter(|&node| node < 1 << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_id_has_one_spelling() {
        for spelling in ["0x719d230578348e8c", "719D230578348E8C", "GPU-719d230578348e8c", " 0x719D230578348E8C "] {
            assert_eq!(unique_id(spelling).as_deref(), Some("GPU-719d230578348e8c"), "{spelling}");
        }
        assert_eq!(unique_id("0x2150e7d042a1124").as_deref(), Some("GPU-02150e7d042a1124"));
        for none in ["N/A", "<redacted>", "GPU-XX", "", "0x0", "0xffffffffffffffff", "0x719d230578348e8c0"] {
            assert_eq!(unique_id(none), None, "{none}");
        }
        assert!(long_uuid("5bff740f-0000-1000-80f5-3c1c4d3e6f8a").is_some());
        assert_eq!(long_uuid("XXXXXXXX-0000-1000-80f5-3c1c4d3e6f8a"), None);
    }

    #[test]
    fn an_id_in_place_of_a_name_is_used_only_where_nothing_else_is_there() {
        let best = |names: &[&str], id: Option<&str>, others: &[&str]| {
            let model = id.map(|id| Model { id, revision: Some("0xc1") });
            best_name(names, model, others).map(|name| name.to_string())
        };
        assert_eq!(best(&["0x73bf"], Some("0x73bf"), &[]).as_deref(), Some("AMD Radeon RX 6800 XT"));
        assert_eq!(best(&["0x1002", "N/A", "Navi"], Some("0x74a0"), &["SKU"]).as_deref(), Some("Navi"));
        assert_eq!(best(&["0x1002"], Some("0x74a0"), &["SKU"]).as_deref(), Some("AMD Instinct MI300A"));
        assert_eq!(best(&["0x1002"], Some("0x0001"), &["SKU"]).as_deref(), Some("SKU"));
        assert_eq!(best(&["N/A"], Some("0x0001"), &[]).as_deref(), Some("0x0001"));
        assert_eq!(best(&["N/A", "", "Advanced Micro Devices, Inc. [AMD/ATI]"], None, &[]), None);
    }

    #[test]
    fn a_kernel_banner_is_shortened_to_the_kernels_version() {
        let squeezed = "Linuxversion6.8.0-31-generic(buildd@host)(gcc-13)#31-UbuntuSMP";
        assert_eq!(driver_version(squeezed).as_deref(), Some("6.8.0-31-generic"));
        assert_eq!(driver_version("Linux version 6.9.0-rc5+ (me@here) #1").as_deref(), Some("6.9.0-rc5+"));
        assert_eq!(driver_version("6.12.12").as_deref(), Some("6.12.12"));
        assert_eq!(driver_version("N/A"), None);
        assert_eq!(driver_version("Linuxver"), None);
    }

    #[test]
    fn no_numa_node_has_three_spellings() {
        assert_eq!(["-1", "4294967295", "N/A", "3"].map(numa_node), [None, None, None, Some(3)]);
    }
}
