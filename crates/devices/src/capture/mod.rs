//! Captured tool output and kernel trees, read like a live source.
//!
//! A capture is a text, a folder with a kernel tree or texts, or an archive of such a folder. Its format is detected
//! from its content unless it is named.

mod archive;

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::{fmt, fs};

use crate::source::SourceError;
use crate::source_reading::SourceReading;
use crate::{amd_sysfs, amd_tools, kernel_log, limits, nvidia_smi, pci_bus};

/// Reason why a capture returned no devices.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The file or folder cannot be read.
    #[error("cannot read {path}: {error}", path = path.display())]
    Unreadable { path: PathBuf, error: io::Error },
    /// The file or folder is empty.
    #[error("{path} is empty", path = .0.display())]
    Empty(PathBuf),
    /// The format is unknown.
    #[error("the format of {path} is unknown; name one with --as: {}", CaptureFormat::names(), path = .0.display())]
    NoFormat(PathBuf),
    /// The content does not have the named format.
    #[error("cannot read {path} as {format}: {why}", path = path.display())]
    OtherFormat {
        path: PathBuf,
        /// Named format.
        format: CaptureFormat,
        /// Reason of the mismatch.
        why: &'static str,
    },
    /// The archive cannot be unpacked.
    #[error("cannot unpack {path}: {problem}", path = path.display())]
    Archive { path: PathBuf, problem: String },
    /// The capture contains an error of a source, or is broken.
    #[error("{0}")]
    Source(#[from] SourceError),
}

impl CaptureError {
    /// Returns a stable name for programs.
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

/// Reads a capture in the given or detected format.
pub fn read_capture(path: &Path, format: Option<CaptureFormat>) -> Result<SourceReading, CaptureError> {
    let unreadable = |error| CaptureError::Unreadable { path: path.to_owned(), error };
    if std::fs::metadata(path).map_err(unreadable)?.is_dir() {
        return read_folder(path, format);
    }
    let bytes = read_bounded(path).map_err(unreadable)?;
    match archive::unpack(path, &bytes)? {
        archive::UnpackedContent::Folder(unpacked) => read_folder(&archive::content_root(unpacked.path()), format),
        archive::UnpackedContent::Bytes(bytes) => read_text_capture(path, &bytes, format),
        archive::UnpackedContent::NoArchive => read_text_capture(path, &bytes, format),
    }
}

fn read_text_capture(path: &Path, bytes: &[u8], format: Option<CaptureFormat>) -> Result<SourceReading, CaptureError> {
    let text = decode(bytes);
    match format {
        Some(format) => {
            let why = "it is a format of folders";
            let wrong_kind = || CaptureError::OtherFormat { path: path.to_owned(), format, why };
            Ok(format.parse(&text).ok_or_else(wrong_kind)??)
        }
        None if text.trim().is_empty() => Err(CaptureError::Empty(path.to_owned())),
        None => match CaptureFormat::detect(&text).and_then(|format| format.parse(&text)) {
            Some(parsed) => Ok(parsed?),
            None => Err(CaptureError::NoFormat(path.to_owned())),
        },
    }
}

fn read_bounded(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limits::TEXT_BYTES as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

// Captured folders: kernel trees and texts of tools.

/// Maximum files read from one folder.
const MAX_FILES: usize = 512;

/// Files of a bundle about the bundle and the doctor's findings.
const BUNDLE_METADATA: [&str; 3] = ["findings.json", "manifest.json", "report.txt"];

/// Reads the trees and texts of a folder as parts of one machine.
///
/// A text that is unreadable or in no known format is a warning. Its error is returned only if the folder has no
/// devices. Bundles of older versions contain texts in formats that are no longer read.
fn read_folder(path: &Path, format: Option<CaptureFormat>) -> Result<SourceReading, CaptureError> {
    if let Some(format) = format.filter(|format| format.is_tree()) {
        let not_a_tree =
            CaptureError::OtherFormat { path: path.to_owned(), format, why: "the folder has no such tree" };
        return Ok(format.read_tree(path).ok_or(not_a_tree)??);
    }
    let mut all = FolderReading::default();
    if format.is_none() {
        for read in CaptureFormat::all().filter_map(|format| format.read_tree(path)) {
            all.add(path, read);
        }
    }
    for file in device_files(path) {
        let Ok(bytes) = read_bounded(&file) else { continue };
        let text = decode(&bytes);
        match format.or_else(|| CaptureFormat::detect(&text)).and_then(|format| format.parse(&text)) {
            Some(parsed) => all.add(&file, parsed),
            None if text.trim().is_empty() => {}
            None => all.reading.warn(format!("{}: ignored, because its format is unknown", display_name(&file))),
        }
    }
    all.finish(path)
}

fn device_files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok).map(|entry| entry.path());
    let is_about_devices = |path: &PathBuf| !BUNDLE_METADATA.contains(&&*display_name(path));
    let mut files: Vec<PathBuf> = entries.filter(|path| path.is_file()).filter(is_about_devices).collect();
    files.sort();
    files.truncate(MAX_FILES);
    files
}

