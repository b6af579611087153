//! Archives of captured folders, unpacked safely: bounded, and without links out of their folder.

use std::fs;
use std::io::{self, Cursor, Read};
use std::path::{Component, Path, PathBuf};

use tar::{Archive, Entry, EntryType};
use tempfile::TempDir;

use super::CaptureError;
use crate::limits;

/// Maximum files and folders in an archive.
const MAX_ENTRIES: usize = 100_000;
/// Maximum unpacked bytes of an archive.
const MAX_UNPACKED_BYTES: u64 = 512 << 20;

/// Content of a file that may be an archive.
pub(super) enum UnpackedContent {
    /// An unpacked folder, removed on drop.
    Folder(TempDir),
    /// A single compressed file.
    Bytes(Vec<u8>),
    NoArchive,
}

/// Unpacks a tar archive, plain or compressed by gzip, or one compressed file.
pub(super) fn unpack(path: &Path, bytes: &[u8]) -> Result<UnpackedContent, CaptureError> {
    let failed = |problem: String| CaptureError::Archive { path: path.to_owned(), problem };
    let plain = match bytes {
        [0x1f, 0x8b, ..] => Some(read_bounded(flate2::read::MultiGzDecoder::new(bytes)).map_err(failed)?),
        _ => None,
    };
    let is_tar = |bytes: &[u8]| bytes.get(257..262) == Some(b"ustar");
    match plain {
        Some(plain) if is_tar(&plain) => unpack_tar(&plain).map(UnpackedContent::Folder).map_err(failed),
        Some(mut plain) => {
            plain.truncate(limits::TEXT_BYTES);
            Ok(UnpackedContent::Bytes(plain))
        }
        None if is_tar(bytes) => unpack_tar(bytes).map(UnpackedContent::Folder).map_err(failed),
        None => Ok(UnpackedContent::NoArchive),
    }
}

/// Returns the archive's only folder, or the root if there are several entries.
pub(super) fn content_root(unpacked: &Path) -> PathBuf {
    let mut entries = std::fs::read_dir(unpacked).into_iter().flatten().filter_map(Result::ok);
    match (entries.next(), entries.next()) {
        (Some(only), None) if only.path().is_dir() && !is_tree_root(&only.path()) => only.path(),
        _ => unpacked.to_owned(),
    }
}

/// Whether a folder is the root of a tree: a lone `sys` or `proc` is not a wrapping folder.
fn is_tree_root(folder: &Path) -> bool {
    matches!(folder.file_name().and_then(|name| name.to_str()), Some("sys" | "proc"))
}

fn read_bounded(reader: impl Read) -> Result<Vec<u8>, String> {
    let mut bytes = Vec::new();
    reader.take(MAX_UNPACKED_BYTES + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > MAX_UNPACKED_BYTES {
        return Err(format!("it has more than {MAX_UNPACKED_BYTES} bytes"));
    }
    Ok(bytes)
}

fn unpack_tar(bytes: &[u8]) -> Result<TempDir, String> {
    let folder = TempDir::with_prefix("gpupool-capture-").map_err(|error| error.to_string())?;
    let mut archive = Archive::new(Cursor::new(bytes));
    let entries = archive.entries().map_err(|error| error.to_string())?;
    for (number, entry) in entries.enumerate() {
        if number >= MAX_ENTRIES {
            return Err(format!("it has more than {MAX_ENTRIES} files"));
        }
        let mut entry = entry.map_err(|error| error.to_string())?;
        if is_harmless(&entry) {
            // A file that cannot be written is simply missing, as it may be on a machine.
            let _ = entry.unpack_in(folder.path());
        }
    }
    remove_escaping_links(folder.path()).map_err(|error| error.to_string())?;
    Ok(folder)
}

/// Removes links that leave the folder through other links, which their paths alone do not show.
fn remove_escaping_links(folder: &Path) -> io::Result<()> {
    let inside = folder.canonicalize()?;
    let mut folders = vec![inside.clone()];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            let escapes = || entry.path().canonicalize().is_ok_and(|target| !target.starts_with(&inside));
            if kind.is_dir() {
                folders.push(entry.path());
            } else if kind.is_symlink() && escapes() {
                fs::remove_file(entry.path())?;
            }
        }
    }
    Ok(())
}

