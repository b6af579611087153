//! Whatever happens to a text of `nvidia-smi` on its way, reading it ends with devices or an error.

use gpupool_devices::capture::Format;
use proptest::prelude::*;

const TEXTS: [&str; 4] = [
    include_str!("../fixtures/nvidia_smi/two_gpus.xml"),
    "GPU 0: A (UUID: GPU-a)\n  MIG 1g.5gb Device 0: (UUID: MIG-b)\nUnable to determine the device handle for GPU 0000:02:00.0: x\n",
    "index, uuid, name, memory.used [MiB]\n0, GPU-a, \"A, B\", 5 MiB\n1, GPU-b, [N/A], [GPU is lost]\n\
     Unable to determine the device handle for GPU2: 0000:41:00.0: Unknown Error\n",
    "\t\x1b[4mGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m\nGPU0\t X \tNV4\tPIX\t0-7\t0\nGPU1\tNV4\t X \tSYS\t0-7\t1\n",
];

fn read_by_everything(text: &str) {
    for format in Format::all().filter(|format| format.name().starts_with("nvidia-smi")) {
        format.recognises(text);
        let _ = format.parse(text).unwrap();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn a_damaged_text_is_read_or_refused(text in crate::damaged(&TEXTS)) {
        read_by_everything(&text);
    }

    #[test]
    fn any_text_is_read_or_refused(text in "\\PC{0,200}") {
        read_by_everything(&text);
    }
}
