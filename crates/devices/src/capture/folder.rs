//! A captured folder: kernel trees in it, and texts of tools beside them.

use std::fs;
use std::path::{Path, PathBuf};

use super::format::Format;
use super::{CaptureError, bytes, text};
use crate::snapshot::Snapshot;
use crate::source::SourceError;

/// Files looked at in one folder.
const FILES: usize = 512;

/// Reads the trees a folder holds and the texts in it, as parts of one machine.
///
/// A text that cannot be read is a warning; only where nothing in the folder gives a device is its error the answer.
pub fn read(path: &Path, format: Option<Format>) -> Result<Snapshot, CaptureError> {
    if let Some(format) = format.filter(|format| format.is_tree()) {
        let not_a_tree =
            CaptureError::OtherFormat { path: path.to_owned(), format, why: "the folder holds nothing of that kind" };
        return Ok(format.read_tree(path).ok_or(not_a_tree)??);
    }
    let mut all = Gathered::default();
    if format.is_none() {
        for tree in Format::trees_in(path) {
            all.add(path, tree.read_tree(path));
        }
    }
    for file in files(path) {
        let Ok(bytes) = bytes(&file) else { continue };
        let text = text::decode(&bytes);
        let format = format.or_else(|| Format::guess(&text));
        all.add(&file, format.and_then(|format| format.parse(&text)));
    }
    all.finish(path)
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok).map(|entry| entry.path());
    let mut files: Vec<PathBuf> = entries.filter(|path| path.is_file()).collect();
    files.sort();
    files.truncate(FILES);
    files
}

#[derive(Default)]
struct Gathered {
    snapshot: Snapshot,
    recognised: bool,
    error: Option<SourceError>,
}

impl Gathered {
    fn add(&mut self, path: &Path, parsed: Option<Result<Snapshot, SourceError>>) {
        match parsed {
            None => {}
            Some(Ok(snapshot)) => {
                self.recognised = true;
                self.snapshot.merge(snapshot);
            }
            Some(Err(error)) => {
                self.recognised = true;
                let name = path.file_name().unwrap_or_default().to_string_lossy();
                self.snapshot.warn(format!("{name}: {error}"));
                self.error.get_or_insert(error);
            }
        }
    }

    fn finish(self, path: &Path) -> Result<Snapshot, CaptureError> {
        match (self.error, self.recognised) {
            (Some(error), _) if self.snapshot.devices.is_empty() => Err(error.into()),
            (_, true) => Ok(self.snapshot),
            (_, false) if fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none()) => {
                Err(CaptureError::Empty(path.to_owned()))
            }
            (_, false) => Err(CaptureError::NoFormat(path.to_owned())),
        }
    }
}
