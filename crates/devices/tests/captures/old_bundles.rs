//! Bundles of older versions, and files in formats of older versions.

use std::fs;
use std::path::{Path, PathBuf};

use flate2::Compression;
use flate2::write::GzEncoder;
use gpupool_devices::capture::{self, CaptureFormat};
use tempfile::TempDir;

use crate::capture_fixtures::own_captures;

/// Texts in formats that are no longer read.
const NO_LONGER_READ: &[(&str, &str)] = &[
    (
        "nvidia-smi.txt",
        "+-----------------------------------------------------------------------------+\n\
         | NVIDIA-SMI 535.54.03    Driver Version: 535.54.03    CUDA Version: 12.2     |\n\
         |-------------------------------+----------------------+----------------------+\n\
         |   0  NVIDIA A10          On   | 00000000:1A:00.0 Off |                    0 |\n\
         |  0%   40C    P0    60W / 150W |      3MiB / 23028MiB |      0%      Default |\n\
         +-------------------------------+----------------------+----------------------+\n\
         |    0   N/A  N/A      1203      C   python3                        35MiB     |\n",
    ),
    (
        "nvidia-smi-query.txt",
        "==============NVSMI LOG==============\n\nAttached GPUs : 1\nGPU 00000000:01:00.0\n    Product Name : A\n",
    ),
    ("nvidia-smi-nvlink.txt", "GPU 0: A100 (UUID: GPU-a)\n\t Link 0: 25 GB/s\n\t Link 1: <inactive>\n"),
    (
        "several-runs.txt",
        "$ nvidia-smi -L\nGPU 0: A10 (UUID: GPU-a)\n$ nvidia-smi topo -m\n\tGPU0\tCPU Affinity\nGPU0\t X \t0-7\n",
    ),
    ("rocm-smi.txt", "GPU[0]\t\t: GPU use (%): 0\nGPU[0]\t\t: Temperature (Sensor edge) (C): 31.0\n"),
    ("rocm-smi.csv", "device,GPU use (%),VRAM Total Memory (B)\ncard0,12,21458059264\n"),
    ("amd-smi.txt", "GPU: 0\n    ASIC:\n        MARKET_NAME: MI300A\n    BUS:\n        BDF: 0000:01:00.0\n"),
    ("rocminfo.txt", "HSA Agents\n*******\nAgent 1\n*******\n  Uuid:   GPU-8d1457e2c20f59d2\n  Device Type:  GPU\n"),
    ("lspci.txt", "01:00.0 3D controller [0302]: NVIDIA Corporation GA102GL [A10] [10de:2236] (rev a1)\n"),
    (
        "topo.xml",
        "<system version=\"1\"><cpu numaid=\"0\"><pci busid=\"0000:01:00.0\" class=\"0x030200\"><gpu dev=\"0\"/></pci></cpu></system>",
    ),
    ("lstopo.xml", "<?xml version=\"1.0\"?><topology version=\"2.0\"><object type=\"Machine\"/></topology>"),
    ("fabric.log", "[Jan 21 2025 02:21:33] [ERROR] [tid 1] failed to find the GPU handle\n"),
    ("firmware.txt", "ME feature version: 35, firmware version: 0x00000094\n"),
    ("list.txt.bz2", "BZh91AY&SY"),
];

/// Creates an archive like `gpupool doctor --bundle`, with these files and a tool's output.
fn bundle(folder: &Path, files: &[(&str, &str)]) -> PathBuf {
    let path = folder.join("report.tar.gz");
    let answer = fs::read_to_string(own_captures().join("nvidia/two_gpus.xml")).unwrap();
    let mut archive = tar::Builder::new(GzEncoder::new(fs::File::create(&path).unwrap(), Compression::fast()));
    let about =
        [("manifest.json", "{\"gpupool\": \"0.0.0\"}"), ("findings.json", "[]"), ("report.txt", "Nothing is wrong.\n")];
    for (name, text) in files.iter().chain(&about).chain(&[("nvidia-smi-q.xml", &*answer)]) {
        let mut header = tar::Header::new_gnu();
        header.set_size(text.len() as u64);
        header.set_mode(0o644);
        archive.append_data(&mut header, name, text.as_bytes()).unwrap();
    }
    archive.into_inner().unwrap().finish().unwrap();
    path
}

#[test]
fn an_older_bundle_opens_with_a_warning_for_each_ignored_file() {
    let folder = TempDir::new().unwrap();
    let snapshot = capture::read_capture(&bundle(folder.path(), NO_LONGER_READ), None).unwrap();
    assert_eq!(snapshot.devices.len(), 2, "{snapshot:?}");
    let mut expected: Vec<String> =
        NO_LONGER_READ.iter().map(|(name, _)| format!("{name}: ignored, because its format is unknown")).collect();
    expected.sort();
    assert_eq!(snapshot.warnings, expected);
    let clean = TempDir::new().unwrap();
    assert_eq!(capture::read_capture(&bundle(clean.path(), &[]), None).unwrap().warnings, Vec::<String>::new());
}

#[test]
fn a_file_in_a_removed_format_is_refused_with_the_known_formats() {
    let folder = TempDir::new().unwrap();
    for (name, text) in NO_LONGER_READ {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        let refused = capture::read_capture(&path, None).unwrap_err();
        assert_eq!(refused.code(), "unknown_format", "{name}");
        assert!(CaptureFormat::all().all(|format| refused.to_string().contains(format.name())), "{refused}");
    }
}
