//! Names of well-known AMD devices, for machines whose files have none.

/// Returns the name of a device by its PCI id and revision, or `AMD 0x….` if the tables do not have it.
pub(crate) fn device_name(device: u16, revision: Option<u8>) -> String {
    known_name(device, revision).unwrap_or_else(|| format!("AMD {device:#06x}"))
}

/// Returns the name of a device in the tables.
pub(crate) fn known_name(device: u16, revision: Option<u8>) -> Option<String> {
    let exact = revision.and_then(|revision| {
        CARDS_BY_REVISION.iter().find(|(id, rev, _)| (*id, *rev) == (device, revision)).map(|(_, _, name)| *name)
    });
    exact.or_else(|| name_by_id(device)).map(|name| format!("AMD {name}"))
}

/// Whether the device is part of a processor and shares the memory of the host.
pub(crate) fn is_apu(device: u16) -> bool {
    APUS.iter().any(|(id, _)| *id == device)
}

/// Whether the device is one of two dies on one board, of which only the first measures power.
pub(crate) fn has_two_dies(device: u16) -> bool {
    matches!(device, 0x7408 | 0x740c)
}

fn name_by_id(device: u16) -> Option<&'static str> {
    [ACCELERATORS, GRAPHICS_CARDS, APUS].into_iter().flatten().find(|(id, _)| *id == device).map(|(_, name)| *name)
}

const ACCELERATORS: &[(u16, &str)] = &[
    (0x6860, "Radeon Instinct MI25"),
    (0x686c, "Radeon Instinct MI25 MxGPU"),
    (0x66a0, "Instinct MI50"),
    (0x66a1, "Instinct MI50 / MI60"),
    (0x738c, "Instinct MI100"),
    (0x738e, "Instinct MI100"),
    (0x7408, "Instinct MI250X"),
    (0x740c, "Instinct MI250X / MI250"),
    (0x740f, "Instinct MI210"),
    (0x7410, "Instinct MI210 VF"),
    (0x74a0, "Instinct MI300A"),
    (0x74a1, "Instinct MI300X"),
    (0x74a2, "Instinct MI308X"),
    (0x74a5, "Instinct MI325X"),
    (0x74a8, "Instinct MI308X HF"),
    (0x74a9, "Instinct MI300X HF"),
    (0x74b5, "Instinct MI300X VF"),
    (0x74b6, "Instinct MI308X"),
    (0x74b9, "Instinct MI325X VF"),
    (0x74bd, "Instinct MI300X HF"),
    (0x75a0, "Instinct MI350X"),
    (0x75a3, "Instinct MI355X"),
    (0x75b0, "Instinct MI350X VF"),
    (0x75b3, "Instinct MI355X VF"),
];

