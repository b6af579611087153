//! Finding things by the number of their task.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};

use crate::TaskId;

/// Things by the number of their task.
pub(super) type ByTask<T> = HashMap<TaskId, T, BuildHasherDefault<ByNumber>>;

/// Tasks are numbered one after the other: their numbers are spread well enough by one multiplication.
#[derive(Debug, Default)]
pub(super) struct ByNumber(u64);

impl Hasher for ByNumber {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.write_u64(u64::from(*byte));
        }
    }

    fn write_u64(&mut self, number: u64) {
        self.0 = (self.0 ^ number).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(26);
    }
}
