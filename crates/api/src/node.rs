//! Which machine this is, so that a client can tell whether an agent runs on its own machine.
//!
//! The machine's own id is meant to stay on it; what is shown is a hash of it that nothing else uses.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Read as _;

use sha2::{Digest, Sha256};

/// Where the machine's id is kept, the usual place first.
const PLACES: [&str; 2] = ["/etc/machine-id", "/var/lib/dbus/machine-id"];

/// Hashed before the id, so that the result is not what another program shows of the same id.
const LABEL: &[u8] = b"gpupool node 1\0";

/// Longest id that is taken for one.
const ID_BYTES: u64 = 256;

/// Identifies this machine, the same for every program on it; `None` where the machine has no id.
pub fn machine_id() -> Option<String> {
    PLACES.iter().find_map(|place| {
        let mut text = String::new();
        File::open(place).ok()?.take(ID_BYTES).read_to_string(&mut text).ok()?;
        shown(&text)
    })
}

/// What is shown of a machine's id; `None` where it has none yet.
fn shown(id: &str) -> Option<String> {
    let id = id.trim();
    if id.is_empty() || id == "uninitialized" {
        return None;
    }
    let mut hash = Sha256::new();
    hash.update(LABEL);
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
    fn a_machine_is_told_from_another_and_its_own_id_is_not_shown() {
        let one = shown("0123456789abcdef0123456789abcdef\n").unwrap();
        assert_eq!(one.len(), 64);
        assert_eq!(one, shown("0123456789abcdef0123456789abcdef").unwrap());
        assert_ne!(one, shown("0123456789abcdef0123456789abcdee").unwrap());
        assert!(!one.contains("0123456789abcdef"));
    }

    #[test]
    fn a_machine_without_an_id_says_so() {
        assert_eq!(shown(" \n"), None);
        assert_eq!(shown("uninitialized\n"), None);
    }
}
