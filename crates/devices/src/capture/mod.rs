//! Captured tool outputs and kernel trees, read as if the machine were here.
//!
//! A capture is a text, a folder that holds a kernel tree or several texts, or an archive of such a folder. Its format is
//! guessed from what it holds unless it is named.

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

/// Why a capture gave no devices.
#[derive(Debug, thiserror::Error)]
pub enum CaptureError {
    /// The file or folder cannot be read.
    #[error("{path} cannot be read: {error}", path = path.display())]
    Unreadable { path: PathBuf, error: io::Error },
    /// There is nothing in it.
    #[error("{path} is empty: a tool that printed nothing says nothing about devices", path = .0.display())]
    Empty(PathBuf),
    /// Nobody knows what it is.
    #[error("{path} is in no known format; name one with --as: {}", CaptureFormat::names(), path = .0.display())]
    NoFormat(PathBuf),
    /// It is not what it was said to be.
    #[error("{path} cannot be read as {format}: {why}", path = path.display())]
    OtherFormat {
        path: PathBuf,
        /// What it was said to be.
        format: CaptureFormat,
        /// What speaks against it.
        why: &'static str,
    },
    /// The archive cannot be unpacked.
    #[error("{path} cannot be unpacked: {problem}", path = path.display())]
    Archive { path: PathBuf, problem: String },
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
pub fn read_capture(path: &Path, format: Option<CaptureFormat>) -> Result<SourceReading, CaptureError> {
    let unreadable = |error| CaptureError::Unreadable { path: path.to_owned(), error };
    if std::fs::metadata(path).map_err(unreadable)?.is_dir() {
        return read_folder(path, format);
    }
    let bytes = bytes(path).map_err(unreadable)?;
    match archive::unpack(path, &bytes)? {
        archive::Content::Folder(unpacked) => read_folder(&archive::root(unpacked.path()), format),
        archive::Content::Bytes(bytes) => one_text(path, &bytes, format),
        archive::Content::NoArchive => one_text(path, &bytes, format),
    }
}

fn one_text(path: &Path, bytes: &[u8], format: Option<CaptureFormat>) -> Result<SourceReading, CaptureError> {
    let text = decode(bytes);
    match format {
        Some(format) => {
            let why = "that is the format of a folder";
            let tree = || CaptureError::OtherFormat { path: path.to_owned(), format, why };
            Ok(format.parse(&text).ok_or_else(tree)??)
        }
        None if text.trim().is_empty() => Err(CaptureError::Empty(path.to_owned())),
        None => match CaptureFormat::detect(&text).and_then(|format| format.parse(&text)) {
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

// A captured folder: kernel trees in it, and texts of tools beside them.

/// Files looked at in one folder.
const FILES: usize = 512;

/// Files of a bundle that tell of the bundle and of what the doctor found, not of devices.
const ABOUT_A_BUNDLE: [&str; 3] = ["findings.json", "manifest.json", "report.txt"];

/// Reads the trees a folder holds and the texts in it, as parts of one machine.
///
/// A text that cannot be read, or is in no known format, is a warning; only where nothing in the folder gives a device
/// is its error the answer. Bundles of older versions hold texts in formats that are no longer read.
fn read_folder(path: &Path, format: Option<CaptureFormat>) -> Result<SourceReading, CaptureError> {
    if let Some(format) = format.filter(|format| format.is_tree()) {
        let not_a_tree =
            CaptureError::OtherFormat { path: path.to_owned(), format, why: "the folder holds nothing of that kind" };
        return Ok(format.read_tree(path).ok_or(not_a_tree)??);
    }
    let mut all = Gathered::default();
    if format.is_none() {
        for read in CaptureFormat::all().filter_map(|format| format.read_tree(path)) {
            all.add(path, read);
        }
    }
    for file in files(path) {
        let Ok(bytes) = bytes(&file) else { continue };
        let text = decode(&bytes);
        match format.or_else(|| CaptureFormat::detect(&text)).and_then(|format| format.parse(&text)) {
            Some(parsed) => all.add(&file, parsed),
            None if text.trim().is_empty() => {}
            None => all.snapshot.warn(format!("{}: ignored, it is in no known format", name(&file))),
        }
    }
    all.finish(path)
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder).into_iter().flatten().filter_map(Result::ok).map(|entry| entry.path());
    let is_about_devices = |path: &PathBuf| !ABOUT_A_BUNDLE.contains(&&*name(path));
    let mut files: Vec<PathBuf> = entries.filter(|path| path.is_file()).filter(is_about_devices).collect();
    files.sort();
    files.truncate(FILES);
    files
}

fn name(path: &Path) -> Cow<'_, str> {
    path.file_name().unwrap_or_default().to_string_lossy()
}

#[derive(Default)]
struct Gathered {
    snapshot: SourceReading,
    recognised: bool,
    error: Option<SourceError>,
}

impl Gathered {
    fn add(&mut self, path: &Path, parsed: Result<SourceReading, SourceError>) {
        self.recognised = true;
        match parsed {
            Ok(snapshot) => self.snapshot.merge(snapshot),
            Err(error) => {
                self.snapshot.warn(format!("{}: {error}", name(path)));
                self.error.get_or_insert(error);
            }
        }
    }

    fn finish(self, path: &Path) -> Result<SourceReading, CaptureError> {
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

// The formats a capture can have: their names, how each is recognised, and who reads it.

/// A format of captures.
#[derive(Clone, Copy)]
pub struct CaptureFormat(&'static Entry);

struct Entry {
    name: &'static str,
    reader: Reader,
}

enum Reader {
    Text { looks_like: fn(&str) -> bool, parse: Parse<str> },
    Tree { looks_like: fn(&Path) -> bool, read: Parse<Path> },
}

type Parse<T> = fn(&T) -> Result<SourceReading, SourceError>;

const fn text(name: &'static str, looks_like: fn(&str) -> bool, parse: Parse<str>) -> Entry {
    Entry { name, reader: Reader::Text { looks_like, parse } }
}

const fn tree(name: &'static str, looks_like: fn(&Path) -> bool, read: Parse<Path>) -> Entry {
    Entry { name, reader: Reader::Tree { looks_like, read } }
}

/// Every format. A guess takes the first that recognises a text, so what is more particular stands first.
static FORMATS: &[Entry] = &[
    tree("sysfs", amd_sysfs::looks_like, amd_sysfs::read),
    tree("pci", pci_bus::looks_like, pci_bus::read),
    text("nvidia-smi-xml", nvidia_smi::xml::looks_like, nvidia_smi::xml::parse),
    text("nvidia-smi-csv", nvidia_smi::csv::looks_like, nvidia_smi::csv::parse),
    text("nvidia-smi-apps", nvidia_smi::csv::looks_like_apps, nvidia_smi::csv::parse_apps),
    text("nvidia-smi-list", nvidia_smi::list::looks_like, nvidia_smi::list::parse),
    text("nvidia-smi-topo", nvidia_smi::topo::looks_like, nvidia_smi::topo::parse),
    text("rocm-smi-json", amd_tools::rocm_smi::looks_like, amd_tools::rocm_smi::parse),
    text("amd-smi-json", amd_tools::amd_smi::looks_like, amd_tools::amd_smi::parse),
    text("fdinfo", amd_sysfs::looks_like_fdinfo, amd_sysfs::parse_fdinfo),
    text("kernel-log", kernel_log::looks_like, kernel_log::parse),
    text("nvidia-smi-error", nvidia_smi::errors::looks_like, nvidia_smi::errors::parse),
];

/// A format nobody reads.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no format {0:?}; there are {all}", all = CaptureFormat::names())]
pub struct UnknownCaptureFormat(String);

impl CaptureFormat {
    /// The names of all formats, for people.
    pub fn names() -> String {
        FORMATS.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", ")
    }

    pub fn all() -> impl Iterator<Item = Self> {
        FORMATS.iter().map(Self)
    }

    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Whether it is the format of a folder.
    pub fn is_tree(self) -> bool {
        matches!(self.0.reader, Reader::Tree { .. })
    }

    /// Whether a text seems to have this format.
    pub fn matches(self, text: &str) -> bool {
        match self.0.reader {
            Reader::Text { looks_like, .. } => looks_like(text),
            Reader::Tree { .. } => false,
        }
    }

    /// The format a text seems to have.
    pub fn detect(text: &str) -> Option<Self> {
        Self::all().find(|format| format.matches(text))
    }

    /// Reads a text; `None` for the format of a folder.
    pub fn parse(self, text: &str) -> Option<Result<SourceReading, SourceError>> {
        match self.0.reader {
            Reader::Text { parse, .. } => Some(parse(text)),
            Reader::Tree { .. } => None,
        }
    }

    /// Reads a folder; `None` where it holds no such tree, or for the format of a text.
    pub fn read_tree(self, folder: &Path) -> Option<Result<SourceReading, SourceError>> {
        match self.0.reader {
            Reader::Tree { looks_like, read } if looks_like(folder) => Some(read(folder)),
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
        write!(f, "Format({})", self.name())
    }
}

// Bytes of a captured text, whatever wrote them.

/// The text: UTF-8 with what is none replaced, or UTF-16 as a Windows shell writes it into a file.
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
    fn every_format_is_found_by_its_name_and_no_two_share_one() {
        for format in CaptureFormat::all() {
            assert_eq!(format.name().parse(), Ok(format));
        }
        assert_eq!("KFD".parse::<CaptureFormat>().map(CaptureFormat::name), Ok("sysfs"));
        assert!("nonsense".parse::<CaptureFormat>().unwrap_err().to_string().contains("rocm-smi-json"));
    }

    #[test]
    fn a_text_is_read_in_the_encoding_its_first_bytes_name() {
        assert_eq!(decode(b"GPU 0"), "GPU 0");
        assert_eq!(decode(b"\xef\xbb\xbfGPU"), "GPU");
        assert_eq!(decode(b"\xff\xfeG\0P\0U\0"), "GPU");
        assert_eq!(decode(b"\xfe\xff\0G\0P\0U\0"), "GPU");
    }
}