fn display_name(path: &Path) -> Cow<'_, str> {
    path.file_name().unwrap_or_default().to_string_lossy()
}

#[derive(Default)]
struct FolderReading {
    reading: SourceReading,
    recognised: bool,
    error: Option<SourceError>,
}

impl FolderReading {
    fn add(&mut self, path: &Path, parsed: Result<SourceReading, SourceError>) {
        self.recognised = true;
        match parsed {
            Ok(reading) => self.reading.merge(reading),
            Err(error) => {
                self.reading.warn(format!("{}: {error}", display_name(path)));
                self.error.get_or_insert(error);
            }
        }
    }

    fn finish(self, path: &Path) -> Result<SourceReading, CaptureError> {
        match (self.error, self.recognised) {
            (Some(error), _) if self.reading.devices.is_empty() => Err(error.into()),
            (_, true) => Ok(self.reading),
            (_, false) if fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none()) => {
                Err(CaptureError::Empty(path.to_owned()))
            }
            (_, false) => Err(CaptureError::NoFormat(path.to_owned())),
        }
    }
}

// Formats of captures: names, detection and parsers.

/// A format of captures.
#[derive(Clone, Copy)]
pub struct CaptureFormat(&'static FormatEntry);

struct FormatEntry {
    name: &'static str,
    reader: FormatReader,
}

enum FormatReader {
    Text { looks_like: fn(&str) -> bool, parse: ParseFn<str> },
    Tree { looks_like: fn(&Path) -> bool, read: ParseFn<Path> },
}

type ParseFn<T> = fn(&T) -> Result<SourceReading, SourceError>;

const fn text_format(name: &'static str, looks_like: fn(&str) -> bool, parse: ParseFn<str>) -> FormatEntry {
    FormatEntry { name, reader: FormatReader::Text { looks_like, parse } }
}

const fn tree_format(name: &'static str, looks_like: fn(&Path) -> bool, read: ParseFn<Path>) -> FormatEntry {
    FormatEntry { name, reader: FormatReader::Tree { looks_like, read } }
}

/// All formats. Detection takes the first match, so more specific formats come first.
static FORMATS: &[FormatEntry] = &[
    tree_format("sysfs", amd_sysfs::looks_like, amd_sysfs::read),
    tree_format("pci", pci_bus::looks_like, pci_bus::read),
    text_format("nvidia-smi-xml", nvidia_smi::xml::looks_like, nvidia_smi::xml::parse),
    text_format("nvidia-smi-csv", nvidia_smi::csv::looks_like, nvidia_smi::csv::parse),
    text_format("nvidia-smi-apps", nvidia_smi::csv::looks_like_apps, nvidia_smi::csv::parse_apps),
    text_format("nvidia-smi-list", nvidia_smi::list::looks_like, nvidia_smi::list::parse),
    text_format("nvidia-smi-topo", nvidia_smi::topo::looks_like, nvidia_smi::topo::parse),
    text_format("rocm-smi-json", amd_tools::rocm_smi::looks_like, amd_tools::rocm_smi::parse),
    text_format("amd-smi-json", amd_tools::amd_smi::looks_like, amd_tools::amd_smi::parse),
    text_format("fdinfo", amd_sysfs::looks_like_fdinfo, amd_sysfs::parse_fdinfo),
    text_format("kernel-log", kernel_log::looks_like, kernel_log::parse),
    text_format("nvidia-smi-error", nvidia_smi::errors::looks_like, nvidia_smi::errors::parse),
];

/// An unknown name of a format.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("unknown format {0:?}; allowed: {all}", all = CaptureFormat::names())]
pub struct UnknownCaptureFormat(String);

impl CaptureFormat {
    /// Returns the names of all formats, for people.
    pub fn names() -> String {
        FORMATS.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", ")
    }

    pub fn all() -> impl Iterator<Item = Self> {
        FORMATS.iter().map(Self)
    }

    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Whether this is a format of folders.
    pub fn is_tree(self) -> bool {
        matches!(self.0.reader, FormatReader::Tree { .. })
    }

    /// Whether a text seems to have this format.
    pub fn matches(self, text: &str) -> bool {
        match self.0.reader {
            FormatReader::Text { looks_like, .. } => looks_like(text),
            FormatReader::Tree { .. } => false,
        }
    }

    /// Detects the format of a text.
    pub fn detect(text: &str) -> Option<Self> {
        Self::all().find(|format| format.matches(text))
    }

    /// Parses a text; `None` if this is a format of folders.
    pub fn parse(self, text: &str) -> Option<Result<SourceReading, SourceError>> {
        match self.0.reader {
            FormatReader::Text { parse, .. } => Some(parse(text)),
            FormatReader::Tree { .. } => None,
        }
    }

    /// Reads a folder; `None` if it contains no such tree or this is a format of texts.
    pub fn read_tree(self, folder: &Path) -> Option<Result<SourceReading, SourceError>> {
        match self.0.reader {
            FormatReader::Tree { looks_like, read } if looks_like(folder) => Some(read(folder)),
            _ => None,
        }
    }
}

