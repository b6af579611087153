//! The binary table `gpu_metrics`, whose layout differs by version; used for values without a file in sysfs.
//!
//! A header of four bytes has the size, the format (1: cards, 2 and 3: APUs) and the content revision. A field of all
//! ones is one that the chip lacks; some firmware sets only the lower half. An implausible value is a failure, since
//! the table contains garbage on some cards.

use gpupool_core::Percent;

use crate::detected_device::Milliwatts;
use crate::reported::Reported;

/// Values from the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct GpuMetrics {
    pub temperature_c: Reported<i16>,
    pub power: Reported<Milliwatts>,
    pub utilization: Reported<Percent>,
}

/// Parses the table; an unknown version is unsupported, a broken table fails.
pub(crate) fn parse(bytes: &[u8]) -> Reported<GpuMetrics> {
    if bytes.is_empty() {
        return Reported::Unsupported("gpu_metrics is empty".into());
    }
    let Some(&[low, high, format, content]) = bytes.first_chunk::<4>() else {
        return Reported::Failed("gpu_metrics is truncated".into());
    };
    let size = usize::from(u16::from_le_bytes([low, high]));
    let Some(layout) = GpuMetricsLayout::of_version(format, content) else {
        return Reported::Unsupported(format!("gpu_metrics has the unknown version {format}.{content}").into());
    };
    let Some(table) = bytes.get(..size).filter(|table| table.len() >= layout.min_length()) else {
        return Reported::Failed("gpu_metrics is shorter than its header says".into());
    };
    Reported::Value(GpuMetrics {
        temperature_c: layout.temperature_c(table),
        power: layout.power(table),
        utilization: layout.utilization(table),
    })
}

/// Byte offsets and units of the fields in one version.
#[derive(Debug, Clone, Copy)]
struct GpuMetricsLayout {
    /// Offsets of the edge and the inside temperature; the first with a value counts.
    temperatures: &'static [usize],
    /// Units per degree.
    per_degree: i32,
    power: usize,
    /// Length of the power field in bytes.
    power_width: usize,
    milliwatts_per_unit: u64,
    activity: usize,
    activity_per_percent: u32,
}

impl GpuMetricsLayout {
    const fn of_version(format: u8, content: u8) -> Option<Self> {
        let card = Self {
            temperatures: &[4, 6],
            per_degree: 1,
            power: 22,
            power_width: 2,
            milliwatts_per_unit: 1000,
            activity: 16,
            activity_per_percent: 1,
        };
        let apu = Self {
            temperatures: &[4, 6],
            per_degree: 100,
            power: 40,
            power_width: 2,
            milliwatts_per_unit: 1,
            activity: 28,
            activity_per_percent: 100,
        };
        Some(match (format, content) {
            // Revision 0 of a format starts with a timestamp of eight bytes.
            (1, 0) => Self { temperatures: &[16, 18], power: 34, activity: 28, ..card },
            (1, 1..=3) => card,
            // No edge sensor; the current socket power comes before the activity.
            (1, 4..=8) => Self { temperatures: &[4], power: 10, activity: 12, ..card },
            (2, 0) => Self { temperatures: &[16, 18], power: 44, activity: 40, ..apu },
            (2, 1..=4) => apu,
            (3, 0) => Self { power: 112, power_width: 4, activity: 42, activity_per_percent: 1, ..apu },
            _ => return None,
        })
    }

    fn min_length(&self) -> usize {
        (self.power + self.power_width).max(self.activity + 2)
    }

    fn temperature_c(&self, table: &[u8]) -> Reported<i16> {
        let read = |&at: &usize| field(table, at, 2).map(|raw| (raw as i32 + self.per_degree / 2) / self.per_degree);
        let reported = self.temperatures.iter().map(read).fold(Reported::ABSENT, Reported::or);
        plausible(reported, |&degrees| (0..=150).contains(&degrees)).map(|degrees| degrees as i16)
    }

    fn power(&self, table: &[u8]) -> Reported<Milliwatts> {
        let reported = field(table, self.power, self.power_width).map(|raw| raw * self.milliwatts_per_unit);
        // Some APUs report watts instead of milliwatts; a value below half a watt is in watts.
        let least = if self.milliwatts_per_unit == 1 { 500 } else { 0 };
        plausible(reported, |milliwatts| (least..=5_000_000).contains(milliwatts)).map(Milliwatts)
    }

    fn utilization(&self, table: &[u8]) -> Reported<Percent> {
        let reported = field(table, self.activity, 2);
        let full = u64::from(self.activity_per_percent) * 100;
        plausible(reported, |&raw| raw <= full).map(|raw| Percent(raw as u32 * 1000 / self.activity_per_percent))
    }
}

/// Reads the number of `width` bytes at an offset, unless all bits are ones there or in its lower half.
fn field(table: &[u8], at: usize, width: usize) -> Reported<u64> {
    let Some(bytes) = table.get(at..at + width) else {
        return Reported::ABSENT;
    };
    let raw = bytes.iter().rev().fold(0_u64, |number, &byte| number << 8 | u64::from(byte));
    let missing = raw == u64::from(u16::MAX) || raw == u64::from(u32::MAX);
    if missing { Reported::Unsupported("not in gpu_metrics".into()) } else { Reported::Value(raw) }
}

