//! `nvidia-smi -q -x`: the tree as XML, in all versions of its document type.

use super::{errors, log};
use crate::snapshot::Snapshot;
use crate::source::SourceError;
use crate::xml::{self, Element};

/// What people call this form.
pub(super) const NAME: &str = "nvidia-smi -q -x";

const ROOT: &str = "nvidia_smi_log";

/// Whether a text is such a document.
pub fn looks_like(text: &str) -> bool {
    text.contains("<nvidia_smi_log")
}

/// The devices of a document; one that is cut off keeps what came before the cut.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    errors::around(text, |text| {
        // Warnings of the tool may come before the document.
        let start = text.find("<?xml").or_else(|| text.find("<nvidia_smi_log")).unwrap_or(0);
        let text = text.get(start..).unwrap_or_default();
        let mut document = xml::parse(text);
        if document.root.name != ROOT {
            let found = if document.root.name.is_empty() { "no XML" } else { &document.root.name };
            return Err(SourceError::malformed(NAME, format!("it should hold <{ROOT}> and holds {found}")));
        }
        if document.broken.is_some() && is_cut_inside_a_text(text) {
            last_leaf(&mut document.root).text.clear();
        }
        Ok(log::snapshot(&document.root, document.broken.as_deref()))
    })
}

/// Whether the last text may be a part of what it should be: `8192` of `81920 MiB`.
fn is_cut_inside_a_text(text: &str) -> bool {
    let end = text.rfind(['<', '>']).and_then(|at| text.get(at..)).unwrap_or_default();
    end.strip_prefix('>').is_some_and(|rest| !rest.trim().is_empty())
}

