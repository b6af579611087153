//! Reading the small files of sysfs and procfs, whatever they do: missing, empty, NUL-padded, refused, busy.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::str::FromStr;

use crate::reported::Reported;
use crate::{amounts, limits};

/// The text of a file without padding, or why there is none.
///
/// A missing file is unsupported, as is one that answers "not supported"; an empty one has no value; any other trouble
/// is a failure in the kernel's words.
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

/// The number in a file: decimal, or hexadecimal after `0x`.
pub(crate) fn read_number<T: FromStr + TryFrom<u64>>(path: &Path) -> Reported<T> {
    read_text(path).and_then(|text| Reported::from_cell(&text, amounts::parse_count))
}

/// The raw bytes of a file, up to a bound.
pub(crate) fn read_bytes(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    File::open(path)?.take(limits::SYSFS_BYTES as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The numbers that follow `start` in the names of a folder's entries, in order.
pub(crate) fn numbered_entries(folder: &Path, start: &str) -> io::Result<Vec<u32>> {
    let number = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.strip_prefix(start)?.parse().ok();
    let mut numbers: Vec<u32> = fs::read_dir(folder)?.filter_map(number).collect();
    numbers.sort_unstable();
    Ok(numbers)
}

/// The only folder in a folder.
pub(crate) fn only_subfolder(folder: &Path) -> Option<PathBuf> {
    let mut folders = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path()).filter(|path| path.is_dir());
    folders.next().filter(|_| folders.next().is_none())
}

/// What it means that a file could not be read.
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
    fn padding_is_no_text_and_an_empty_file_no_value() {
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
