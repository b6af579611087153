//! Truncated and changed output of vendor tools gives devices or an error.

use gpupool_devices::capture::CaptureFormat;
use proptest::prelude::*;
use proptest::sample::{Index, select};

/// One of the texts, truncated and with some bytes changed.
fn damaged(texts: &'static [&'static str]) -> impl Strategy<Value = String> {
    let changes = prop::collection::vec((any::<Index>(), any::<u8>()), 0..8);
    (select(texts), any::<Index>(), changes).prop_map(|(text, end, changes)| {
        let mut bytes = text.as_bytes().to_vec();
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        bytes.truncate(end.index(bytes.len() + 1));
        String::from_utf8_lossy(&bytes).into_owned()
    })
}

/// A sample of each format of `nvidia-smi`.
const NVIDIA: [&str; 4] = [
    include_str!("../fixtures/nvidia_smi/two_gpus.xml"),
    "GPU 0: A (UUID: GPU-a)\n  MIG 1g.5gb Device 0: (UUID: MIG-b)\nUnable to determine the device handle for GPU 0000:02:00.0: x\n",
    "index, uuid, name, memory.used [MiB]\n0, GPU-a, \"A, B\", 5 MiB\n1, GPU-b, [N/A], [GPU is lost]\n\
     Unable to determine the device handle for GPU2: 0000:41:00.0: Unknown Error\n",
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\nGPU0\t X \tNV4\tPIX\t0-7\t0\nGPU1\tNV4\t X \tSYS\t0-7\t1\n",
];

fn read_as_nvidia_smi(text: &str) {
    for format in CaptureFormat::all().filter(|format| format.name().starts_with("nvidia-smi")) {
        format.matches(text);
        let _ = format.parse(text).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_damaged_text_is_parsed_or_refused(text in damaged(&NVIDIA)) {
        read_as_nvidia_smi(&text);
    }

    #[test]
    fn any_text_is_parsed_or_refused(text in "\\PC{0,200}") {
        read_as_nvidia_smi(&text);
    }
}

/// A sample of both formats of AMD's tools.
const AMD: [&str; 2] = [
    r#"WARNING: x {"card0": {"GPU use (%)": "5", "VRAM Total Memory (B)": "34342961152", "PCI Bus": "0000:C1:00.0",
        "Unique ID": "0x719d230578348e8c", "Compute Partition": "CPX", "Average Graphics Package Power (W)": NaN},
        "system": {"PID77": "a, b, 1, 2, 3, 4", "(Topology) Hops between DRM devices 0 and 1": "1"}}"#,
    r#"$ amd-smi x --json [{"gpu": 0, "bdf": "0000:01:00.0", "partition_id": 1, "links": [{"gpu": 1, "link_type": "XGMI"}],
        "process_list": [{"process_info": {"pid": 7, "mem": {"value": 1, "unit": "GB"}}}]}, {"gpu": 1, ... },]"#,
];

/// Returns the largest number of devices that any parser finds in a text.
fn read_as_amd_tool(text: &str) -> usize {
    let mut most = 0;
    for name in ["rocm-smi-json", "amd-smi-json"] {
        let format: CaptureFormat = name.parse().unwrap();
        format.matches(text);
        let Some(Ok(snapshot)) = format.parse(text) else { continue };
        assert_eq!(snapshot.identities().len(), snapshot.devices.len());
        assert!(snapshot.links.iter().all(|link| link.a < link.b && link.b < snapshot.devices.len()));
        most = most.max(snapshot.devices.len());
    }
    most
}

#[test]
fn every_undamaged_sample_has_devices() {
    for sample in AMD {
        assert!(read_as_amd_tool(sample) > 0, "{sample}");
    }
}

proptest! {
    #[test]
    fn truncated_and_changed_samples_do_not_panic(text in damaged(&AMD)) {
        read_as_amd_tool(&text);
    }

    #[test]
    fn random_sequences_of_keywords_do_not_panic(words in prop::collection::vec(
        prop::sample::select(&["GPU", "[0]", ": ", "\n", "  ", "{", "}", "[", "]", "\"card0\"", "\"gpu\"", ":", ",", "0", "GPU: 0\n",
            "TABLE:\n", "GPU0", "0000:01:00.0", "POWER", "Temp", "DID", "°C", "N/A", "...", "NaN", "|", "PID", "\t", "Agent 1\n", "\u{1b}["][..]),
        0..80,
    )) {
        read_as_amd_tool(&words.concat());
    }
}
