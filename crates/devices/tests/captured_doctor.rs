//! The doctor and its bundle on kernel trees of real machines.

#![allow(clippy::unwrap_used, reason = "a test may panic")]

mod common;

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::UNIX_EPOCH;

use gpupool_devices::Places;
use gpupool_devices::doctor::{Bundle, Evidence, Redact, Wish};

/// A machine of which only a kernel tree is there.
fn places(root: &Path) -> Places {
    let at = |name: &str| root.join(name);
    Places {
        sys: at("sys"),
        proc: at("proc"),
        dev: at("dev"),
        etc: at("etc"),
        nvidia_smi: at("none"),
        amd_smi: at("none"),
        rocm_smi: at("none"),
        ..Places::default()
    }
}

fn bundle(root: &Path, redact: Redact) -> Bundle {
    let places = places(root);
    let evidence = Evidence::gather(&places, &|_| None, Vec::new());
    Bundle::collect(&places, &evidence, &Wish { redact, ..Wish::new("test", UNIX_EPOCH) })
}

#[test]
fn the_gpus_of_a_machine_with_many_pci_domains_are_on_its_bus() {
    let Some(captures) = common::captures("doctor: POWER9 tree") else { return };
    let folder = tempfile::tempdir().unwrap();
    let packed = File::open(captures.join("nvidia/hwloc/nvidiagpunumanodes.tar.bz2")).unwrap();
    tar::Archive::new(bzip2::read::BzDecoder::new(packed)).unpack(folder.path()).unwrap();
    let root = folder.path().join("nvidiagpunumanodes");
    let evidence = Evidence::gather(&places(&root), &|_| None, Vec::new());
    let gpus: Vec<String> = evidence.gpus.value().unwrap().iter().map(|gpu| gpu.pci.to_string()).collect();
    let expected = ["0004:05:00.0", "0004:06:00.0", "0006:00:00.0", "0007:00:00.0", "0035:04:00.0", "0035:05:00.0"];
    assert_eq!(gpus, expected);
    let bundle = bundle(&root, Redact::default());
    let numa = bundle.files().filter(|(name, _)| name.ends_with("/numa_status")).count();
    assert_eq!(numa, 6, "one for each GPU");
}

#[test]
fn a_topology_is_packed_whole_and_its_ids_stay_as_different_as_they_were() {
    let Some(captures) = common::captures("doctor: MI308 topology") else { return };
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("sys/class/kfd")).unwrap();
    let topology = captures.join("amd/k8s-device-plugin-kfd/topology-parsing-mi308");
    symlink(fs::canonicalize(&topology).unwrap(), folder.path().join("sys/class/kfd/kfd")).unwrap();
    let ids = |redact: Redact| -> BTreeSet<String> {
        let bundle = bundle(folder.path(), redact);
        let properties = bundle.files().filter(|(name, _)| name.ends_with("/properties"));
        let id = |(_, bytes): (&str, &[u8])| {
            let text = String::from_utf8(bytes.to_vec()).unwrap();
            text.lines().find_map(|line| line.strip_prefix("unique_id ").map(str::to_owned))
        };
        properties.filter_map(id).filter(|id| id != "0").collect()
    };
    let (real, fake) = (ids(Redact::default()), ids(Redact { identities: true, uuids: true }));
    assert_eq!((real.len(), fake.len()), (8, 8), "eight cards of four partitions");
    assert!(real.is_disjoint(&fake));
    let kept = bundle(folder.path(), Redact::default());
    for (name, bytes) in kept.files().filter(|(name, _)| name.contains("/topology/")) {
        assert_eq!(bytes, fs::read(folder.path().join(name)).unwrap(), "{name}");
    }
}

#[test]
fn a_padded_card_is_packed_byte_by_byte() {
    let Some(captures) = common::captures("doctor: padded sysfs") else { return };
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("sys/class/drm")).unwrap();
    let tree = fs::canonicalize(captures.join("amd/lact-sysfs/rx6900xt")).unwrap();
    let is_card = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with("card");
    let card = fs::read_dir(tree).unwrap().map(Result::unwrap).find(is_card).unwrap();
    symlink(card.path(), folder.path().join("sys/class/drm/card0")).unwrap();
    let bundle = bundle(folder.path(), Redact { identities: true, uuids: false });
    let of_card: Vec<_> = bundle.files().filter(|(name, _)| name.contains("/card0/")).collect();
    assert!(of_card.iter().any(|(name, bytes)| name.ends_with("gpu_metrics") && bytes.len() == 4096));
    assert!(of_card.iter().any(|(name, _)| name.contains("/hwmon/") && name.ends_with("_input")));
    for (name, bytes) in of_card {
        assert_eq!(bytes, fs::read(folder.path().join(name)).unwrap(), "{name}");
    }
}
