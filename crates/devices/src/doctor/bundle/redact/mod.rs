//! Replaces what should not leave a machine, the same thing by the same replacement in every file.

mod names;
mod secrets;

use std::collections::BTreeMap;

use serde::Serialize;

use super::pile::Entry;
use names::ProcessNames;
use secrets::Secrets;

/// What is replaced in a bundle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Redact {
    /// Serial numbers, names of processes, names of hosts.
    pub identities: bool,
    /// UUIDs and unique ids of devices.
    pub uuids: bool,
}

impl Default for Redact {
    /// UUIDs are kept: reports are about which device is which, and a UUID says nothing of its owner.
    fn default() -> Self {
        Self { identities: true, uuids: false }
    }
}

/// Replaces in all files what is to be replaced. Files that are no text are left alone.
pub(super) fn redact(files: &mut BTreeMap<String, Entry>, host: Option<&str>, wanted: Redact) {
    let mut secrets = Secrets::default();
    for (name, text) in files.iter().filter_map(|(name, entry)| Some((name, text(entry)?))) {
        if wanted.identities {
            secrets.learn_serials(text);
        }
        if wanted.uuids {
            secrets.learn_uuids(name, text);
        }
    }
    if let Some(host) = host.filter(|_| wanted.identities) {
        secrets.learn_host(host);
    }
    let mut names = ProcessNames::default();
    for (name, entry) in files.iter_mut() {
        let Some(text) = text(entry) else { continue };
        let mut redacted = secrets.replace(text);
        if wanted.identities {
            redacted = names.replace(&redacted);
            if name.ends_with("version") {
                redacted = secrets::without_builder(&redacted);
            }
        }
        entry.bytes = redacted.into_bytes();
    }
}