/// Graphics cards by id; the name lists all cards that share an id.
const GRAPHICS_CARDS: &[(u16, &str)] = &[
    (0x6610, "Radeon R7 250 / 350"),
    (0x6611, "Radeon R7 240 / R5 340"),
    (0x6613, "Radeon R7 240 / R5 340"),
    (0x6617, "Radeon R7 240"),
    (0x6649, "FirePro W5100"),
    (0x6658, "Radeon R7 260X / 360"),
    (0x665c, "Radeon HD 7790 / R7 260"),
    (0x665f, "Radeon R7 360 / R9 360"),
    (0x66a3, "Radeon Pro Vega II"),
    (0x66af, "Radeon VII"),
    (0x6780, "FirePro W9000"),
    (0x678a, "FirePro W8000"),
    (0x6798, "Radeon HD 7970 / R9 280X"),
    (0x6799, "Radeon HD 7990"),
    (0x679a, "Radeon HD 7950 / R9 280"),
    (0x679e, "Radeon HD 7870 XT"),
    (0x67a0, "FirePro W9100"),
    (0x67a1, "FirePro W8100"),
    (0x67b0, "Radeon R9 290X / 390X"),
    (0x67b1, "Radeon R9 290 / 390"),
    (0x67b9, "Radeon R9 295X2"),
    (0x67c4, "Radeon Pro WX 7100"),
    (0x67c7, "Radeon Pro WX 5100"),
    (0x67df, "Radeon RX 470 / 480 / 570 / 580 / 590"),
    (0x67e3, "Radeon Pro WX 4100"),
    (0x67ef, "Radeon RX 460 / 560"),
    (0x67ff, "Radeon RX 550 / 560"),
    (0x6808, "FirePro W7000"),
    (0x6810, "Radeon R7 370 / R9 270X"),
    (0x6811, "Radeon R7 370 / R9 270"),
    (0x6818, "Radeon HD 7870"),
    (0x6819, "Radeon HD 7850"),
    (0x683d, "Radeon HD 7770 / R7 250X"),
    (0x683f, "Radeon HD 7750 / R7 250E"),
    (0x6861, "Radeon Pro WX 9100"),
    (0x6863, "Radeon Vega Frontier Edition"),
    (0x6864, "Radeon Pro V340"),
    (0x6867, "Radeon Pro Vega 56"),
    (0x6868, "Radeon Pro WX 8200"),
    (0x687f, "Radeon RX Vega 56 / 64"),
    (0x6938, "Radeon R9 285X / 380X"),
    (0x6939, "Radeon R9 285 / 380"),
    (0x694c, "Radeon RX Vega M GH"),
    (0x694e, "Radeon RX Vega M GL"),
    (0x6981, "Radeon Pro WX 3200"),
    (0x6985, "Radeon Pro WX 3100"),
    (0x6995, "Radeon Pro WX 2100"),
    (0x699f, "Radeon RX 550"),
    (0x6fdf, "Radeon RX 580 2048SP / 590 GME"),
    (0x7300, "Radeon R9 Fury"),
    (0x7312, "Radeon Pro W5700"),
    (0x7319, "Radeon Pro 5700 XT"),
    (0x731f, "Radeon RX 5600 XT / 5700 / 5700 XT"),
    (0x7340, "Radeon RX 5300 / 5500 / 5500 XT"),
    (0x7341, "Radeon Pro W5500"),
    (0x7360, "Radeon Pro 5600M"),
    (0x7362, "Radeon Pro V520 / V540"),
    (0x73a1, "Radeon Pro V620"),
    (0x73a2, "Radeon Pro W6900X"),
    (0x73a3, "Radeon Pro W6800"),
    (0x73a5, "Radeon RX 6950 XT"),
    (0x73ae, "Radeon Pro V620 MxGPU"),
    (0x73af, "Radeon RX 6900 XT"),
    (0x73bf, "Radeon RX 6800 / 6800 XT / 6900 XT"),
    (0x73df, "Radeon RX 6700 / 6700 XT / 6750 XT / 6800M"),
    (0x73e1, "Radeon Pro W6600M"),
    (0x73e3, "Radeon Pro W6600"),
    (0x73ef, "Radeon RX 6650 XT / 6700S / 6800S"),
    (0x73ff, "Radeon RX 6600 / 6600 XT / 6600M"),
    (0x7421, "Radeon Pro W6500M"),
    (0x7422, "Radeon Pro W6400"),
    (0x7424, "Radeon RX 6300"),
    (0x743f, "Radeon RX 6400 / 6500 XT"),
    (0x7448, "Radeon Pro W7900"),
    (0x7449, "Radeon Pro W7800 48GB"),
    (0x744a, "Radeon Pro W7900 Dual Slot"),
    (0x744c, "Radeon RX 7900 XT / 7900 XTX / 7900 GRE"),
    (0x745e, "Radeon Pro W7800"),
    (0x7460, "Radeon Pro V710"),
    (0x7461, "Radeon Pro V710 MxGPU"),
    (0x7470, "Radeon Pro W7700"),
    (0x747e, "Radeon RX 7700 XT / 7800 XT"),
    (0x7480, "Radeon RX 7600 / 7600 XT / 7600S / 7700S"),
    (0x7483, "Radeon RX 7600M"),
    (0x7489, "Radeon Pro W7500"),
    (0x7499, "Radeon RX 7300 / 7400"),
    (0x7550, "Radeon RX 9070 / 9070 XT"),
    (0x7551, "Radeon AI PRO R9700"),
    (0x7590, "Radeon RX 9060 XT"),
];

