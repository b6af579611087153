//! Reads small files of sysfs and procfs, which may be missing, empty, NUL-padded, forbidden or busy.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::reported::Reported;
use crate::{amounts, limits};

/// Reads the text of a file without padding.
///
/// A missing or empty file is unsupported, as is one that answers "not supported". Any other error is a failure with
/// the kernel's message.
pub(crate) fn read_text(path: &Path) -> Reported<String> {
    match read_bytes(path) {
        Ok(bytes) => {
            let text = String::from_utf8_lossy(&bytes);
            let text = text.trim_matches(|c: char| c == '\0' || c.is_whitespace());
            if text.is_empty() { Reported::Unsupported("empty file".into()) } else { Reported::Value(text.to_owned()) }
        }
        Err(error) => from_io_error(&error),
    }
}

/// Reads a number: decimal, or hexadecimal after `0x`.
pub(crate) fn read_number<T: FromStr + TryFrom<u64>>(path: &Path) -> Reported<T> {
    read_text(path).and_then(|text| Reported::from_cell(&text, amounts::parse_count))
}

/// Reads the raw bytes of a file, up to [`limits::SYSFS_BYTES`].
pub(crate) fn read_bytes(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limits::SYSFS_BYTES as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Returns the numbers that follow `start` in the names of a folder's entries, sorted.
pub(crate) fn numbered_entries(folder: &Path, start: &str) -> io::Result<Vec<u32>> {
    let number = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.strip_prefix(start)?.parse().ok();
    let mut numbers: Vec<u32> = fs::read_dir(folder)?.filter_map(number).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// Returns the subfolder of a folder that has only one.
pub(crate) fn only_subfolder(folder: &Path) -> Option<PathBuf> {
    let mut folders = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).filter(|path| path.is_dir());
    folders.next().filter(|_| folders.next().is_none())
}

/// Converts the error of reading a file.
pub(crate) fn from_io_error<T>(error: &io::Error) -> Reported<T> {
    use io::ErrorKind::{IsADirectory, NotADirectory, NotFound, Unsupported};
    match error.kind() {
        NotFound | NotADirectory | IsADirectory => Reported::ABSENT,
        Unsupported => Reported::Unsupported(error.to_string().into()),
        _ => Reported::Failed(error.to_string().into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn padding_and_empty_files_are_no_values() {
        let dir = std::env::temp_dir().join(format!("gpupool-kernel-file-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        let path = dir.join("file");
        std::fs::write(&path, b"42\n\0\0\0\0").unwrap();
        assert_eq!(read_number::<u32>(&path), Reported::Value(42));
        std::fs::write(&path, b"0x1002\n").unwrap();
        assert_eq!(read_number::<u32>(&path), Reported::Value(0x1002));
        std::fs::write(&path, b"\0\0\0").unwrap();
        assert!(matches!(read_number::<u32>(&path), Reported::Unsupported(_)));
        assert!(read_number::<u32>(&dir.join("none")).is_absent());
        std::fs::remove_dir_all(dir).unwrap();
    }
}
