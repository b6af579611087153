//! What surrounds a program that looks for GPUs: variables that hide devices, and tools on the `PATH`.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::places::Places;
use crate::source::SourceKind;
use crate::told::words;

/// Variables that hide devices from the programs that see them.
const HIDING: [&str; 4] =
    ["CUDA_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES"];

/// Those that are set. An empty one is set too: it hides all.
pub(super) fn hiding_variables(environment: &dyn Fn(&str) -> Option<String>) -> BTreeMap<&'static str, String> {
    let set = |name: &'static str| Some((name, words(&environment(name)?).into_owned()));
    HIDING.into_iter().filter_map(set).collect()
}

/// Where the tools of `places` are.
pub(super) fn tools(
    places: &Places,
    environment: &dyn Fn(&str) -> Option<String>,
) -> BTreeMap<SourceKind, Option<PathBuf>> {
    let path = environment("PATH").unwrap_or_default();
    let tools = [
        (SourceKind::NvidiaSmi, &places.nvidia_smi),
        (SourceKind::AmdSmi, &places.amd_smi),
        (SourceKind::RocmSmi, &places.rocm_smi),
    ];
    tools.into_iter().map(|(kind, tool)| (kind, found_on(&path, tool))).collect()
}

fn found_on(path: &str, tool: &Path) -> Option<PathBuf> {
    let is_bare = tool.components().count() == 1 && tool.is_relative();
    if !is_bare {
        return tool.is_file().then(|| tool.to_owned());
    }
    std::env::split_paths(path).map(|folder| folder.join(tool)).find(|file| file.is_file())
}
