//! GPU models that can be simulated, and their names.

use gpupool_core::{Bytes, LinkKind, Share, Vendor};

/// A GPU model, as reported by its driver.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct GpuModel {
    /// Name in a description of simulated devices.
    pub key: &'static str,
    /// Alternative names.
    pub aliases: &'static [&'static str],
    /// Name reported by the driver.
    pub name: &'static str,
    pub vendor: Vendor,
    /// Memory of one device in MiB; 0 if it shares the memory of the host.
    pub memory_mib: u64,
    /// Memory reserved by the driver in MiB; 0 if the driver does not report it.
    pub reserved_mib: u64,
    /// Power of a card in watts, idle and at most.
    pub watts: (u32, u32),
    /// Chip temperature in °C, idle and at full load.
    pub celsius: (i16, i16),
    /// Connection to other devices of the model; `None` for PCIe only.
    pub fabric: Option<GpuFabric>,
    /// Number of devices on one card.
    pub dies: u16,
    /// Supported MIG profiles; empty without MIG.
    pub mig: &'static [MigProfile],
    /// Supported AMD partition modes besides SPX.
    pub modes: &'static [PartitionMode],
    /// PCI class: display controller, 3D controller, processing accelerator.
    pub pci_class: u32,
}

/// Connection of devices of a model, other than by PCIe.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct GpuFabric {
    /// Link between two devices.
    pub link: LinkKind,
    /// Number of connected devices; further devices form another group.
    pub group: usize,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct MigProfile {
    /// Name, such as `1g.10gb`.
    pub name: &'static str,
    /// Number of compute slices.
    pub compute: u32,
    /// Number of memory slices.
    pub memory: u32,
    pub memory_mib: u64,
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct PartitionMode {
    /// Name, such as `CPX`.
    pub name: &'static str,
    /// Number of partitions of a device.
    pub parts: u16,
}

/// An unknown model name, with the known names, the most similar first.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("model: {asked:?} is not known; allowed, most similar first: {}", allowed.join(", "))]
pub struct UnknownModel {
    /// Requested name.
    pub asked: String,
    /// All known names.
    pub allowed: Vec<&'static str>,
}

impl GpuModel {
    /// Finds a model by any of its names: `H100`, `h100-80gb`, `RTX 4090`, `nvidia geforce rtx 4090`.
    pub(crate) fn find(asked: &str) -> Result<&'static Self, UnknownModel> {
        let wanted = normalize(asked);
        let named = |model: &&Self| model.names().any(|name| normalize(name) == wanted);
        MODELS.iter().find(named).ok_or_else(|| unknown_model(asked, &wanted))
    }

    /// Returns the memory, or `None` if the model shares the memory of the host.
    pub(crate) fn memory(&self) -> Option<Bytes> {
        Bytes::from_mib(self.memory_mib).filter(|memory| !memory.is_zero())
    }

    /// Returns the MIG profile of this name.
    pub(crate) fn mig_profile(&self, name: &str) -> Option<&'static MigProfile> {
        self.mig.iter().find(|profile| profile.name.eq_ignore_ascii_case(name.trim()))
    }

    /// Returns the partition mode of this name.
    pub(crate) fn mode(&self, name: &str) -> Option<&'static PartitionMode> {
        self.modes.iter().find(|mode| mode.name.eq_ignore_ascii_case(name.trim()))
    }

    /// Returns the number of compute slices.
    pub(crate) fn compute_slices(&self) -> u32 {
        self.mig.iter().map(|profile| profile.compute).max().unwrap_or(0)
    }

    /// Returns the number of memory slices.
    pub(crate) fn memory_slices(&self) -> u32 {
        self.mig.iter().map(|profile| profile.memory).max().unwrap_or(0)
    }

    fn names(&self) -> impl Iterator<Item = &'static str> {
        [self.key, self.name].into_iter().chain(self.aliases.iter().copied())
    }
}

impl MigProfile {
    /// Returns the share of a GPU with `slices` compute slices.
    pub(crate) fn share_of_gpu(&self, slices: u32) -> Share {
        Share(self.compute * 1000 / slices.max(1))
    }
}

/// Normalizes a name: without case, spaces, hyphens and vendor.
fn normalize(name: &str) -> String {
    let lower: String = name.chars().filter(char::is_ascii_alphanumeric).map(|c| c.to_ascii_lowercase()).collect();
    let mut rest = lower.as_str();
    for maker in ["nvidia", "amd", "tesla", "instinct", "geforce", "radeon"] {
        rest = rest.strip_prefix(maker).unwrap_or(rest);
    }
    rest.to_owned()
}

