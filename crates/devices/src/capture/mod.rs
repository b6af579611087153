//! Captured tool outputs and kernel trees, read as if the machine were here.
//!
//! A capture is a text, a folder that holds a kernel tree or several texts, or an archive of such a folder. Its format is
//! guessed from what it holds unless it is named.

mod archive;
mod folder;
mod format;
mod text;

pub use format::{Format, UnknownFormat};

use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};

use crate::limits;
use crate::snapshot::Snapshot;
use crate::source::SourceError;

/// Why a capture gave no devices.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The file or folder cannot be read.
    #[error("{path} cannot be read: {error}", path = path.display())]
    Unreadable {
        /// Which.
        path: PathBuf,
        /// Why.
        error: io::Error,
    },
    /// There is nothing in it.
    #[error("{path} is empty: a tool that printed nothing says nothing about devices", path = .0.display())]
    Empty(PathBuf),
    /// Nobody knows what it is.
    #[error("{path} is in no known format; name one with --as: {}", Format::names(), path = .0.display())]
    NoFormat(PathBuf),
    /// It is not what it was said to be.
    #[error("{path} cannot be read as {format}: {why}", path = path.display())]
    OtherFormat {
        /// Which.
        path: PathBuf,
        /// What it was said to be.
        format: Format,
        /// What speaks against it.
        why: &'static str,
    },
    /// The archive cannot be unpacked.
    #[error("{path} cannot be unpacked: {problem}", path = path.display())]
    Archive {
        /// Which.
        path: PathBuf,
        /// Why.
        problem: String,
    },
    /// It holds the words of a source that failed, or is broken.
    #[error("{0}")]
    Source(#[from] SourceError),
}

impl CaptureError {
    /// A name for programs that never changes.
    pub const fn code(&self) -> &'static str {
        match self {
            Self::Unreadable { .. } => "unreadable",
            Self::Empty(_) => "empty",
            Self::NoFormat(_) => "unknown_format",
            Self::OtherFormat { .. } => "other_format",
            Self::Archive { .. } => "bad_archive",
            Self::Source(error) => error.code(),
        }
    }
}

/// Reads a capture, in the format given or in the one it seems to have.
pub fn read(path: &Path, format: Option<Format>) -> Result<Snapshot, CaptureError> {
    let unreadable = |error| CaptureError::Unreadable { path: path.to_owned(), error };
    if std::fs::metadata(path).map_err(unreadable)?.is_dir() {
        return folder::read(path, format);
    }
    let bytes = bytes(path).map_err(unreadable)?;
    match archive::unpack(path, &bytes)? {
        archive::Content::Folder(unpacked) => folder::read(&archive::root(unpacked.path()), format),
        archive::Content::Bytes(bytes) => one_text(path, &bytes, format),
        archive::Content::NoArchive => one_text(path, &bytes, format),
    }
}

fn one_text(path: &Path, bytes: &[u8], format: Option<Format>) -> Result<Snapshot, CaptureError> {
    let text = text::decode(bytes);
    match format {
        Some(format) => {
            let why = "that is the format of a folder";
            let tree = || CaptureError::OtherFormat { path: path.to_owned(), format, why };
            Ok(format.parse(&text).ok_or_else(tree)??)
        }
        None if text.trim().is_empty() => Err(CaptureError::Empty(path.to_owned())),
        None => match Format::guess(&text).and_then(|format| format.parse(&text)) {
            Some(parsed) => Ok(parsed?),
            None => Err(CaptureError::NoFormat(path.to_owned())),
        },
    }
}

fn bytes(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limits::TEXT_BYTES as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}
