//! `nvidia-smi -q`: the tree as indented text, whole or in parts (`-d MEMORY`).
//!
//! Its keys are those of the XML in other words, so they are spelled as tags here: `Product Name` is `product_name`.

use super::{errors, log, processes, tree};
use crate::address;
use crate::limits;
use crate::snapshot::Snapshot;
use crate::source::SourceError;
use crate::xml::Element;

/// What people call this form.
pub(super) const NAME: &str = "nvidia-smi -q";

/// Whether a text is such an answer.
pub fn looks_like(text: &str) -> bool {
    let has_head = text.lines().any(is_head);
    has_head || text.lines().any(|line| gpu_address(line).is_some())
}

/// The devices of an answer; of several in a row (`-l`), the first.
pub fn parse(text: &str) -> Result<Snapshot, SourceError> {
    errors::around(text, |text| {
        let root = tree_of(text);
        if root.children.is_empty() {
            return Err(SourceError::malformed(NAME, "it holds neither a head nor a GPU"));
        }
        Ok(log::snapshot(&root, cut(&root)))
    })
}

/// Why the answer ends early, where it does: all that is told of a GPU ends with its processes.
fn cut(root: &Element) -> Option<&'static str> {
    let last = root.children("gpu").last()?;
    let has = |name: &&str| last.child(name).is_some();
    let is_whole = !has(&"product_name") || processes::LISTS.iter().any(has);
    (!is_whole).then_some("the last GPU has no list of processes")
}

fn is_head(line: &str) -> bool {
    line.contains("==NVSMI LOG==")
}

/// The address in the line that begins a GPU: `GPU 00000000:53:00.0`.
fn gpu_address(line: &str) -> Option<&str> {
    let address = line.trim().strip_prefix("GPU ")?.trim();
    address::parse(address).map(|_| address)
}

/// An element that is still open, and how far its line was indented.
struct Open {
    indent: usize,
    element: Element,
}

fn tree_of(text: &str) -> Element {
    let mut open = vec![Open { indent: 0, element: tree::leaf("nvidia_smi_log", "") }];
    let mut heads = 0;
    for line in text.lines() {
        if is_head(line) {
            heads += 1;
        }
        if heads > 1 {
            break;
        }
        if let Some(address) = gpu_address(line) {
            close(&mut open, 1);
            let mut gpu = tree::leaf("gpu", "");
            gpu.attributes.push(("id".into(), address.into()));
            open.push(Open { indent: indent(line), element: gpu });
        } else if let Some(element) = line_element(line) {
            let indent = indent(line);
            let depth = open.iter().skip(1).take_while(|outer| outer.indent < indent).count() + 1;
            close(&mut open, depth.min(limits::XML_DEPTH));
            open.push(Open { indent, element });
        }
    }
    close(&mut open, 1);
    let mut root = open.pop().map(|root| root.element).unwrap_or_default();
    for gpu in root.children.iter_mut().filter(|child| child.name == "gpu") {
        gather_processes(gpu);
    }
    root
}

/// Hangs open elements into those around them until only `depth` are open.
fn close(open: &mut Vec<Open>, depth: usize) {
    while open.len() > depth.max(1) {
        let Some(done) = open.pop() else { return };
        if let Some(outer) = open.last_mut() {
            outer.element.children.push(done.element);
        }
    }
}

fn indent(line: &str) -> usize {
    line.chars().take_while(|c| c.is_whitespace()).map(|c| if c == '\t' { 8 } else { 1 }).sum()
}

/// A line as an element: `key : value`, or only a key.
fn line_element(line: &str) -> Option<Element> {
    let line = line.trim();
    if line.is_empty() || is_head(line) {
        return None;
    }
    let (key, value) = line.split_once(" :").unwrap_or((line, ""));
    let tag = tag(key);
    (!tag.is_empty()).then(|| tree::leaf(&tag, value.trim()))
}

fn tag(key: &str) -> String {
    let words = key.split(|c: char| !c.is_ascii_alphanumeric()).filter(|word| !word.is_empty());
    words.map(str::to_ascii_lowercase).collect::<Vec<_>>().join("_")
}