fn unknown_model(asked: &str, wanted: &str) -> UnknownModel {
    let mut allowed: Vec<&'static str> = MODELS.iter().map(|model| model.key).collect();
    // A long text is no misspelling, and comparing it would be slow.
    let short: String = wanted.chars().take(32).collect();
    allowed.sort_by_key(|key| (strsim::levenshtein(&short, &normalize(key)), !normalize(key).starts_with(&short)));
    UnknownModel { asked: asked.chars().take(64).collect(), allowed }
}

// Models that can be simulated. Values are those of drivers of 2024 to 2026; if versions of a driver reserve different
// amounts, the value is one of them.

/// Returns the name of each model that can be simulated.
pub fn model_names() -> impl Iterator<Item = &'static str> {
    MODELS.iter().map(|model| model.key)
}

/// All models that can be simulated.
pub(super) const MODELS: &[GpuModel] = &[
    GpuModel {
        aliases: &["H100-80GB", "H100-SXM", "H100-SXM5"],
        fabric: NVSWITCH_18,
        mig: MIG_H100,
        ..nvidia("H100", "NVIDIA H100 80GB HBM3", (81_559, 479), (70, 700), (32, 72))
    },
    GpuModel {
        aliases: &["H200-141GB", "H200-SXM"],
        fabric: NVSWITCH_18,
        mig: MIG_H200,
        ..nvidia("H200", "NVIDIA H200", (143_771, 612), (76, 700), (31, 70))
    },
    GpuModel {
        aliases: &["GH200-96GB"],
        mig: MIG_GH200,
        ..nvidia("GH200", "NVIDIA GH200 480GB", (97_871, 513), (95, 900), (33, 74))
    },
    GpuModel {
        aliases: &["B200-180GB"],
        fabric: NVSWITCH_18,
        mig: MIG_B200,
        ..nvidia("B200", "NVIDIA B200", (183_359, 688), (142, 1000), (31, 69))
    },
    GpuModel {
        fabric: Some(GpuFabric { link: LinkKind::NvLink(18), group: 4 }),
        mig: MIG_GB200,
        ..nvidia("GB200", "NVIDIA GB200", (189_471, 710), (165, 1200), (33, 66))
    },
    GpuModel {
        aliases: &["A100-80GB", "A100-80"],
        fabric: NVSWITCH_12,
        mig: MIG_A100_80,
        ..nvidia("A100", "NVIDIA A100-SXM4-80GB", (81_920, 869), (62, 400), (30, 68))
    },
    GpuModel {
        aliases: &["A100-40"],
        fabric: NVSWITCH_12,
        mig: MIG_A100_40,
        ..nvidia("A100-40GB", "NVIDIA A100-SXM4-40GB", (40_960, 583), (52, 400), (29, 66))
    },
    GpuModel { fabric: NVLINK_BRIDGE, mig: MIG_A30, ..nvidia("A30", "NVIDIA A30", (24_576, 512), (28, 165), (31, 66)) },
    nvidia("A10", "NVIDIA A10", (23_028, 435), (16, 150), (33, 70)),
    GpuModel { fabric: NVLINK_BRIDGE, ..nvidia("A40", "NVIDIA A40", (46_068, 611), (24, 300), (32, 74)) },
    nvidia("L4", "NVIDIA L4", (23_034, 538), (12, 72), (36, 74)),
    nvidia("L40S", "NVIDIA L40S", (46_068, 609), (33, 350), (32, 72)),
    GpuModel {
        aliases: &["V100-16GB", "V100-16", "V100-SXM2"],
        fabric: NVSWITCH_6,
        ..nvidia("V100", "Tesla V100-SXM2-16GB", (16_384, 244), (42, 300), (34, 65))
    },
    GpuModel {
        aliases: &["V100-32"],
        fabric: NVSWITCH_6,
        ..nvidia("V100-32GB", "Tesla V100-SXM2-32GB", (32_768, 268), (43, 300), (34, 66))
    },
    nvidia("T4", "Tesla T4", (15_360, 388), (9, 70), (36, 75)),
    GpuModel { aliases: &["P100-16GB"], ..nvidia("P100", "Tesla P100-PCIE-16GB", (16_384, 104), (27, 250), (30, 68)) },
    geforce("RTX3090", "NVIDIA GeForce RTX 3090", (24_576, 450), (22, 350), (35, 76), NVLINK_BRIDGE),
    geforce("RTX4090", "NVIDIA GeForce RTX 4090", (24_564, 514), (18, 450), (33, 73), None),
    geforce("RTX5090", "NVIDIA GeForce RTX 5090", (32_607, 497), (16, 575), (34, 75), None),
    geforce("RTXA6000", "NVIDIA RTX A6000", (49_140, 626), (23, 300), (33, 78), NVLINK_BRIDGE),
    GpuModel {
        aliases: &["RTX-6000"],
        ..geforce("RTX6000Ada", "NVIDIA RTX 6000 Ada Generation", (49_140, 618), (20, 300), (32, 76), None)
    },
    GpuModel {
        aliases: &["RTX-PRO-6000", "RTX-PRO-6000-Blackwell"],
        mig: MIG_RTX_PRO_6000,
        ..nvidia("RTXPRO6000", "NVIDIA RTX PRO 6000 Blackwell Server Edition", (97_887, 636), (33, 600), (31, 75))
    },
    GpuModel { aliases: &["DGX-Spark"], ..nvidia("GB10", "NVIDIA GB10", (0, 0), (4, 100), (38, 78)) },
    GpuModel {
        fabric: Some(GpuFabric { link: LinkKind::Xgmi(1), group: 4 }),
        pci_class: DISPLAY_OTHER,
        ..amd("MI100", "AMD Instinct MI100", 32_752, (39, 290), (32, 76), &[])
    },
    GpuModel {
        fabric: Some(GpuFabric { link: LinkKind::Xgmi(1), group: 4 }),
        pci_class: DISPLAY_OTHER,
        ..amd("MI210", "AMD Instinct MI210", 65_520, (41, 300), (34, 74), &[])
    },
    GpuModel {
        dies: 2,
        pci_class: DISPLAY_OTHER,
        ..amd("MI250X", "AMD Instinct MI250X", 65_520, (92, 560), (36, 72), &[])
    },
    amd("MI300A", "AMD Instinct MI300A", 131_056, (102, 550), (36, 73), TPX_CPX),
    amd("MI300X", "AMD Instinct MI300X", 196_592, (136, 750), (37, 75), DPX_QPX_CPX),
    amd("MI308X", "AMD Instinct MI308X", 196_592, (130, 650), (36, 72), DPX_CPX),
    amd("MI325X", "AMD Instinct MI325X", 262_128, (148, 1000), (38, 78), DPX_QPX_CPX),
    amd("MI355X", "AMD Instinct MI355X", 294_896, (240, 1400), (38, 74), DPX_QPX_CPX),
    GpuModel {
        aliases: &["7900XTX"],
        fabric: None,
        pci_class: VGA,
        ..amd("RX7900XTX", "AMD Radeon RX 7900 XTX", 24_560, (14, 339), (38, 80), &[])
    },
];

