//! How many arguments a file holds, told before it is read: only of a regular file, and only of one that is read quickly.

use std::fs::File;
use std::io::Seek;
use std::os::unix::fs::FileExt;

use crate::map::limits::COUNTED_BYTES;

/// From where the file stands to its end.
pub(super) fn ends(mut file: &File, separator: u8) -> Option<u64> {
    let about = file.metadata().ok()?;
    if !about.is_file() || about.len() > COUNTED_BYTES {
        return None;
    }
    let mut at = file.stream_position().ok()?;
    let mut piece = vec![0; 1 << 16];
    let (mut count, mut last) = (0, separator);
    loop {
        let length = file.read_at(&mut piece, at).ok()?;
        let Some(end) = piece[..length].last() else { break };
        last = *end;
        count += piece[..length].iter().filter(|byte| **byte == separator).count() as u64;
        at += length as u64;
        // It grows while it is read: then nobody knows.
        if at > COUNTED_BYTES {
            return None;
        }
    }
    Some(count + u64::from(last != separator))
}
