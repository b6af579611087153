//! What `lstopo` prints, turned into the tree that hwloc's XML holds.

use crate::limits;
use crate::xml::Element;

/// Whether a text is what `lstopo` prints.
pub(super) fn looks_like(text: &str) -> bool {
    let first = text.lines().find(|line| !line.trim().is_empty()).unwrap_or_default();
    let machine = first
        .strip_prefix("Machine")
        .map(str::trim)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('(') || rest.starts_with("L#"));
    machine && text.contains(" L#")
}

/// The objects of a text, in a `<topology>` as the XML has it. Lines that are no objects are left out.
pub(super) fn tree(text: &str) -> Element {
    // The objects open at the moment with their indents; one that is indented less closes those before it.
    let mut open = vec![(0, Element { name: "topology".into(), ..Element::default() })];
    for line in text.lines() {
        let Some(object) = object(line.trim()) else { continue };
        let indent = line.len() - line.trim_start().len() + 1;
        while open.len() > 1 && open.last().is_some_and(|(other, _)| *other >= indent || open.len() > limits::XML_DEPTH)
        {
            close(&mut open);
        }
        open.push((indent, object));
    }
    while open.len() > 1 {
        close(&mut open);
    }
    open.pop().map(|(_, root)| root).unwrap_or_default()
}

fn close(open: &mut Vec<(usize, Element)>) {
    let done = open.pop();
    if let (Some((_, done)), Some((_, parent))) = (done, open.last_mut()) {
        parent.children.push(done);
    }
}

/// The object of one line: `NUMANode L#0 (P#0 63GB)`, `PCI 04:00.0 (3D)`, `GPU(NVML) L#1 (GPUModel="…") "nvml0"`.
fn object(line: &str) -> Option<Element> {
    let (kind, _) = line.split_once([' ', '(']).unwrap_or((line, ""));
    let subtype = line.strip_prefix(kind)?.strip_prefix('(').and_then(|rest| rest.split(')').next());
    let name = line.strip_suffix('"').and_then(|rest| rest.rsplit_once('"')).map(|(_, name)| name);
    let mut object = Element { name: "object".into(), ..Element::default() };
    let mut set = |key: &str, value: &str| object.attributes.push((key.into(), value.into()));
    match kind {
        "HostBridge" => {
            set("type", "Bridge");
            set("bridge_type", "0-1");
        }
        "PCIBridge" => {
            set("type", "Bridge");
            set("bridge_type", "1-1");
        }
        "PCI" | "PCIDev" => {
            set("type", "PCIDev");
            if let Some(busid) = field(line, "busid").or_else(|| line.split_whitespace().nth(1)) {
                set("pci_busid", busid);
            }
            set("pci_type", &pci_type(line));
        }
        "GPU" | "CoProc" | "Co-Processor" => set("type", "OSDev"),
        _ if line.contains(" L#") || kind == "Machine" => set("type", kind),
        _ => return None,
    }
    let number =
        line.split("P#").nth(1).map(|rest| rest.split(|c: char| !c.is_ascii_digit()).next().unwrap_or_default());
    for (key, value) in [("name", name), ("subtype", subtype), ("os_index", number)] {
        if let Some(value) = value {
            set(key, value);
        }
    }
    object.children = infos(line);
    Some(object)
}

/// Class and vendor as the XML writes them, as far as the line tells.
fn pci_type(line: &str) -> String {
    let short = line.rsplit_once('(').map(|(_, rest)| rest.trim_end_matches(')'));
    let class = field(line, "class").and_then(|class| class.get(..4)).or(match short {
        Some("3D") => Some("0302"),
        Some("VGA") => Some("0300"),
        Some("Display") => Some("0380"),
        Some(other) if other.starts_with("Process") => Some("1200"),
        _ => None,
    });
    let bare = line.split_whitespace().nth(1).filter(|word| word.len() == 9 && word.find(':') == Some(4));
    let ids = field(line, "id").or(bare).map(|ids| format!(" [{ids}]")).unwrap_or_default();
    format!("{}{ids}", class.unwrap_or_default())
}

/// The value of ` key=value` without quotes.
fn field<'a>(line: &'a str, key: &str) -> Option<&'a str> {
    let found = line.split([' ', '(']).find_map(|word| word.strip_prefix(key)?.strip_prefix('='))?;
    Some(found.trim_end_matches(')'))
}

/// Every `Key=value` and `Key="a value"` of a line.
fn infos(line: &str) -> Vec<Element> {
    let mut infos = Vec::new();
    let mut rest = line.split_once('(').map_or("", |(_, rest)| rest);
    while let Some((before, after)) = rest.split_once('=') {
        let key = before.rsplit([' ', '(']).next().unwrap_or_default();
        let (value, left) = match after.strip_prefix('"') {
            Some(quoted) => quoted.split_once('"').unwrap_or((quoted, "")),
            None => after.split_once([' ', ')']).unwrap_or((after, "")),
        };
        let attributes = vec![("name".into(), key.into()), ("value".into(), value.into())];
        infos.push(Element { name: "info".into(), attributes, ..Element::default() });
        rest = left;
    }
    infos
}