const VGA: u32 = 0x03_0000;
const CONTROLLER_3D: u32 = 0x03_0200;
const DISPLAY_OTHER: u32 = 0x03_8000;
const ACCELERATOR: u32 = 0x12_0000;

const NVSWITCH_18: Option<GpuFabric> = Some(GpuFabric { link: LinkKind::NvLink(18), group: 8 });
const NVSWITCH_12: Option<GpuFabric> = Some(GpuFabric { link: LinkKind::NvLink(12), group: 8 });
const NVSWITCH_6: Option<GpuFabric> = Some(GpuFabric { link: LinkKind::NvLink(6), group: 8 });
const NVLINK_BRIDGE: Option<GpuFabric> = Some(GpuFabric { link: LinkKind::NvLink(4), group: 2 });
const XGMI: Option<GpuFabric> = Some(GpuFabric { link: LinkKind::Xgmi(1), group: 8 });

const fn nvidia(
    key: &'static str,
    name: &'static str,
    (memory_mib, reserved_mib): (u64, u64),
    watts: (u32, u32),
    celsius: (i16, i16),
) -> GpuModel {
    GpuModel {
        key,
        aliases: &[],
        name,
        vendor: Vendor::Nvidia,
        memory_mib,
        reserved_mib,
        watts,
        celsius,
        fabric: None,
        dies: 1,
        mig: &[],
        modes: &[],
        pci_class: CONTROLLER_3D,
    }
}

const fn geforce(
    key: &'static str,
    name: &'static str,
    memory_mib: (u64, u64),
    watts: (u32, u32),
    celsius: (i16, i16),
    fabric: Option<GpuFabric>,
) -> GpuModel {
    GpuModel { fabric, pci_class: VGA, ..nvidia(key, name, memory_mib, watts, celsius) }
}

const fn amd(
    key: &'static str,
    name: &'static str,
    memory_mib: u64,
    watts: (u32, u32),
    celsius: (i16, i16),
    modes: &'static [PartitionMode],
) -> GpuModel {
    GpuModel {
        vendor: Vendor::Amd,
        fabric: XGMI,
        modes,
        pci_class: ACCELERATOR,
        ..nvidia(key, name, (memory_mib, 0), watts, celsius)
    }
}

