//! Locations of captures: our own, and those of real machines if present.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{LazyLock, Once};

use tempfile::TempDir;

use crate::skipped::skipped;

/// Returns the folder of captures of real machines, or reports once that these tests are skipped.
pub fn real_captures() -> Option<PathBuf> {
    static TOLD: Once = Once::new();
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../../shared/captures");
    if folder.is_dir() {
        return Some(folder);
    }
    TOLD.call_once(|| skipped("captures of real machines", "this machine has no folder of them"));
    None
}

/// Returns the folder of our own captures, named like those of real machines.
///
/// They are stored in one file, where each begins with a line `== PATH` and ends where the next begins.
pub fn own_captures() -> &'static Path {
    static FOLDER: LazyLock<TempDir> = LazyLock::new(|| {
        let folder = tempfile::tempdir().unwrap();
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures");
        let all = fs::read_to_string(fixtures.join("captures.txt")).unwrap();
        for file in format!("\n{all}").split("\n== ").skip(1) {
            let (path, content) = file.split_once('\n').unwrap();
            let path = folder.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        }
        fs::copy(fixtures.join("nvidia_smi/two_gpus.xml"), folder.path().join("nvidia/two_gpus.xml")).unwrap();
        folder
    });
    FOLDER.path()
}

/// Returns all folders of captures.
pub fn capture_roots() -> Vec<PathBuf> {
    [Some(own_captures().to_owned()), real_captures()].into_iter().flatten().collect()
}
