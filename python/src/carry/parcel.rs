//! How a packed value looks: a byte that says which of the three it is, and then
//!
//! | | |
//! |---|---|
//! | 0 | a pickle |
//! | 1 | number of parts (u32); for each part 32 bytes of where it is; the bytes of those that are here. The first is the pickle |
//! | 2 | why it could not be packed, in text |
//!
//! Numbers are in native order: both sides are on one machine.

use bytes::{BufMut as _, Bytes, BytesMut};
use pyo3::PyErr;
use pyo3::exceptions::PyValueError;

use crate::memory::Slot;

const PLAIN: u8 = 0;
const PARTS: u8 = 1;
const EXCUSE: u8 = 2;
/// Length, where, whether it is read only, number, where it begins, how long the slot is.
const ENTRY_BYTES: usize = 32;

const IS_LENT: u8 = 1;
const IS_READ_ONLY: u8 = 2;

pub(super) fn plain(stream: &[u8]) -> Bytes {
    with_kind(PLAIN, stream)
}

pub(super) fn excuse(why: &str) -> Bytes {
    with_kind(EXCUSE, why.as_bytes())
}

fn with_kind(kind: u8, rest: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(rest.len() + 1);
    bytes.put_u8(kind);
    bytes.put_slice(rest);
    bytes.freeze()
}

/// Said of bytes that we cannot have packed.
pub(super) fn broken() -> PyErr {
    PyValueError::new_err("what arrived was not packed by this version of gpupool")
}

/// Puts parts together.
pub(super) struct Writer {
    entries: BytesMut,
    inline: BytesMut,
}

impl Writer {
    pub fn new(parts: usize) -> Self {
        let mut entries = BytesMut::with_capacity(5 + parts * ENTRY_BYTES);
        entries.put_u8(PARTS);
        entries.put_u32_ne(u32::try_from(parts).unwrap_or(u32::MAX));
        Self { entries, inline: BytesMut::new() }
    }

    pub fn inline(&mut self, bytes: &[u8], is_read_only: bool) {
        let nowhere = Slot { number: 0, offset: 0, capacity: 0 };
        self.entry(bytes.len() as u64, if is_read_only { IS_READ_ONLY } else { 0 }, nowhere);
        self.inline.put_slice(bytes);
    }

    pub fn lent(&mut self, slot: Slot, length: u64, is_read_only: bool) {
        self.entry(length, IS_LENT | if is_read_only { IS_READ_ONLY } else { 0 }, slot);
    }

    fn entry(&mut self, length: u64, flags: u8, slot: Slot) {
        self.entries.put_u64_ne(length);
        self.entries.put_u32_ne(flags.into());
        self.entries.put_u32_ne(slot.number);
        self.entries.put_u64_ne(slot.offset);
        self.entries.put_u64_ne(slot.capacity);
    }

    pub fn finish(mut self) -> Bytes {
        self.entries.unsplit(self.inline);
        self.entries.freeze()
    }
}

/// A part of a value.
#[derive(Debug)]
pub(super) enum Part<'a> {
    Inline { bytes: &'a [u8], is_read_only: bool },
    Lent { slot: Slot, length: u64, is_read_only: bool },
}

/// Takes a packed value apart.
#[derive(Debug)]
pub(super) enum Reader<'a> {
    Plain(&'a [u8]),
    Parts(Vec<Part<'a>>),
    Excuse(String),
}

impl<'a> Reader<'a> {
    pub fn of(payload: &'a [u8]) -> Result<Self, PyErr> {
        match payload.split_first() {
            Some((&PLAIN, stream)) => Ok(Self::Plain(stream)),
            Some((&EXCUSE, why)) => Ok(Self::Excuse(String::from_utf8_lossy(why).into_owned())),
            Some((&PARTS, rest)) => parts(rest).map(Self::Parts).ok_or_else(broken),
            _ => Err(broken()),
        }
    }
}

fn parts(rest: &[u8]) -> Option<Vec<Part<'_>>> {
    let (count, rest) = rest.split_first_chunk()?;
    let count = usize::try_from(u32::from_ne_bytes(*count)).ok()?;
    let (entries, mut inline) = rest.split_at_checked(count.checked_mul(ENTRY_BYTES)?)?;
    let part = |entry: &[u8]| {
        let long = |at: usize| Some(u64::from_ne_bytes(entry.get(at..at + 8)?.try_into().ok()?));
        let short = |at: usize| Some(u32::from_ne_bytes(entry.get(at..at + 4)?.try_into().ok()?));
        let (length, flags) = (long(0)?, short(8)?);
        let is_read_only = flags & u32::from(IS_READ_ONLY) != 0;
        if flags & u32::from(IS_LENT) != 0 {
            let slot = Slot { number: short(12)?, offset: long(16)?, capacity: long(24)? };
            return Some(Part::Lent { slot, length, is_read_only });
        }
        let (bytes, rest) = inline.split_at_checked(usize::try_from(length).ok()?)?;
        inline = rest;
        Some(Part::Inline { bytes, is_read_only })
    };
    entries.chunks_exact(ENTRY_BYTES).map(part).collect()
}
