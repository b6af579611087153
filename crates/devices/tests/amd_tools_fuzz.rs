//! Whatever AMD's tools print, cut off or with bytes changed, is read without a panic.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod amd_tools_forms;
mod common;

use amd_tools_forms::FORMS;
use proptest::prelude::*;

/// A little of every form there is.
const SAMPLES: [&str; 9] = [
    r#"WARNING: x {"card0": {"GPU use (%)": "5", "VRAM Total Memory (B)": "34342961152", "PCI Bus": "0000:C1:00.0",
        "Unique ID": "0x719d230578348e8c", "Compute Partition": "CPX", "Average Graphics Package Power (W)": NaN},
        "system": {"PID77": "a, b, 1, 2, 3, 4", "(Topology) Hops between DRM devices 0 and 1": "1"}}"#,
    "Device  [Model : Revision]    Temp        Power     Partitions      PwrCap  VRAM%  GPU%\n        Name (20 chars)       \
     (Junction)  (Socket)  (Mem, Compute)\n====\n0       [0x74a1 : 0x00]       40.0°C      102.0W    NPS1, SPX       \
     750.0W    0%   0%\n        AMD Instinct\n====\nGPU[0]\t\t: get_power_cap, Not supported\nPID 7 is using 1 DRM device(s):\n0\n",
    r#"$ amd-smi x --json [{"gpu": 0, "bdf": "0000:01:00.0", "partition_id": 1, "links": [{"gpu": 1, "link_type": "XGMI"}],
        "process_list": [{"process_info": {"pid": 7, "mem": {"value": 1, "unit": "GB"}}}]}, {"gpu": 1, ... },]"#,
    "GPU: 0\n    ASIC:\n        MARKET_NAME: MI300A\n    PROCESS_INFO:\n        PID: 7\nHOPS TABLE:\n      GPU0 GPU1\nGPU0  0 1\nGPU1  1 0\n\
     GPU  POWER  GPU_TEMP\n  0  248 W     55 °C\n",
    "LINK METRIC TABLE:\n  bdf  bit_rate max_bandwidth link_type 0000:0c:00.0 0000:22:00.0\nGPU0 0000:0c:00.0 32 Gb/s 512 Gb/s XGMI\n \
     Read   N/A   2 KB\n| AMD-SMI 26 amdgpu version: 6.1 |\n| 0000:05:00.0    MI300X | 0 %  41 °C  0  137/750 W |\n| 0 0 5 SPX/NPS1 | 7 %  N/A  286/196288 MB |\n\
     | Processes: |\n|  0  7  x  1 MB  2 MB |\n",
    "HSA Agents\n*******\nAgent 1\n*******\n  Uuid:   GPU-8d1457e2c20f59d2\n  Device Type:  GPU\n  BDFID:  9728\n  Pool Info:\n    Pool 1\n      \
     Segment:  GLOBAL; FLAGS: COARSE GRAINED\n      Size:  201310208(0xbffc000) KB\n  ISA Info:\n",
    r#"{"devices": [{"Info": {"PCI": "0000:13:00.0", "VRAM Size": 536870912}, "VRAM": {"Total VRAM": {"unit": "MiB", "value": 512}},
        "Sensors": {"Edge Temperature": {"unit": "C", "value": 43}}, "fdinfo": {"7": {"usage": {}}}}], "suspended_devices": [{}]}"#,
    "device,GPU use (%),VRAM Total Memory (B)\ncard0,12,21458059264\nsystem,1\n",
    "ME feature version: 35, firmware version: 0x00000094\n\u{1b}[3m\u{1b}[",
];

/// Most devices any parser finds in a text that it may or may not know.
fn read_with_every_parser(text: &str) -> usize {
    let mut most = 0;
    for (_, looks_like, parse) in FORMS {
        looks_like(text);
        let Ok(snapshot) = parse(text) else { continue };
        assert_eq!(snapshot.identities().len(), snapshot.devices.len());
        assert!(snapshot.links.iter().all(|link| link.a < link.b && link.b < snapshot.devices.len()));
        most = most.max(snapshot.devices.len());
    }
    most
}

#[test]
fn every_sample_holds_devices_while_it_is_whole() {
    for sample in &SAMPLES[..8] {
        assert!(read_with_every_parser(sample) > 0, "{sample}");
    }
}

proptest! {
    #[test]
    fn no_cut_and_no_changed_bytes_panic(text in common::damaged(&SAMPLES)) {
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