fn text(entry: &Entry) -> Option<&str> {
    std::str::from_utf8(&entry.bytes).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn redacted(files: &[(&str, &str)], wanted: Redact) -> Vec<String> {
        let entry = |text: &str| Entry { source: String::new(), bytes: text.as_bytes().to_vec() };
        // The names are made sortable, so that the answer is in the order of the question.
        let numbered = files.iter().enumerate();
        let mut entries: BTreeMap<String, Entry> =
            numbered.map(|(number, (name, text))| (format!("{number}/{name}"), entry(text))).collect();
        redact(&mut entries, Some("node-seven"), wanted);
        entries.values().map(|entry| text(entry).unwrap().to_owned()).collect()
    }

    const ALL: Redact = Redact { identities: true, uuids: true };

    #[test]
    fn a_serial_number_is_the_same_fake_in_every_format() {
        let files = [
            ("a.xml", "<serial>1650522004111</serial><board_part_number>900-2</board_part_number>"),
            ("b.json", r#"{"card0": {"Serial Number": "1650522004111", "Card SKU": "D163"}}"#),
            ("c.txt", "    Serial Number             : 1650522004111\n    Minor Number : 0\n"),
            ("d.json", r#"{"asic_serial": "0x3f7a8c", "product_serial": "PCB-77", "serial": null, "x": "N/A"}"#),
        ];
        let seen = redacted(&files, Redact::default());
        assert_eq!(seen[0], "<serial>serial-1</serial><board_part_number>900-2</board_part_number>");
        assert_eq!(seen[1], r#"{"card0": {"Serial Number": "serial-1", "Card SKU": "D163"}}"#);
        assert_eq!(seen[2], "    Serial Number             : serial-1\n    Minor Number : 0\n");
        assert_eq!(seen[3], r#"{"asic_serial": "0x3f7a8c", "product_serial": "serial-2", "serial": null, "x": "N/A"}"#);
    }

    #[test]
    fn uuids_are_kept_unless_asked() {
        let list = "GPU 0: X (UUID: GPU-6ee2b5b2-1d5a-4a7e-9b3f-0123456789ab)\n";
        assert_eq!(redacted(&[("L", list)], Redact::default()), [list]);
        let xml = "<uuid>GPU-6EE2B5B2-1d5a-4a7e-9b3f-0123456789ab</uuid> <uuid>MIG-aaaaaaaa-1d5a-4a7e-9b3f-0123456789ab</uuid>";
        let seen = redacted(&[("L", list), ("x", xml)], ALL);
        assert_eq!(seen[0], "GPU 0: X (UUID: GPU-00000000-0000-4000-8000-000000000001)\n");
        assert!(seen[1].starts_with("<uuid>GPU-00000000-0000-4000-8000-000000000001</uuid>"), "{}", seen[1]);
        assert!(seen[1].ends_with("<uuid>MIG-00000000-0000-4000-8000-000000000002</uuid>"), "{}", seen[1]);
    }

    #[test]
    fn an_amd_id_is_the_same_fake_in_every_notation() {
        let files = [
            ("sys/class/drm/card0/device/unique_id", "3f7a8c0d11223344\n"),
            ("sys/class/kfd/kfd/topology/nodes/1/properties", "simd_count 416\nunique_id 4574122359298077508\n"),
            ("r.json", r#"{"card0": {"Unique ID": "0x3f7a8c0d11223344"}}"#),
            ("s.json", r#"{"asic_serial": "0x3F7A8C0D11223344"}"#),
        ];
        assert_eq!(0x3f7a_8c0d_1122_3344_u64, 4_574_122_359_298_077_508);
        let fake = 0xfa00_0000_0000_0001_u64;
        let seen = redacted(&files, ALL);
        assert_eq!(seen[0], format!("{fake:x}\n"));
        assert_eq!(seen[1], format!("simd_count 416\nunique_id {fake}\n"));
        assert_eq!(seen[2], format!(r#"{{"card0": {{"Unique ID": "0x{fake:x}"}}}}"#));
        assert_eq!(seen[3], format!(r#"{{"asic_serial": "0x{fake:x}"}}"#));
    }

    #[test]
    fn names_of_processes_are_replaced_where_they_stand_and_nowhere_else() {
        let table = "\
| Processes:                                                      |
|  GPU   GI   CI        PID   Type   Process name      GPU Memory |
|=================================================================|
|    0   N/A  N/A      1203      G   /usr/lib/xorg/Xorg     35MiB |
|    0   N/A  N/A     99203    C+G   x                      35MiB |
|  No running processes found                                     |
";
        let files = [
            ("q.xml", "<process_info><process_name>/home/ada/my job</process_name></process_info><a>my job</a>"),
            ("t.txt", table),
            ("r.json", r#"{"system": {"PID12": "/home/ada/my job, 1, 0, 0, 0", "PIDs": "x"}}"#),
            ("n.xml", "<process_name>[N/A]</process_name>"),
            ("o.xml", "<process_name>sh -c \"secret\"</process_name>"),
        ];
        let seen = redacted(&files, Redact::default());
        assert_eq!(seen[0], "<process_info><process_name>process-1</process_name></process_info><a>my job</a>");
        let expected =
            table.replace("/usr/lib/xorg/Xorg", "process-2         ").replace("C+G   x        ", "C+G   process-3");
        assert_eq!(seen[1], expected);
        assert_eq!(seen[2], r#"{"system": {"PID12": "process-1, 1, 0, 0, 0", "PIDs": "x"}}"#);
        assert_eq!(seen[3], "<process_name>[N/A]</process_name>");
        assert_eq!(seen[4], "<process_name>process-4</process_name>");
    }

    #[test]
    fn the_host_is_not_named() {
        let files = [
            ("findings.json", "on node-seven.example, not node-seventeen"),
            ("proc/version", "Linux 6.8 (ada@build) #1"),
        ];
        let seen = redacted(&files, Redact::default());
        assert_eq!(seen, ["on host.example, not node-seventeen", "Linux 6.8 (builder@host) #1"]);
    }

    #[test]
    fn nothing_is_replaced_where_nothing_should_be() {
        let files = [("a", "<serial>1650522004111</serial> node-seven <process_name>x</process_name>")];
        let kept = redacted(&files, Redact { identities: false, uuids: false });
        assert_eq!(kept, [files[0].1]);
    }

    proptest::proptest! {
        #[test]
        fn no_text_makes_it_panic(start in ".{0,40}", key in "(serial|Serial Number|unique_id|asic_serial|<process_name>|\"PID1\": \"| C |UUID)", end in "[ :\">0-9a-f\\-é|]{0,60}") {
            let text = format!("Process name\n|{start}{key}{end}");
            redacted(&[("x/unique_id", &text), ("x/topology/p", &text), ("proc/version", &text)], ALL);
        }
    }
}
