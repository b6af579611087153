//! Identity of the machine. A client compares it to find out whether an agent runs on its own machine.
//!
//! The machine's own id should stay secret, so the published identity is a hash that no other program uses.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Read as _;

use sha2::{Digest, Sha256};

/// Files that hold the machine's id, in order of preference.
const MACHINE_ID_PATHS: [&str; 2] = ["/etc/machine-id", "/var/lib/dbus/machine-id"];

/// Prefix of the hashed text. It makes the hash differ from other programs' hashes of the same id.
const HASH_PREFIX: &[u8] = b"gpupool node 1\0";

/// Number of bytes that are read of an id.
const MAX_ID_BYTES: u64 = 256;

/// Returns the identity of this machine, the same for every program on it, or `None` if the machine has no id.
pub fn machine_id() -> Option<String> {
    MACHINE_ID_PATHS.iter().find_map(|path| {
        let mut text = String::new();
        File::open(path).ok()?.take(MAX_ID_BYTES).read_to_string(&mut text).ok()?;
        hash_of_id(&text)
    })
}

/// Returns the published hash of a machine's id, or `None` if the id is not set.
fn hash_of_id(id: &str) -> Option<String> {
    let id = id.trim();
    if id.is_empty() || id == "uninitialized" {
        return None;
    }
    let mut hash = Sha256::new();
    hash.update(HASH_PREFIX);
    hash.update(id.as_bytes());
    let mut hex = String::with_capacity(64);
    for byte in hash.finalize() {
        // Writing to a string cannot fail.
        let _ = write!(hex, "{byte:02x}");
    }
    Some(hex)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hash_tells_machines_apart_and_hides_the_id() {
        let one = hash_of_id("0123456789abcdef0123456789abcdef\n").unwrap();
        assert_eq!(one.len(), 64);
        assert_eq!(one, hash_of_id("0123456789abcdef0123456789abcdef").unwrap());
        assert_ne!(one, hash_of_id("0123456789abcdef0123456789abcdee").unwrap());
        assert!(!one.contains("0123456789abcdef"));
    }

    #[test]
    fn a_machine_without_an_id_has_no_identity() {
        assert_eq!(hash_of_id(" \n"), None);
        assert_eq!(hash_of_id("uninitialized\n"), None);
    }
}