fn last_leaf(root: &mut Element) -> &mut Element {
    let mut element = root;
    while !element.children.is_empty() {
        let last = element.children.len() - 1;
        element = &mut element.children[last];
    }
    element
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::found::{Doing, Partition, UsedMeans, Watts};
    use crate::told::Told;
    use gpupool_core::device::Health;
    use gpupool_core::units::{Bytes, Percent};

    const WHOLE: &str = include_str!("../../tests/fixtures/nvidia_smi/two_gpus.xml");

    fn gpu(inside: &str) -> Snapshot {
        parse(&format!("<nvidia_smi_log><gpu id=\"00000000:01:00.0\">{inside}</gpu></nvidia_smi_log>")).unwrap()
    }

    fn health(inside: &str) -> Option<Health> {
        gpu(inside).devices[0].health.clone()
    }

    #[test]
    fn every_field_of_a_document_is_read() {
        let snapshot = parse(WHOLE).unwrap();
        assert_eq!((snapshot.devices.len(), snapshot.warnings.len()), (2, 0));
        let device = &snapshot.devices[1];
        assert_eq!(device.index, Some(1));
        assert_eq!(device.minor, Some(5));
        assert_eq!(device.name.as_deref(), Some("Graphics Device"));
        assert_eq!(device.uuid.as_deref(), Some("GPU-bbbbbbbb-0000-1111-2222-333333333333"));
        assert_eq!(device.pci.unwrap().to_string(), "10000:e1:00.0");
        assert_eq!(device.driver.as_deref(), Some("535.104.05"));
        assert_eq!(device.memory.total, Told::Value(Bytes(24564 << 20)));
        assert_eq!(device.memory.reserved, Told::Value(Bytes(371 << 20)));
        assert_eq!(device.memory.used, Told::Value(Bytes(1234 << 20)));
        assert_eq!(device.memory.used_means, UsedMeans::WithoutReserved);
        assert_eq!(device.utilization, Told::Value(Percent(97_000)));
        assert_eq!(device.temperature_c, Told::Value(61));
        assert_eq!(device.power, Told::Value(Watts(301_250)));
        assert_eq!(device.power_limit, Told::Value(Watts(450_000)));
        assert_eq!(device.mig, None);
        assert_eq!(device.health, Some(Health::Healthy));
        let processes = device.processes.value().unwrap();
        assert_eq!(processes.iter().map(|process| process.pid).collect::<Vec<_>>(), [4242, 77]);
        assert_eq!(processes[0].doing, Doing::Compute);
        assert_eq!(processes[0].name.as_deref(), Some("python train & test.py"));
        assert_eq!(processes[0].memory, Told::Value(Bytes(1200 << 20)));
        assert!(matches!(processes[1].memory, Told::Unsupported(_)));
        assert_eq!(snapshot.devices[0].processes, Told::Value(Vec::new()));
    }

    #[test]
    fn the_power_of_any_version_is_found() {
        let power = |inside: &str| {
            let device = gpu(inside).devices.remove(0);
            (device.power.value().copied(), device.power_limit.value().copied())
        };
        let old = "<power_readings><power_draw>20 W</power_draw><power_limit>100 W</power_limit>\
                   <enforced_power_limit>90 W</enforced_power_limit></power_readings>";
        assert_eq!(power(old), (Some(Watts(20_000)), Some(Watts(90_000))));
        let new = "<gpu_power_readings><average_power_draw>N/A</average_power_draw><instant_power_draw>9.23 W\
                   </instant_power_draw><current_power_limit>175.00 W</current_power_limit></gpu_power_readings>\
                   <module_power_readings><average_power_draw>500 W</average_power_draw></module_power_readings>";
        assert_eq!(power(new), (Some(Watts(9_230)), Some(Watts(175_000))));
    }

    #[test]
    fn a_gpu_that_is_cut_is_followed_by_its_instances() {
        let snapshot = gpu("<product_name>NVIDIA A100</product_name><uuid>GPU-a</uuid>\
            <mig_mode><current_mig>Enabled</current_mig></mig_mode>\
            <mig_devices><mig_device><index>0</index><gpu_instance_id>3</gpu_instance_id>\
            <compute_instance_id>0</compute_instance_id><fb_memory_usage><total>19968 MiB</total>\
            <reserved>0 MiB</reserved><used>12 MiB</used></fb_memory_usage></mig_device>\
            <mig_device><index>2</index><gpu_instance_id>9</gpu_instance_id></mig_device></mig_devices>\
            <utilization><gpu_util>N/A</gpu_util></utilization>\
            <processes><process_info><gpu_instance_id>9</gpu_instance_id><pid>1</pid></process_info></processes>");
        let [parent, first, second] = &snapshot.devices[..] else { panic!("{snapshot:?}") };
        assert_eq!(parent.mig, Some(true));
        assert_eq!(parent.utilization, Told::Unsupported("N/A".into()));
        assert_eq!(first.memory.total, Told::Value(Bytes(19968 << 20)));
        assert_eq!((first.pci, first.mig), (parent.pci, Some(true)));
        assert_eq!(first.utilization.value(), None);
        assert_eq!(first.processes, Told::Value(Vec::new()));
        assert_eq!(second.processes.value().map(Vec::len), Some(1));
        let Some(Partition::Mig { parent_uuid, gpu_instance, compute_instance, .. }) = &second.partition else {
            panic!("{second:?}")
        };
        assert_eq!((parent_uuid.as_deref(), *gpu_instance, *compute_instance), (Some("GPU-a"), Some(9), None));
    }

    #[test]
    fn what_waits_for_a_reset_or_cannot_be_mended_is_unhealthy() {
        let reason = |inside: &str| match health(inside) {
            Some(Health::Unhealthy(reason)) => reason.to_string(),
            other => panic!("{other:?}"),
        };
        let rows = |pending, failure| {
            format!(
                "<remapped_rows><remapped_row_unc>3</remapped_row_unc><remapped_row_pending>{pending}\
                 </remapped_row_pending><remapped_row_failure>{failure}</remapped_row_failure></remapped_rows>"
            )
        };
        assert_eq!(reason(&rows("Yes", "Yes")), "row remapping failed; replace the GPU");
        assert!(reason(&rows("Yes", "No")).contains("reset"));
        assert!(reason("<retired_pages><pending_blacklist>Yes</pending_blacklist></retired_pages>").contains("reset"));
        assert!(reason("<gpu_reset_status><reset_required>Yes</reset_required></gpu_reset_status>").contains("reset"));
        assert!(reason("<temperature><gpu_temp>GPU requires reset</gpu_temp></temperature>").contains("reset"));
        assert!(reason("<gpu_recovery_action>Node Reboot</gpu_recovery_action>").contains("Node Reboot"));
        assert_eq!(health(&rows("No", "No")), Some(Health::Healthy));
        assert_eq!(health("<temperature><gpu_temp>GPU is lost</gpu_temp></temperature>"), Some(Health::Lost));
        assert_eq!(health("<product_brand>Tesla</product_brand>"), None);
    }

    #[test]
    fn memory_that_the_device_does_not_have_is_unified() {
        for words in ["N/A", "Not Supported"] {
            let snapshot =
                gpu(&format!("<fb_memory_usage><total>{words}</total><used>{words}</used></fb_memory_usage>"));
            assert!(snapshot.devices[0].memory.unified);
            assert_eq!(snapshot.devices[0].memory.total, Told::Unsupported(words.into()));
        }
        assert!(!gpu("<product_name>GeForce GT 730</product_name>").devices[0].memory.unified);
        let denied = gpu("<fb_memory_usage><total>Insufficient Permissions</total></fb_memory_usage>");
        assert!(!denied.devices[0].memory.unified);
        assert!(matches!(denied.devices[0].memory.total, Told::Failed(_)));
    }

    #[test]
    fn what_used_means_follows_the_driver() {
        let means = |driver: &str| {
            let text = format!(
                "<nvidia_smi_log><driver_version>{driver}</driver_version><gpu id=\"\"><fb_memory_usage>\
                 <used>1 MiB</used></fb_memory_usage></gpu></nvidia_smi_log>"
            );
            parse(&text).unwrap().devices[0].memory.used_means
        };
        assert_eq!(means("470.82"), UsedMeans::WithReserved);
        assert_eq!(means("535.1"), UsedMeans::WithoutReserved);
        assert_eq!(means("N/A"), UsedMeans::Unknown);
    }

    #[test]
    fn a_document_that_is_cut_off_keeps_what_came_before_and_no_part_of_a_value() {
        let cut = WHOLE.find("24564 MiB").unwrap() + 2;
        let snapshot = parse(&WHOLE[..cut]).unwrap();
        assert_eq!(snapshot.devices.len(), 2);
        assert_eq!(snapshot.devices[1].uuid.as_deref(), Some("GPU-bbbbbbbb-0000-1111-2222-333333333333"));
        assert_eq!(snapshot.devices[1].memory.total, Told::ABSENT);
        assert_eq!(snapshot.devices[1].index, Some(1));
        assert!(snapshot.warnings[0].contains("ends early"), "{:?}", snapshot.warnings);
    }

    #[test]
    fn what_stands_around_a_document_does_not_matter() {
        assert_eq!(parse(&format!("warning: old\n{WHOLE}\nConnection closed.")), parse(WHOLE));
    }

    #[test]
    fn a_device_that_is_listed_twice_is_one() {
        let gpu = "<gpu id=\"00000000:01:00.0\"><uuid>GPU-a</uuid></gpu>";
        let snapshot = parse(&format!("<nvidia_smi_log>{gpu}{gpu}</nvidia_smi_log>")).unwrap();
        assert_eq!((snapshot.devices.len(), snapshot.warnings.len()), (1, 1));
    }

    #[test]
    fn fewer_devices_than_attached_are_warned_of_and_not_numbered() {
        let text = "<nvidia_smi_log><attached_gpus>2</attached_gpus><gpu id=\"\"><product_brand>Tesla</product_brand>\
                    </gpu></nvidia_smi_log>";
        let snapshot = parse(text).unwrap();
        assert_eq!(snapshot.devices[0].index, None);
        assert_eq!(snapshot.warnings.len(), 2, "{:?}", snapshot.warnings);
        assert!(snapshot.warnings[0].contains("2 GPUs are attached and 1"));
    }

    #[test]
    fn another_document_is_refused() {
        let refused = parse("<topology><cpu/></topology>").unwrap_err();
        assert_eq!(refused.code(), "malformed");
        assert!(refused.to_string().contains("topology"));
    }
}
