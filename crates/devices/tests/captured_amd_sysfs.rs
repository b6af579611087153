//! Captured kernel trees of AMD machines, and what a person reads in them.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use gpupool_devices::amd_sysfs;

#[test]
fn show() {
    let Some(folder) = common::captures("show") else { return };
    for place in [
        "amd/lact-sysfs/hd7870",
        "amd/lact-sysfs/phoenix",
        "amd/lact-sysfs/rx580",
        "amd/lact-sysfs/rx7600s",
        "amd/procfs-drm",
        "amd/k8s-device-plugin-kfd/topology-parsing",
        "amd/k8s-device-plugin-kfd/topo-mi210-xgmi-pcie",
        "nvidia/lact-sysfs/rtx4080",
        "intel/lact-sysfs/b580",
    ] {
        let snapshot = amd_sysfs::read(&folder.join(place)).unwrap();
        println!("=== {place}\n{snapshot:#?}");
    }
}
