//! Installation of a copy of the built library, with a scenario, into a directory.

use std::io;
use std::path::{Path, PathBuf};

use crate::scenario::NvmlScenario;

/// Installs a copy of the library with `scenario` in `folder` and returns its path.
///
/// A copy, because the loader treats two names of one file as one library. `missing` functions lose their name in the
/// copy's symbol table, so that their lookup fails, as in the library of an older driver.
pub fn install_library(folder: &Path, scenario: &NvmlScenario, missing: &[&str]) -> io::Result<PathBuf> {
    let mut library = std::fs::read(built_library()?)?;
    for name in missing {
        hide_function(&mut library, name)?;
    }
    let path = folder.join("libnvidia-ml.so.1");
    std::fs::write(&path, library)?;
    write_scenario(folder, scenario)?;
    Ok(path)
}

/// Replaces the scenario of the copy in `folder`.
pub fn write_scenario(folder: &Path, scenario: &NvmlScenario) -> io::Result<()> {
    // Renamed into place, so that no reader sees a partial file.
    let half = folder.join("scenario.json.new");
    std::fs::write(&half, serde_json::to_vec_pretty(scenario)?)?;
    std::fs::rename(half, folder.join("scenario.json"))
}

/// Returns the library that Cargo built next to the running test or benchmark.
fn built_library() -> io::Result<PathBuf> {
    let program = std::env::current_exe()?;
    let beside = program.ancestors().skip(1).take(2).map(|folder| folder.join("libnvml_standin.so"));
    let deps = program.parent().map(|folder| folder.join("deps/libnvml_standin.so"));
    beside.chain(deps).find(|path| path.is_file()).ok_or_else(|| {
        io::Error::new(io::ErrorKind::NotFound, format!("no libnvml_standin.so beside {}", program.display()))
    })
}

fn hide_function(library: &mut [u8], name: &str) -> io::Result<()> {
    let wanted = [b"\0", name.as_bytes(), b"\0"].concat();
    let places: Vec<usize> =
        library.windows(wanted.len()).enumerate().filter(|(_, bytes)| *bytes == wanted).map(|(at, _)| at).collect();
    if places.is_empty() {
        return Err(io::Error::new(io::ErrorKind::NotFound, format!("the stand-in has no function {name}")));
    }
    for at in places {
        library[at + 1] = b'-';
    }
    Ok(())
}
