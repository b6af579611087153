//! The bounds of what statistics keep and say.

/// The most readings of one GPU that are kept, whatever is configured.
pub const HISTORY_READINGS: usize = 10_000;
/// Entries of `CUDA_VISIBLE_DEVICES` that are looked at.
pub const FILTER_TOKENS: usize = 4096;
/// Characters of such an entry that a warning repeats.
pub const FILTER_WORDS: usize = 64;
/// Warnings about such entries.
pub const FILTER_WARNINGS: usize = 32;
/// Digits an entry needs to be taken for the beginning of an id that has no name before it.
pub const FILTER_ID_DIGITS: usize = 8;