fn plausible<T: std::fmt::Display>(reported: Reported<T>, can_be: impl FnOnce(&T) -> bool) -> Reported<T> {
    match reported {
        Reported::Value(value) if !can_be(&value) => {
            Reported::Failed(format!("implausible gpu_metrics: {value}").into())
        }
        reported => reported,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Creates a table of a version with two-byte numbers at some offsets and all ones elsewhere.
    fn table(format: u8, content: u8, size: u16, fields: &[(usize, u16)]) -> Vec<u8> {
        let mut bytes = vec![0xff; usize::from(size)];
        bytes[..2].copy_from_slice(&size.to_le_bytes());
        bytes[2..4].copy_from_slice(&[format, content]);
        for &(at, value) in fields {
            bytes[at..at + 2].copy_from_slice(&value.to_le_bytes());
        }
        bytes
    }

    /// Parses a table that must be valid.
    fn parse(bytes: &[u8]) -> GpuMetrics {
        let metrics = super::parse(bytes);
        GpuMetrics {
            temperature_c: metrics.clone().and_then(|metrics| metrics.temperature_c),
            power: metrics.clone().and_then(|metrics| metrics.power),
            utilization: metrics.and_then(|metrics| metrics.utilization),
        }
    }

    fn metrics(celsius: i16, milliwatts: u64, thousandths_of_percent: u32) -> GpuMetrics {
        GpuMetrics {
            temperature_c: Reported::Value(celsius),
            power: Reported::Value(Milliwatts(milliwatts)),
            utilization: Reported::Value(Percent(thousandths_of_percent)),
        }
    }

    #[test]
    fn every_version_has_its_own_offsets_and_units() {
        assert_eq!(parse(&table(1, 0, 80, &[(16, 51), (34, 212), (28, 97)])), metrics(51, 212_000, 97_000));
        for content in 1..=3 {
            assert_eq!(parse(&table(1, content, 120, &[(4, 48), (22, 49), (16, 25)])), metrics(48, 49_000, 25_000));
        }
        for content in 4..=8 {
            assert_eq!(parse(&table(1, content, 264, &[(4, 61), (10, 743), (12, 100)])), metrics(61, 743_000, 100_000));
        }
        assert_eq!(parse(&table(2, 0, 120, &[(16, 4250), (44, 15_000), (40, 5_050)])), metrics(43, 15_000, 50_500));
        for content in 1..=4 {
            let bytes = table(2, content, 152, &[(4, 2500), (40, 3401), (28, 79)]);
            assert_eq!(parse(&bytes), metrics(25, 3401, 790));
        }
        let bytes = table(3, 0, 264, &[(4, 6000), (112, 0x86a0), (114, 1), (42, 12)]);
        assert_eq!(parse(&bytes), metrics(60, 100_000, 12_000));
    }

    #[test]
    fn a_field_of_all_ones_in_any_half_is_absent() {
        let nothing = parse(&table(1, 3, 120, &[]));
        assert!(matches!(nothing.temperature_c, Reported::Unsupported(_)));
        assert!(matches!(nothing.power, Reported::Unsupported(_)));
        assert!(matches!(nothing.utilization, Reported::Unsupported(_)));
        let half = parse(&table(3, 0, 264, &[(112, 0xffff), (114, 0)]));
        assert!(matches!(half.power, Reported::Unsupported(_)));
    }

    #[test]
    fn an_empty_table_has_no_values() {
        let empty = parse(&[]);
        assert!(matches!(empty.power, Reported::Unsupported(_)));
        assert!(matches!(empty.utilization, Reported::Unsupported(_)));
    }

    #[test]
    fn without_an_edge_sensor_the_one_inside_counts() {
        assert_eq!(parse(&table(1, 3, 120, &[(6, 77)])).temperature_c, Reported::Value(77));
    }

    #[test]
    fn an_implausible_value_is_a_failure_and_the_rest_is_kept() {
        let metrics = parse(&table(1, 3, 120, &[(16, 655), (4, 50), (22, 9000)]));
        assert_eq!(metrics.utilization, Reported::Failed("implausible gpu_metrics: 655".into()));
        assert_eq!(metrics.temperature_c, Reported::Value(50));
        assert!(matches!(metrics.power, Reported::Failed(_)));
        assert!(matches!(parse(&table(2, 2, 128, &[(40, 15)])).power, Reported::Failed(_)));
    }

    #[test]
    fn a_table_is_read_up_to_its_size_and_only_in_a_known_version() {
        let good = table(1, 3, 120, &[(4, 48), (22, 49), (16, 25)]);
        let mut padded = good.clone();
        padded.resize(4096, 0);
        assert_eq!(parse(&padded), parse(&good));
        assert!(matches!(parse(&good[..60]).power, Reported::Failed(_)));
        assert!(matches!(parse(&[120]).power, Reported::Failed(_)));
        assert!(matches!(parse(&table(1, 3, 8, &[])).power, Reported::Failed(_)));
        assert!(matches!(parse(&table(9, 9, 120, &[])).power, Reported::Unsupported(_)));
        assert!(matches!(parse(&[0; 120]).power, Reported::Unsupported(_)));
    }

    proptest! {
        #[test]
        fn parsing_the_table_never_panics(format in 0_u8..4, content in 0_u8..10, mut bytes in prop::collection::vec(any::<u8>(), 0..300)) {
            let _ = parse(&bytes);
            let size = bytes.len() as u16;
            if let Some(header) = bytes.first_chunk_mut::<4>() {
                *header = [size as u8, (size >> 8) as u8, format, content];
            }
            let metrics = parse(&bytes);
            prop_assert!(metrics.utilization.value().is_none_or(|percent| *percent <= Percent::FULL));
        }
    }
}
