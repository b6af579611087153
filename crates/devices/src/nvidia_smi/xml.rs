//! `nvidia-smi -q -x`: the tree as XML, in all versions of its document type.

use quick_xml::Reader;
use quick_xml::events::{BytesStart, Event};

use crate::limits;
use crate::nvidia_smi::{errors, gpu};
use crate::source::SourceError;
use crate::source_reading::SourceReading;

/// Name of this format in messages.
pub(super) const NAME: &str = "nvidia-smi -q -x";

const ROOT: &str = "nvidia_smi_log";

/// Whether a text is such a document.
pub(crate) fn looks_like(text: &str) -> bool {
    text.contains("<nvidia_smi_log")
}

/// Returns the devices of a document; a truncated document keeps everything before the cut.
pub(crate) fn parse(text: &str) -> Result<SourceReading, SourceError> {
    errors::parse_with_messages(text, |text| {
        // Warnings of the tool may precede the document.
        let start = text.find("<?xml").or_else(|| text.find("<nvidia_smi_log")).unwrap_or(0);
        let text = text.get(start..).unwrap_or_default();
        let mut document = parse_document(text);
        if document.root.name != ROOT {
            let found = if document.root.name.is_empty() { "no XML" } else { &document.root.name };
            return Err(SourceError::malformed(NAME, format!("expected <{ROOT}>, found {found}")));
        }
        if document.parse_error.is_some() && ends_inside_text(text) {
            last_leaf(&mut document.root).text.clear();
        }
        Ok(gpu::reading_from_tree(&document.root, document.parse_error.as_deref()))
    })
}

/// Whether the last text may be truncated: `8192` of `81920 MiB`.
fn ends_inside_text(text: &str) -> bool {
    let end = text.rfind(['<', '>']).and_then(|at| text.get(at..)).unwrap_or_default();
    end.strip_prefix('>').is_some_and(|rest| !rest.trim().is_empty())
}

fn last_leaf(root: &mut XmlElement) -> &mut XmlElement {
    let mut element = root;
    while !element.children.is_empty() {
        let last = element.children.len() - 1;
        element = &mut element.children[last];
    }
    element
}

// XML as a small tree; a truncated document keeps everything before the cut.

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct XmlElement {
    /// Tag of the element.
    pub name: String,
    pub attributes: Vec<(String, String)>,
    /// Own text, trimmed.
    pub text: String,
    pub children: Vec<XmlElement>,
}

impl XmlElement {
    /// Returns the first child with this tag.
    pub(crate) fn child(&self, name: &str) -> Option<&Self> {
        self.children.iter().find(|child| child.name == name)
    }

    /// Returns all children with this tag.
    pub(crate) fn children<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Self> {
        self.children.iter().filter(move |child| child.name == name)
    }

    /// Returns the text of the first child with this tag, if not empty.
    pub(crate) fn text_of(&self, name: &str) -> Option<&str> {
        self.child(name).map(|child| child.text.as_str()).filter(|text| !text.is_empty())
    }

    /// Returns the value of an attribute.
    pub(crate) fn attribute(&self, name: &str) -> Option<&str> {
        self.attributes.iter().find(|(key, _)| key == name).map(|(_, value)| value.as_str())
    }

    /// Iterates over this element and its descendants, depth first.
    pub(crate) fn walk(&self) -> impl Iterator<Item = &Self> {
        let mut open = vec![self];
        std::iter::from_fn(move || {
            let element = open.pop()?;
            open.extend(element.children.iter().rev());
            Some(element)
        })
    }
}

/// An XML document with its first root element.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct XmlDocument {
    /// Root element; empty if there is none.
    pub root: XmlElement,
    /// Reason why the document could not be read to its end.
    pub parse_error: Option<String>,
}

