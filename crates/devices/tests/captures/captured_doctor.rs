//! The doctor and its bundle on kernel trees of real machines.

use std::collections::BTreeSet;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::time::UNIX_EPOCH;

use gpupool_devices::SourcePaths;
use gpupool_devices::doctor::{BundleRequest, DiagnosticBundle, DoctorEvidence, RedactionOptions};

use crate::capture_fixtures::{own_captures, real_captures};
use crate::captured_machines::power9;

/// A machine with nothing but a kernel tree.
fn kernel_tree_paths(root: &Path) -> SourcePaths {
    let at = |name: &str| root.join(name);
    SourcePaths {
        sys: at("sys"),
        proc: at("proc"),
        dev: at("dev"),
        etc: at("etc"),
        nvidia_smi: at("none"),
        amd_smi: at("none"),
        rocm_smi: at("none"),
        ..SourcePaths::default()
    }
}

fn bundle(root: &Path, redact: RedactionOptions) -> DiagnosticBundle {
    let paths = kernel_tree_paths(root);
    let evidence = DoctorEvidence::gather(&paths, &|_| None, Vec::new());
    DiagnosticBundle::collect(&paths, &evidence, &BundleRequest { redact, ..BundleRequest::new("test", UNIX_EPOCH) })
}

#[test]
fn the_gpus_of_a_machine_with_many_pci_domains_are_on_its_bus() {
    let addresses = |root: &Path| -> Vec<String> {
        let evidence = DoctorEvidence::gather(&kernel_tree_paths(root), &|_| None, Vec::new());
        evidence.gpus.value().unwrap().iter().map(|gpu| gpu.pci.to_string()).collect()
    };
    let bus = own_captures().join("nvidia/lact-sysfs/bus");
    assert_eq!(addresses(&bus), ["0004:05:00.0"]);
    assert!(
        bundle(&bus, RedactionOptions::default()).files().any(|(name, _)| name.ends_with("0004:05:00.0/numa_status"))
    );
    let Some(folder) = power9() else { return };
    let root = folder.path().join("nvidiagpunumanodes");
    let expected = ["0004:05:00.0", "0004:06:00.0", "0006:00:00.0", "0007:00:00.0", "0035:04:00.0", "0035:05:00.0"];
    assert_eq!(addresses(&root), expected);
    let bundle = bundle(&root, RedactionOptions::default());
    let numa = bundle.files().filter(|(name, _)| name.ends_with("/numa_status")).count();
    assert_eq!(numa, 6, "one for each GPU");
}

#[test]
fn a_topology_is_packed_whole_with_distinct_ids() {
    topology_is_packed_whole(&own_captures().join("amd/k8s-device-plugin-kfd/cpx"), 1);
    let Some(captures) = real_captures() else { return };
    // Eight cards of four partitions.
    topology_is_packed_whole(&captures.join("amd/k8s-device-plugin-kfd/topology-parsing-mi308"), 8);
}

fn topology_is_packed_whole(topology: &Path, cards: usize) {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("sys/class/kfd")).unwrap();
    symlink(fs::canonicalize(topology).unwrap(), folder.path().join("sys/class/kfd/kfd")).unwrap();
    let ids = |redact: RedactionOptions| -> BTreeSet<String> {
        let bundle = bundle(folder.path(), redact);
        let properties = bundle.files().filter(|(name, _)| name.ends_with("/properties"));
        let id = |(_, bytes): (&str, &[u8])| {
            let text = String::from_utf8(bytes.to_vec()).unwrap();
            text.lines().find_map(|line| line.strip_prefix("unique_id ").map(str::to_owned))
        };
        properties.filter_map(id).filter(|id| id != "0").collect()
    };
    let (real, fake) = (ids(RedactionOptions::default()), ids(RedactionOptions { identities: true, uuids: true }));
    assert_eq!((real.len(), fake.len()), (cards, cards));
    assert!(real.is_disjoint(&fake));
    let kept = bundle(folder.path(), RedactionOptions::default());
    for (name, bytes) in kept.files().filter(|(name, _)| name.contains("/topology/")) {
        assert!(bytes == fs::read(folder.path().join(name)).unwrap(), "{name}");
    }
}

#[test]
fn a_padded_card_is_packed_byte_by_byte() {
    card_is_packed(&own_captures().join("amd/lact-sysfs/big"), None);
    let Some(captures) = real_captures() else { return };
    card_is_packed(&captures.join("amd/lact-sysfs/rx6900xt"), Some(4096));
}

/// Packs the card in a tree; `metrics` is the length of its binary table, if there is one.
fn card_is_packed(tree: &Path, metrics: Option<usize>) {
    let folder = tempfile::tempdir().unwrap();
    fs::create_dir_all(folder.path().join("sys/class/drm")).unwrap();
    let tree = fs::canonicalize(tree).unwrap();
    let is_card = |entry: &fs::DirEntry| entry.file_name().to_string_lossy().starts_with("card");
    let card = fs::read_dir(tree).unwrap().map(Result::unwrap).find(is_card).unwrap();
    symlink(card.path(), folder.path().join("sys/class/drm/card0")).unwrap();
    let bundle = bundle(folder.path(), RedactionOptions { identities: true, uuids: false });
    let of_card: Vec<_> = bundle.files().filter(|(name, _)| name.contains("/card0/")).collect();
    let table = of_card.iter().find(|(name, _)| name.ends_with("gpu_metrics")).map(|(_, bytes)| bytes.len());
    assert_eq!(table, metrics);
    assert!(of_card.iter().any(|(name, _)| name.contains("/hwmon/") && name.ends_with("_input")));
    for (name, bytes) in of_card {
        assert!(bytes == fs::read(folder.path().join(name)).unwrap(), "{name}");
    }
}