const fn profile(name: &'static str, compute: u32, memory: u32, memory_mib: u64) -> MigProfile {
    MigProfile { name, compute, memory, memory_mib }
}

/// Returns the profiles of a GPU with seven compute and eight memory slices: their names, and the MiB of one, two, four
/// and all memory slices.
const fn sevenths(names: [&'static str; 6], memory_mib: [u64; 4]) -> [MigProfile; 6] {
    let [one, two, four, all] = memory_mib;
    [
        profile(names[0], 1, 1, one),
        profile(names[1], 1, 2, two),
        profile(names[2], 2, 2, two),
        profile(names[3], 3, 4, four),
        profile(names[4], 4, 4, four),
        profile(names[5], 7, 8, all),
    ]
}

const MIG_H100: &[MigProfile] =
    &sevenths(["1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"], [9_984, 20_096, 40_448, 81_152]);
const MIG_H200: &[MigProfile] =
    &sevenths(["1g.18gb", "1g.35gb", "2g.35gb", "3g.71gb", "4g.71gb", "7g.141gb"], [16_384, 33_280, 71_424, 143_104]);
const MIG_GH200: &[MigProfile] =
    &sevenths(["1g.12gb", "1g.24gb", "2g.24gb", "3g.48gb", "4g.48gb", "7g.96gb"], [11_264, 23_552, 47_616, 96_256]);
const MIG_B200: &[MigProfile] =
    &sevenths(["1g.23gb", "1g.45gb", "2g.45gb", "3g.90gb", "4g.90gb", "7g.180gb"], [22_272, 45_056, 90_880, 182_272]);
const MIG_GB200: &[MigProfile] =
    &sevenths(["1g.24gb", "1g.47gb", "2g.47gb", "3g.95gb", "4g.95gb", "7g.189gb"], [23_040, 46_592, 93_952, 188_416]);
const MIG_A100_80: &[MigProfile] =
    &sevenths(["1g.10gb", "1g.20gb", "2g.20gb", "3g.40gb", "4g.40gb", "7g.80gb"], [9_728, 19_968, 40_192, 80_896]);
const MIG_A100_40: &[MigProfile] =
    &sevenths(["1g.5gb", "1g.10gb", "2g.10gb", "3g.20gb", "4g.20gb", "7g.40gb"], [4_864, 9_984, 19_968, 40_192]);
const MIG_A30: &[MigProfile] =
    &[profile("1g.6gb", 1, 1, 5_952), profile("2g.12gb", 2, 2, 12_032), profile("4g.24gb", 4, 4, 24_192)];

const MIG_RTX_PRO_6000: &[MigProfile] =
    &[profile("1g.24gb", 1, 1, 24_192), profile("2g.48gb", 2, 2, 48_512), profile("4g.96gb", 4, 4, 97_280)];

const fn mode(name: &'static str, parts: u16) -> PartitionMode {
    PartitionMode { name, parts }
}

const DPX_QPX_CPX: &[PartitionMode] = &[mode("DPX", 2), mode("QPX", 4), mode("CPX", 8)];
const DPX_CPX: &[PartitionMode] = &[mode("DPX", 2), mode("CPX", 4)];
const TPX_CPX: &[PartitionMode] = &[mode("TPX", 3), mode("CPX", 6)];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_model_is_found_in_any_spelling() {
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
            assert_eq!(GpuModel::find(asked).unwrap().name, name, "{asked}");
        }
    }

    #[test]
    fn a_misspelt_model_is_refused_with_the_most_similar_first() {
        for (asked, likely) in [("H1000", "H100"), ("rtx409", "RTX4090"), ("MI30X", "MI300X"), ("l40", "L40S")] {
            assert_eq!(GpuModel::find(asked).unwrap_err().allowed.first(), Some(&likely), "{asked}");
        }
        let error = GpuModel::find("voodoo2").unwrap_err();
        assert_eq!(error.allowed.len(), MODELS.len());
        assert!(error.to_string().starts_with("model: \"voodoo2\" is not known; allowed"), "{error}");
    }

    #[test]
    fn model_names_are_unique() {
        let mut seen = BTreeSet::new();
        for model in MODELS {
            let names: BTreeSet<String> = model.names().map(normalize).collect();
            for name in names {
                assert!(seen.insert(name.clone()), "{name} of {}", model.key);
            }
        }
    }

    #[test]
    fn the_values_of_every_model_are_plausible() {
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