/// Parses as much of a document as possible.
pub(crate) fn parse_document(text: &str) -> XmlDocument {
    let mut reader = Reader::from_str(text);
    reader.config_mut().check_end_names = false;
    let mut document = XmlDocument::default();
    // Open elements, with the parent of the root first; closing an element adds it to its parent.
    let mut open = vec![XmlElement::default()];
    loop {
        let at = reader.buffer_position();
        match reader.read_event() {
            Ok(Event::Start(start)) if open.len() <= limits::XML_DEPTH => open.push(parse_element(&start)),
            Ok(Event::Start(_)) => {
                document.parse_error = Some(format!("more than {} nested elements", limits::XML_DEPTH));
                break;
            }
            Ok(Event::Empty(start)) => close_element(&mut open, parse_element(&start)),
            Ok(Event::End(_)) if open.len() > 1 => {
                let element = open.pop().unwrap_or_default();
                close_element(&mut open, element);
            }
            Ok(Event::End(_)) => {}
            Ok(Event::Text(text)) => add_text(&mut open, &text.decode().unwrap_or_default()),
            Ok(Event::CData(data)) => add_text(&mut open, &String::from_utf8_lossy(&data)),
            Ok(Event::GeneralRef(name)) => {
                let known = quick_xml::escape::resolve_predefined_entity(&name.decode().unwrap_or_default());
                add_text(&mut open, known.unwrap_or_default());
            }
            Ok(Event::Eof) => break,
            Ok(Event::Comment(_) | Event::Decl(_) | Event::DocType(_) | Event::PI(_)) => {}
            Err(error) => {
                document.parse_error = Some(format!("byte {at}: {error}"));
                break;
            }
        }
    }
    if open.len() > 1 && document.parse_error.is_none() {
        document.parse_error = Some(format!("truncated inside <{}>", open.last().map_or("", |last| &last.name)));
    }
    while open.len() > 1 {
        let element = open.pop().unwrap_or_default();
        close_element(&mut open, element);
    }
    document.root = open.pop().and_then(|holder| holder.children.into_iter().next()).unwrap_or_default();
    document
}

fn parse_element(start: &BytesStart<'_>) -> XmlElement {
    let attribute = |found: quick_xml::events::attributes::Attribute<'_>| {
        let key = String::from_utf8_lossy(found.key.as_ref()).into_owned();
        let raw = String::from_utf8_lossy(&found.value);
        let value = quick_xml::escape::unescape(&raw).map_or_else(|_| raw.to_string(), |plain| plain.into_owned());
        (key, value)
    };
    XmlElement {
        name: String::from_utf8_lossy(start.name().as_ref()).into_owned(),
        attributes: start.attributes().with_checks(false).filter_map(Result::ok).map(attribute).collect(),
        ..XmlElement::default()
    }
}

fn close_element(open: &mut [XmlElement], mut element: XmlElement) {
    element.text = element.text.trim().to_owned();
    if let Some(parent) = open.last_mut() {
        parent.children.push(element);
    }
}

