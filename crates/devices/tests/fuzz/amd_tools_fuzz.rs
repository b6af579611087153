//! Whatever AMD's tools print, cut off or with bytes changed, is read without a panic.

use gpupool_devices::capture::Format;
use proptest::prelude::*;

/// A little of both forms.
const SAMPLES: [&str; 2] = [
    r#"WARNING: x {"card0": {"GPU use (%)": "5", "VRAM Total Memory (B)": "34342961152", "PCI Bus": "0000:C1:00.0",
        "Unique ID": "0x719d230578348e8c", "Compute Partition": "CPX", "Average Graphics Package Power (W)": NaN},
        "system": {"PID77": "a, b, 1, 2, 3, 4", "(Topology) Hops between DRM devices 0 and 1": "1"}}"#,
    r#"$ amd-smi x --json [{"gpu": 0, "bdf": "0000:01:00.0", "partition_id": 1, "links": [{"gpu": 1, "link_type": "XGMI"}],
        "process_list": [{"process_info": {"pid": 7, "mem": {"value": 1, "unit": "GB"}}}]}, {"gpu": 1, ... },]"#,
];

/// Most devices any parser finds in a text that it may or may not know.
fn read_with_every_parser(text: &str) -> usize {
    let mut most = 0;
    for name in ["rocm-smi-json", "amd-smi-json"] {
        let format: Format = name.parse().unwrap();
        format.recognises(text);
        let Some(Ok(snapshot)) = format.parse(text) else { continue };
        assert_eq!(snapshot.identities().len(), snapshot.devices.len());
        assert!(snapshot.links.iter().all(|link| link.a < link.b && link.b < snapshot.devices.len()));
        most = most.max(snapshot.devices.len());
    }
    most
}

#[test]
fn every_sample_holds_devices_while_it_is_whole() {
    for sample in SAMPLES {
        assert!(read_with_every_parser(sample) > 0, "{sample}");
    }
}

proptest! {
    #[test]
    fn no_cut_and_no_changed_bytes_panic(text in crate::damaged(&SAMPLES)) {
        read_with_every_parser(&text);
    }

    #[test]
    fn no_text_of_the_right_words_panics(words in prop::collection::vec(
        prop::sample::select(&["GPU", "[0]", ": ", "\n", "  ", "{", "}", "[", "]", "\"card0\"", "\"gpu\"", ":", ",", "0", "GPU: 0\n",
            "TABLE:\n", "GPU0", "0000:01:00.0", "POWER", "Temp", "DID", "°C", "N/A", "...", "NaN", "|", "PID", "\t", "Agent 1\n", "\u{1b}["][..]),
        0..80,
    )) {
        read_with_every_parser(&words.concat());
    }
}