/// Whether an entry is a file, a folder, or a link that stays inside.
fn is_harmless<R: Read>(entry: &Entry<'_, R>) -> bool {
    match entry.header().entry_type() {
        EntryType::Regular | EntryType::Directory => entry.size() <= limits::TEXT_BYTES as u64,
        EntryType::Symlink => {
            let (Ok(path), Ok(Some(target))) = (entry.path(), entry.link_name()) else { return false };
            stays_inside(&path, &target)
        }
        _ => false,
    }
}

/// Whether a relative link in `path` stays inside the unpacked folder.
fn stays_inside(path: &Path, target: &Path) -> bool {
    let mut depth: i64 = path.components().filter(|part| matches!(part, Component::Normal(_))).count() as i64 - 1;
    for part in target.components() {
        match part {
            Component::Normal(_) => depth += 1,
            Component::ParentDir => depth -= 1,
            Component::CurDir => {}
            Component::RootDir | Component::Prefix(_) => return false,
        }
        if depth < 0 {
            return false;
        }
    }
    true
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    fn archive(links: &[(&str, &str)]) -> Vec<u8> {
        let mut builder = tar::Builder::new(Vec::new());
        let mut header = tar::Header::new_ustar();
        header.set_size(3);
        header.set_mode(0o644);
        builder.append_data(&mut header, "box/sys/file", &b"abc"[..]).unwrap();
        for (path, target) in links {
            let mut header = tar::Header::new_ustar();
            header.set_entry_type(EntryType::Symlink);
            header.set_size(0);
            builder.append_link(&mut header, path, target).unwrap();
        }
        builder.into_inner().unwrap()
    }

    fn folder(bytes: &[u8]) -> TempDir {
        match unpack(Path::new("a.tar"), bytes) {
            Ok(UnpackedContent::Folder(folder)) => folder,
            _ => panic!("not unpacked"),
        }
    }

    #[test]
    fn an_archive_is_unpacked_plain_or_compressed() {
        let plain = archive(&[]);
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&plain).unwrap();
        for bytes in [plain, gzip.finish().unwrap()] {
            let unpacked = folder(&bytes);
            assert_eq!(std::fs::read(content_root(unpacked.path()).join("sys/file")).unwrap(), b"abc");
        }
    }

    #[test]
    fn a_link_out_of_the_archive_is_removed() {
        let unpacked = folder(&archive(&[
            ("box/in", "sys/file"),
            ("box/out", "../../../etc/passwd"),
            ("box/absolute", "/etc/passwd"),
            ("box/sneaky", "sys/../../../etc/passwd"),
        ]));
        let names: Vec<_> =
            std::fs::read_dir(unpacked.path().join("box")).unwrap().map(|e| e.unwrap().file_name()).collect();
        assert_eq!(names.len(), 2, "{names:?}");
    }

    #[test]
    fn links_that_leave_the_archive_together_are_removed() {
        let unpacked = folder(&archive(&[
            ("box/sys/root", "../.."),
            ("box/sys/root/way", "../../etc"),
            ("box/sys/other", "root/../../etc"),
            ("box/dangling", "nothing/here"),
        ]));
        assert!(unpacked.path().join("box/sys/root/box/sys/file").is_file());
        for out in ["way", "box/sys/other"] {
            assert!(!unpacked.path().join(out).exists(), "{out}");
        }
        assert!(unpacked.path().join("box/dangling").is_symlink());
    }

    #[test]
    fn a_compressed_text_has_the_same_size_limit() {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(&vec![b' '; limits::TEXT_BYTES + 1]).unwrap();
        match unpack(Path::new("a.gz"), &gzip.finish().unwrap()) {
            Ok(UnpackedContent::Bytes(bytes)) => assert_eq!(bytes.len(), limits::TEXT_BYTES),
            _ => panic!("not unpacked"),
        }
    }

    #[test]
    fn a_broken_archive_is_an_error_but_a_text_is_not_an_archive() {
        assert!(matches!(unpack(Path::new("a"), b"\x1f\x8bnonsense"), Err(CaptureError::Archive { .. })));
        assert!(matches!(unpack(Path::new("a"), b"GPU 0"), Ok(UnpackedContent::NoArchive)));
    }
}