const APUS: &[(u16, &str)] = &[
    (0x1114, "Radeon 840M / 860M"),
    (0x13c0, "Radeon Graphics (Granite Ridge)"),
    (0x1435, "Custom GPU 0932"),
    (0x1506, "Radeon 610M"),
    (0x150e, "Radeon 880M / 890M"),
    (0x1586, "Radeon 8050S / 8060S"),
    (0x15bf, "Radeon 740M / 760M / 780M"),
    (0x15c8, "Radeon 740M"),
    (0x15d8, "Radeon Vega (Picasso)"),
    (0x15dd, "Radeon Vega (Raven Ridge)"),
    (0x15e7, "Radeon Graphics (Barcelo)"),
    (0x1636, "Radeon Graphics (Renoir)"),
    (0x1638, "Radeon Graphics (Cezanne)"),
    (0x163f, "Custom GPU 0405"),
    (0x164c, "Radeon Graphics (Lucienne)"),
    (0x164e, "Radeon Graphics (Raphael)"),
    (0x1681, "Radeon 660M / 680M"),
    (0x1900, "Radeon 760M / 780M"),
    (0x1901, "Radeon 740M"),
    (0x1902, "Radeon 820M / 840M"),
    (0x9874, "Radeon R5 / R6 / R7 (Carrizo)"),
    (0x98e4, "Radeon R2 / R3 / R4 / R5 (Stoney)"),
];