fn add_text(open: &mut [XmlElement], text: &str) {
    if let Some(element) = open.last_mut() {
        element.text.push_str(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use gpupool_core::{Bytes, DeviceHealth, Percent};

    use crate::detected_device::{DevicePartition, Milliwatts, ProcessActivity, UsedMemoryScope};
    use crate::reported::Reported;

    const WHOLE: &str = include_str!("../../tests/fixtures/nvidia_smi/two_gpus.xml");

    fn gpu(inside: &str) -> SourceReading {
        parse(&format!("<nvidia_smi_log><gpu id=\"00000000:01:00.0\">{inside}</gpu></nvidia_smi_log>")).unwrap()
    }

    fn health(inside: &str) -> Option<DeviceHealth> {
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
        assert_eq!(device.memory.total, Reported::Value(Bytes(24564 << 20)));
        assert_eq!(device.memory.reserved, Reported::Value(Bytes(371 << 20)));
        assert_eq!(device.memory.used, Reported::Value(Bytes(1234 << 20)));
        assert_eq!(device.memory.used_means, UsedMemoryScope::WithoutReserved);
        assert_eq!(device.utilization, Reported::Value(Percent(97_000)));
        assert_eq!(device.temperature_c, Reported::Value(61));
        assert_eq!(device.power, Reported::Value(Milliwatts(301_250)));
        assert_eq!(device.power_limit, Reported::Value(Milliwatts(450_000)));
        assert_eq!(device.mig, None);
        assert_eq!(device.health, Some(DeviceHealth::Healthy));
        let processes = device.processes.value().unwrap();
        assert_eq!(processes.iter().map(|process| process.pid).collect::<Vec<_>>(), [4242, 77]);
        assert_eq!(processes[0].activity, ProcessActivity::Compute);
        assert_eq!(processes[0].name.as_deref(), Some("python train & test.py"));
        assert_eq!(processes[0].memory, Reported::Value(Bytes(1200 << 20)));
        assert!(matches!(processes[1].memory, Reported::Unsupported(_)));
        assert_eq!(snapshot.devices[0].processes, Reported::Value(Vec::new()));
    }

    #[test]
    fn power_is_found_in_the_output_of_any_version() {
        let power = |inside: &str| {
            let device = gpu(inside).devices.remove(0);
            (device.power.value().copied(), device.power_limit.value().copied())
        };
        let old = "<power_readings><power_draw>20 W</power_draw><power_limit>100 W</power_limit>\
                   <enforced_power_limit>90 W</enforced_power_limit></power_readings>";
        assert_eq!(power(old), (Some(Milliwatts(20_000)), Some(Milliwatts(90_000))));
        let new = "<gpu_power_readings><average_power_draw>N/A</average_power_draw><instant_power_draw>9.23 W\
                   </instant_power_draw><current_power_limit>175.00 W</current_power_limit></gpu_power_readings>\
                   <module_power_readings><average_power_draw>500 W</average_power_draw></module_power_readings>";
        assert_eq!(power(new), (Some(Milliwatts(9_230)), Some(Milliwatts(175_000))));
    }

    #[test]
    fn a_gpu_in_mig_mode_is_followed_by_its_instances() {
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
        assert_eq!(parent.utilization, Reported::Unsupported("N/A".into()));
        assert_eq!(first.memory.total, Reported::Value(Bytes(19968 << 20)));
        assert_eq!((first.pci, first.mig), (parent.pci, Some(true)));
        assert_eq!(first.utilization.value(), None);
        assert_eq!(first.processes, Reported::Value(Vec::new()));
        assert_eq!(second.processes.value().map(Vec::len), Some(1));
        let Some(DevicePartition::Mig { parent_uuid, gpu_instance, compute_instance, .. }) = &second.partition else {
            panic!("{second:?}")
        };
        assert_eq!((parent_uuid.as_deref(), *gpu_instance, *compute_instance), (Some("GPU-a"), Some(9), None));
    }

    #[test]
    fn a_gpu_that_needs_a_reset_or_replacement_is_unhealthy() {
        let reason = |inside: &str| match health(inside) {
            Some(DeviceHealth::Unhealthy(reason)) => reason.to_string(),
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
        assert_eq!(health(&rows("No", "No")), Some(DeviceHealth::Healthy));
        assert_eq!(health("<temperature><gpu_temp>GPU is lost</gpu_temp></temperature>"), Some(DeviceHealth::Lost));
        assert_eq!(health("<product_brand>Tesla</product_brand>"), None);
    }

    #[test]
    fn unsupported_memory_of_a_gpu_is_unified() {
        for words in ["N/A", "Not Supported"] {
            let snapshot =
                gpu(&format!("<fb_memory_usage><total>{words}</total><used>{words}</used></fb_memory_usage>"));
            assert!(snapshot.devices[0].memory.unified);
            assert_eq!(snapshot.devices[0].memory.total, Reported::Unsupported(words.into()));
        }
        assert!(!gpu("<product_name>GeForce GT 730</product_name>").devices[0].memory.unified);
        let denied = gpu("<fb_memory_usage><total>Insufficient Permissions</total></fb_memory_usage>");
        assert!(!denied.devices[0].memory.unified);
        assert!(matches!(denied.devices[0].memory.total, Reported::Failed(_)));
    }

    #[test]
    fn the_scope_of_used_memory_follows_the_driver_version() {
        let means = |driver: &str| {
            let text = format!(
                "<nvidia_smi_log><driver_version>{driver}</driver_version><gpu id=\"\"><fb_memory_usage>\
                 <used>1 MiB</used></fb_memory_usage></gpu></nvidia_smi_log>"
            );
            parse(&text).unwrap().devices[0].memory.used_means
        };
        assert_eq!(means("470.82"), UsedMemoryScope::WithReserved);
        assert_eq!(means("535.1"), UsedMemoryScope::WithoutReserved);
        assert_eq!(means("N/A"), UsedMemoryScope::Unknown);
    }

    #[test]
    fn a_truncated_document_keeps_complete_values_only() {
        let cut = WHOLE.find("24564 MiB").unwrap() + 2;
        let snapshot = parse(&WHOLE[..cut]).unwrap();
        assert_eq!(snapshot.devices.len(), 2);
        assert_eq!(snapshot.devices[1].uuid.as_deref(), Some("GPU-bbbbbbbb-0000-1111-2222-333333333333"));
        assert_eq!(snapshot.devices[1].memory.total, Reported::ABSENT);
        assert_eq!(snapshot.devices[1].index, Some(1));
        assert!(snapshot.warnings[0].contains("ends early"), "{:?}", snapshot.warnings);
    }

    #[test]
    fn text_around_a_document_is_ignored() {
        assert_eq!(parse(&format!("warning: old\n{WHOLE}\nConnection closed.")), parse(WHOLE));
    }

    #[test]
    fn a_device_listed_twice_is_reported_once() {
        let gpu = "<gpu id=\"00000000:01:00.0\"><uuid>GPU-a</uuid></gpu>";
        let snapshot = parse(&format!("<nvidia_smi_log>{gpu}{gpu}</nvidia_smi_log>")).unwrap();
        assert_eq!((snapshot.devices.len(), snapshot.warnings.len()), (1, 1));
    }

    #[test]
    fn fewer_devices_than_attached_are_a_warning_and_have_no_index() {
        let text = "<nvidia_smi_log><attached_gpus>2</attached_gpus><gpu id=\"\"><product_brand>Tesla</product_brand>\
                    </gpu></nvidia_smi_log>";
        let snapshot = parse(text).unwrap();
        assert_eq!(snapshot.devices[0].index, None);
        assert_eq!(snapshot.warnings.len(), 2, "{:?}", snapshot.warnings);
        assert!(snapshot.warnings[0].contains("2 GPUs are attached and 1"));
    }

    #[test]
    fn a_document_of_another_type_is_refused() {
        let refused = parse("<topology><cpu/></topology>").unwrap_err();
        assert_eq!(refused.code(), "malformed");
        assert!(refused.to_string().contains("topology"));
    }

    #[test]
    fn a_document_becomes_a_tree() {
        let document = parse_document(
            r#"<?xml version="1.0"?><!DOCTYPE log SYSTEM "x.dtd"><log a="1"><x>5 &amp; 6</x><y/></log>"#,
        );
        assert_eq!(document.parse_error, None);
        assert_eq!(document.root.attribute("a"), Some("1"));
        assert_eq!(document.root.text_of("x"), Some("5 & 6"));
        assert_eq!(document.root.walk().count(), 3);
    }

    #[test]
    fn a_truncated_document_keeps_the_elements_before_the_cut() {
        let document = parse_document("<log><gpu><name>A</name></gpu><gpu><name>B");
        assert_eq!(document.root.children("gpu").count(), 2);
        assert!(document.parse_error.is_some());
        assert_eq!(parse_document("no xml at all").root, XmlElement::default());
    }
}
