//! Cost of one reading of eight devices beyond the time of the library itself.
//!
//! The same values are read through the source and directly from the library (a stand-in); the difference is the
//! overhead of the source. It should stay below 200 µs.

#![allow(unsafe_code, reason = "asks the library without anything between")]
#![allow(clippy::unwrap_used, reason = "a benchmark may panic")]

use std::hint::black_box;
use std::process::Command;
use std::time::{Duration, Instant};

use gpupool_devices::{DeviceSource, NvmlSource, SourcePaths};
use nvml_standin::machines::server_scenario;
use nvml_wrapper_sys::bindings as raw;

const DEVICES: u32 = 8;
const READINGS: usize = 2_000;

fn main() {
    let folder = tempfile::tempdir().unwrap();
    let library = nvml_standin::install_library(folder.path(), &server_scenario(DEVICES), &[]).unwrap();
    let paths = SourcePaths { nvml: library.clone(), sys: folder.path().join("sys"), ..SourcePaths::default() };

    let mut source = NvmlSource::new(&paths);
    let first = Instant::now();
    assert_eq!(source.read().unwrap().devices.len(), DEVICES as usize);
    let first = first.elapsed();
    let whole = median_time(|| drop(black_box(source.read().unwrap())));

    let direct = DirectLibrary::new(&library);
    let calls_only = median_time(|| direct.query_all());

    println!("first reading of {DEVICES} devices, with loading the library: {first:?}");
    println!("one reading of {DEVICES} devices:                             {whole:?}");
    println!("the library's calls alone:                        {calls_only:?}");
    println!("added:                                                {:?}", whole.saturating_sub(calls_only));
    match python_peer(folder.path()) {
        Some(peer) => {
            let times = peer.as_secs_f64() / whole.as_secs_f64();
            println!("nvidia-ml-py, the same questions:                     {peer:?} ({times:.0}× ours)");
        }
        None => println!("nvidia-ml-py: set GPUPOOL_PEER_PYTHON to a Python that has it"),
    }
}

/// Measures the same reading in Python, with NVIDIA's own binding and the same library.
fn python_peer(folder: &std::path::Path) -> Option<Duration> {
    let python = std::env::var_os("GPUPOOL_PEER_PYTHON")?;
    let script = include_str!("support/nvml_peer.py");
    let output = Command::new(python).args(["-c", script]).env("LD_LIBRARY_PATH", folder).output().ok()?;
    let nanos = String::from_utf8(output.stdout).ok()?.trim().parse().ok()?;
    Some(Duration::from_nanos(nanos))
}

fn median_time(mut run: impl FnMut()) -> Duration {
    let mut times: Vec<Duration> = (0..READINGS)
        .map(|_| {
            let start = Instant::now();
            run();
            start.elapsed()
        })
        .collect();
    times.sort_unstable();
    times[READINGS / 2]
}

/// The library without the source.
struct DirectLibrary {
    wrapper: nvml_wrapper::Nvml,
    devices: Vec<raw::nvmlDevice_t>,
    events: raw::nvmlEventSet_t,
}

impl DirectLibrary {
    fn new(path: &std::path::Path) -> Self {
        let wrapper = nvml_wrapper::Nvml::builder().lib_path(path.as_os_str()).init().unwrap();
        let mut devices = vec![std::ptr::null_mut(); DEVICES as usize];
        let mut events = std::ptr::null_mut();
        let library = wrapper.lib();
        // SAFETY: each call writes a handle.
        unsafe {
            for (index, device) in (0..).zip(&mut devices) {
                assert_eq!(library.nvmlDeviceGetHandleByIndex_v2(index, device), 0);
            }
            assert_eq!(library.nvmlEventSetCreate(&mut events), 0);
        }
        Self { wrapper, devices, events }
    }

    /// Makes all calls of one reading.
    fn query_all(&self) {
        let library = self.wrapper.lib();
        let mut room = [[0_u64; 3]; 64];
        // SAFETY: every call gets a buffer for its output.
        unsafe {
            let (mut a, mut b, mut c, mut d) = (0, 0, 0, 0);
            let mut event = std::mem::zeroed();
            library.nvmlDeviceGetCount_v2(&mut a);
            library.nvmlEventSetWait_v2(self.events, &mut event, 0);
            for &device in &self.devices {
                let mut memory: raw::nvmlMemory_v2_t = std::mem::zeroed();
                memory.version = (size_of::<raw::nvmlMemory_v2_t>() | 2 << 24) as u32;
                let mut rates = std::mem::zeroed();
                library.nvmlDeviceGetMigMode(device, &mut a, &mut b);
                library.nvmlDeviceGetPowerManagementLimit(device, &mut a);
                library.nvmlDeviceGetMemoryInfo_v2(device, &mut memory);
                library.nvmlDeviceGetUtilizationRates(device, &mut rates);
                library.nvmlDeviceGetTemperature(device, 0, &mut a);
                library.nvmlDeviceGetPowerUsage(device, &mut a);
                let mut count = room.len() as u32;
                library.nvmlDeviceGetComputeRunningProcesses_v3(device, &mut count, room.as_mut_ptr().cast());
                let mut count = room.len() as u32;
                library.nvmlDeviceGetGraphicsRunningProcesses_v3(device, &mut count, room.as_mut_ptr().cast());
                library.nvmlDeviceGetRemappedRows(device, &mut a, &mut b, &mut c, &mut d);
            }
            black_box((a, b, c, d, event, room));
        }
    }
}