/// Cards that share an id, by revision.
const CARDS_BY_REVISION: &[(u16, u8, &str)] = &[
    (0x150e, 0xc1, "Radeon 890M"),
    (0x150e, 0xc4, "Radeon 880M"),
    (0x1586, 0xc1, "Radeon 8060S"),
    (0x1586, 0xc2, "Radeon 8050S"),
    (0x15bf, 0xc1, "Radeon 780M"),
    (0x15bf, 0xc2, "Radeon 780M"),
    (0x15bf, 0xc3, "Radeon 760M"),
    (0x15bf, 0xc4, "Radeon 780M"),
    (0x15bf, 0xdd, "Radeon 780M"),
    (0x66a1, 0x06, "Radeon Pro VII"),
    (0x67df, 0xc4, "Radeon RX 480"),
    (0x67df, 0xc7, "Radeon RX 480"),
    (0x67df, 0xcf, "Radeon RX 470"),
    (0x67df, 0xe1, "Radeon RX 590"),
    (0x67df, 0xe7, "Radeon RX 580"),
    (0x67df, 0xef, "Radeon RX 570"),
    (0x67ef, 0xcf, "Radeon RX 460"),
    (0x67ff, 0xcf, "Radeon RX 560"),
    (0x6860, 0x03, "Radeon Pro V340"),
    (0x687f, 0xc1, "Radeon RX Vega 64"),
    (0x687f, 0xc3, "Radeon RX Vega 56"),
    (0x731f, 0xc1, "Radeon RX 5700 XT"),
    (0x731f, 0xc2, "Radeon RX 5600M"),
    (0x731f, 0xc3, "Radeon RX 5700M"),
    (0x731f, 0xc4, "Radeon RX 5700"),
    (0x731f, 0xca, "Radeon RX 5600 XT"),
    (0x7340, 0xc1, "Radeon RX 5500M"),
    (0x7340, 0xc3, "Radeon RX 5300M"),
    (0x7340, 0xc5, "Radeon RX 5500 XT"),
    (0x7340, 0xc7, "Radeon RX 5500"),
    (0x7340, 0xcf, "Radeon RX 5300"),
    (0x73bf, 0xc0, "Radeon RX 6900 XT"),
    (0x73bf, 0xc1, "Radeon RX 6800 XT"),
    (0x73bf, 0xc3, "Radeon RX 6800"),
    (0x73df, 0xc0, "Radeon RX 6750 XT"),
    (0x73df, 0xc1, "Radeon RX 6700 XT"),
    (0x73df, 0xc2, "Radeon RX 6800M"),
    (0x73df, 0xc3, "Radeon RX 6800M"),
    (0x73df, 0xc5, "Radeon RX 6700 XT"),
    (0x73df, 0xcf, "Radeon RX 6700M"),
    (0x73df, 0xdf, "Radeon RX 6700"),
    (0x73ef, 0xc0, "Radeon RX 6800S"),
    (0x73ef, 0xc1, "Radeon RX 6650 XT"),
    (0x73ef, 0xc2, "Radeon RX 6700S"),
    (0x73ef, 0xc3, "Radeon RX 6650M"),
    (0x73ff, 0xc1, "Radeon RX 6600 XT"),
    (0x73ff, 0xc3, "Radeon RX 6600M"),
    (0x73ff, 0xc7, "Radeon RX 6600"),
    (0x73ff, 0xcb, "Radeon RX 6600S"),
    (0x743f, 0xc1, "Radeon RX 6500 XT"),
    (0x743f, 0xc7, "Radeon RX 6400"),
    (0x743f, 0xc8, "Radeon RX 6500M"),
    (0x744c, 0xc8, "Radeon RX 7900 XTX"),
    (0x744c, 0xcc, "Radeon RX 7900 XT"),
    (0x744c, 0xce, "Radeon RX 7900 GRE"),
    (0x744c, 0xcf, "Radeon RX 7900M"),
    (0x747e, 0xc8, "Radeon RX 7800 XT"),
    (0x747e, 0xd8, "Radeon RX 7800M"),
    (0x747e, 0xff, "Radeon RX 7700 XT"),
    (0x7480, 0x00, "Radeon Pro W7600"),
    (0x7480, 0xc0, "Radeon RX 7600 XT"),
    (0x7480, 0xc1, "Radeon RX 7700S"),
    (0x7480, 0xc3, "Radeon RX 7600S"),
    (0x7480, 0xc7, "Radeon RX 7600M XT"),
    (0x7480, 0xcf, "Radeon RX 7600"),
    (0x7550, 0xc0, "Radeon RX 9070 XT"),
    (0x7550, 0xc2, "Radeon RX 9070 GRE"),
    (0x7550, 0xc3, "Radeon RX 9070"),
    (0x7590, 0xc7, "Radeon RX 9060"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    #[test]
    fn a_device_is_named_by_its_revision_or_its_id_or_its_number() {
        assert_eq!(device_name(0x67df, Some(0xe7)), "AMD Radeon RX 580");
        assert_eq!(device_name(0x67df, None), "AMD Radeon RX 470 / 480 / 570 / 580 / 590");
        assert_eq!(device_name(0x74a1, Some(0)), "AMD Instinct MI300X");
        assert_eq!(device_name(0x00ab, None), "AMD 0x00ab");
    }

    #[test]
    fn no_device_has_two_names() {
        let ids: Vec<u16> = [ACCELERATORS, GRAPHICS_CARDS, APUS].into_iter().flatten().map(|(id, _)| *id).collect();
        assert_eq!(ids.iter().collect::<BTreeSet<_>>().len(), ids.len());
        let exact: Vec<(u16, u8)> = CARDS_BY_REVISION.iter().map(|(id, revision, _)| (*id, *revision)).collect();
        assert_eq!(exact.iter().collect::<BTreeSet<_>>().len(), exact.len());
        assert!(exact.iter().all(|(id, _)| ids.contains(id)));
    }
}