/// Makes one element of each process. In the text the numbers of its instances stand before that of the process, and
/// the rest hangs below it.
fn gather_processes(gpu: &mut Element) {
    let is_list = |child: &&mut Element| processes::LISTS.contains(&child.name.as_str());
    let Some(processes) = gpu.children.iter_mut().find(is_list) else { return };
    let mut instance = Vec::new();
    let mut gathered = Vec::new();
    for child in std::mem::take(&mut processes.children) {
        if child.name != "process_id" {
            instance.push(child);
            continue;
        }
        let mut info = tree::leaf("process_info", "");
        info.children.append(&mut instance);
        info.children.push(tree::leaf("pid", child.text));
        for detail in child.children {
            let name = match detail.name.as_str() {
                "name" => "process_name",
                "used_gpu_memory" => "used_memory",
                other => other,
            };
            info.children.push(tree::leaf(name, detail.text));
        }
        gathered.push(info);
    }
    processes.children = gathered;
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::found::{Doing, Partition, Watts};
    use crate::told::Told;
    use gpupool_core::device::Health;
    use gpupool_core::units::{Bytes, Percent};

    const WHOLE: &str = include_str!("../../tests/fixtures/nvidia_smi/mig.query.txt");

    #[test]
    fn the_text_tells_what_the_xml_tells() {
        let snapshot = parse(WHOLE).unwrap();
        assert_eq!(snapshot.warnings, Vec::<String>::new());
        let [parent, instance, other] = &snapshot.devices[..] else { panic!("{snapshot:?}") };
        assert_eq!(parent.name.as_deref(), Some("NVIDIA A100-SXM4-40GB"));
        assert_eq!(parent.uuid.as_deref(), Some("GPU-cccccccc-0000-1111-2222-333333333333"));
        assert_eq!(parent.pci.unwrap().to_string(), "000f:01:00.0");
        assert_eq!((parent.minor, parent.mig), (Some(3), Some(true)));
        assert_eq!(parent.driver.as_deref(), Some("555.42.02"));
        assert_eq!(parent.memory.total, Told::Value(Bytes(40960 << 20)));
        assert_eq!(parent.memory.used, Told::Value(Bytes(100 << 20)));
        assert_eq!(parent.utilization, Told::Unsupported("N/A".into()));
        assert_eq!(parent.temperature_c, Told::Value(31));
        assert_eq!(parent.power, Told::Value(Watts(55_500)));
        assert_eq!(parent.power_limit, Told::Value(Watts(400_000)));
        assert_eq!(parent.health, Some(Health::Healthy));
        assert_eq!(instance.memory.total, Told::Value(Bytes(4864 << 20)));
        assert!(matches!(instance.partition, Some(Partition::Mig { gpu_instance: Some(7), .. })));
        let processes = instance.processes.value().unwrap();
        assert_eq!((processes[0].pid, processes[0].doing), (5001, Doing::Compute));
        assert_eq!(processes[0].name.as_deref(), Some("C:\\tools : x\\train"));
        assert_eq!(processes[0].memory, Told::Value(Bytes(80 << 20)));
        assert!(matches!(processes[1].memory, Told::Unsupported(_)));
        assert_eq!(parent.processes.value().map(Vec::len), Some(2));
        assert_eq!(other.utilization, Told::Value(Percent(3_000)));
        assert_eq!(other.processes, Told::Value(Vec::new()));
        assert_eq!(other.index, Some(1));
    }

    #[test]
    fn a_part_of_the_answer_is_an_answer() {
        let page = |pending: &str| {
            format!(
                "\n==============NVSMI LOG==============\n\nDriver Version  : 535.86.10\n\nAttached GPUs  : 1\n\
                 GPU 00000001:00:00.0\n    Retired Pages\n        Pending Page Blacklist : {pending}\n"
            )
        };
        let well = parse(&page("No")).unwrap();
        assert_eq!(well.devices[0].pci.unwrap().domain, 1);
        assert_eq!(well.devices[0].health, Some(Health::Healthy));
        assert!(well.devices[0].memory.total.is_absent());
        assert!(matches!(parse(&page("Yes")).unwrap().devices[0].health, Some(Health::Unhealthy(_))));
    }

    #[test]
    fn a_text_that_is_cut_off_keeps_the_devices_it_holds() {
        let cut = WHOLE.find("GPU 00000000:02").unwrap();
        let snapshot = parse(&WHOLE[..cut]).unwrap();
        assert_eq!(snapshot.devices.len(), 2);
        assert!(snapshot.warnings[0].contains("2 GPUs are attached and 1"), "{:?}", snapshot.warnings);
    }

    #[test]
    fn of_answers_in_a_row_the_first_is_read() {
        assert_eq!(parse(&format!("{WHOLE}\n{WHOLE}")).unwrap(), parse(WHOLE).unwrap());
    }

    #[test]
    fn a_text_without_head_and_gpu_is_refused() {
        assert!(!looks_like("GPU 0: Tesla"));
        assert_eq!(parse("").unwrap_err().code(), "malformed");
    }
}