impl FromStr for CaptureFormat {
    type Err = UnknownCaptureFormat;

    fn from_str(text: &str) -> Result<Self, UnknownCaptureFormat> {
        let name = text.trim().to_ascii_lowercase().replace('_', "-");
        let name = match &*name {
            "kfd" | "amd-sysfs" | "drm" => "sysfs",
            "xml" => "nvidia-smi-xml",
            "csv" => "nvidia-smi-csv",
            "topo" | "topo-m" => "nvidia-smi-topo",
            "dmesg" | "kmsg" => "kernel-log",
            other => other,
        };
        Self::all().find(|format| format.name() == name).ok_or_else(|| UnknownCaptureFormat(text.to_owned()))
    }
}

impl PartialEq for CaptureFormat {
    fn eq(&self, other: &Self) -> bool {
        std::ptr::eq(self.0, other.0)
    }
}

impl Eq for CaptureFormat {}

impl fmt::Display for CaptureFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Debug for CaptureFormat {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CaptureFormat({})", self.name())
    }
}

// Encodings of captured texts.

/// Decodes UTF-8, replacing invalid bytes, or UTF-16 as written by a Windows shell.
pub(crate) fn decode(bytes: &[u8]) -> Cow<'_, str> {
    let wide = |unit: fn([u8; 2]) -> u16, bytes: &[u8]| {
        let units: Vec<u16> = bytes.chunks_exact(2).map(|pair| unit([pair[0], pair[1]])).collect();
        Cow::Owned(String::from_utf16_lossy(&units))
    };
    match bytes {
        [0xff, 0xfe, rest @ ..] => wide(u16::from_le_bytes, rest),
        [0xfe, 0xff, rest @ ..] => wide(u16::from_be_bytes, rest),
        [0xef, 0xbb, 0xbf, rest @ ..] => String::from_utf8_lossy(rest),
        _ => String::from_utf8_lossy(bytes),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_format_is_found_by_its_unique_name() {
        for format in CaptureFormat::all() {
            assert_eq!(format.name().parse(), Ok(format));
        }
        assert_eq!("KFD".parse::<CaptureFormat>().map(CaptureFormat::name), Ok("sysfs"));
        assert!("nonsense".parse::<CaptureFormat>().unwrap_err().to_string().contains("rocm-smi-json"));
    }

    #[test]
    fn a_text_is_decoded_by_its_byte_order_mark() {
        assert_eq!(decode(b"GPU 0"), "GPU 0");
        assert_eq!(decode(b"\xef\xbb\xbfGPU"), "GPU");
        assert_eq!(decode(b"\xff\xfeG\0P\0U\0"), "GPU");
        assert_eq!(decode(b"\xfe\xff\0G\0P\0U\0"), "GPU");
    }
}
