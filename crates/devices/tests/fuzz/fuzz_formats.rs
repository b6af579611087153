//! For any input, each reader returns a sound reading or an error.

use std::fmt;
use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use proptest::sample::Index;

/// Returns the folder of the long fuzz runs and their seeds.
fn fuzz_folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
}

/// Returns every target with each of its seeds.
fn seeds() -> Vec<(String, Vec<u8>)> {
    let of = |target: String| {
        let files =
            fs::read_dir(fuzz_folder().join("seeds").join(&target)).unwrap_or_else(|error| panic!("{target}: {error}"));
        let mut paths: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
        paths.sort();
        paths.into_iter().map(move |path| (target.clone(), fs::read(path).unwrap()))
    };
    crate::fuzz_invariants::targets().into_iter().flat_map(of).collect()
}

/// Input of a target, shown as one string on failure.
struct FuzzInput {
    target: String,
    bytes: Vec<u8>,
}

impl fmt::Debug for FuzzInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "run({:?}, b\"{}\")", self.target, self.bytes.escape_ascii())
    }
}

/// Generates a target with random bytes, words of its format in random order, or a damaged seed.
fn fuzz_input() -> impl Strategy<Value = FuzzInput> {
    prop::sample::select(seeds()).prop_flat_map(|(target, seed)| {
        let bytes = prop_oneof![
            1 => prop::collection::vec(any::<u8>(), 0..300),
            2 => prop::collection::vec(prop::sample::select(seed_words(&seed)), 0..120).prop_map(|words| words.concat()),
            3 => prop::collection::vec(damage(), 0..8).prop_map(move |damages| damage_seed(seed.clone(), &damages)),
        ];
        bytes.prop_map(move |bytes| FuzzInput { target: target.clone(), bytes })
    })
}

/// Returns the words of a seed and the text between them.
fn seed_words(seed: &[u8]) -> Vec<Vec<u8>> {
    let words = seed.chunk_by(|a, b| a.is_ascii_alphanumeric() && b.is_ascii_alphanumeric()).map(<[u8]>::to_vec);
    words.chain([b"18446744073709551616".to_vec(), b"\n".to_vec()]).collect()
}

/// Maximum length of an input in bytes.
const MAX_INPUT_BYTES: usize = 20_000;

#[derive(Debug, Clone)]
enum SeedDamage {
    Put(Index, u8),
    Cut(Index),
    Repeat(Index, usize, usize),
    Remove(Index, Index),
}

fn damage() -> impl Strategy<Value = SeedDamage> {
    prop_oneof![
        4 => (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| SeedDamage::Put(at, byte)),
        1 => any::<Index>().prop_map(SeedDamage::Cut),
        // Repeating a letter makes a long word, repeating a line many devices.
        4 => (any::<Index>(), prop_oneof![Just(1_usize), 2..200_usize], 1..5000_usize)
            .prop_map(|(from, length, times)| SeedDamage::Repeat(from, length, times)),
        2 => any::<(Index, Index)>().prop_map(|(from, to)| SeedDamage::Remove(from, to)),
    ]
}

fn damage_seed(mut bytes: Vec<u8>, damages: &[SeedDamage]) -> Vec<u8> {
    for damage in damages {
        let place = |index: &Index| index.index(bytes.len() + 1);
        let range = |a: &Index, b: &Index| place(a).min(place(b))..place(a).max(place(b));
        match damage {
            SeedDamage::Put(at, byte) => {
                let at = place(at);
                bytes.splice(at..bytes.len().min(at + 1), [*byte]);
            }
            SeedDamage::Cut(at) => bytes.truncate(place(at)),
            SeedDamage::Repeat(from, length, times) => {
                let from = place(from);
                let range = from..bytes.len().min(from + length);
                let most = MAX_INPUT_BYTES.saturating_sub(bytes.len()) / range.len().max(1);
                let more = bytes[range.clone()].repeat(most.min(*times));
                bytes.splice(range.end..range.end, more);
            }
            SeedDamage::Remove(from, to) => drop(bytes.drain(range(from, to))),
        }
    }
    bytes
}

/// Runs enough cases for all targets. A failure prints its full input.
fn config() -> ProptestConfig {
    let usual = ProptestConfig::default();
    ProptestConfig { failure_persistence: None, cases: usual.cases.max(1000), ..usual }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn any_input_gives_a_sound_reading_or_an_error(input in fuzz_input()) {
        crate::fuzz_invariants::run(&input.target, &input.bytes);
    }
}

#[test]
fn overlong_words_of_a_seed_are_bounded() {
    for (target, seed) in seeds() {
        let mut end = 0;
        for word in seed.chunk_by(|a, b| a.is_ascii_alphanumeric() == b.is_ascii_alphanumeric()) {
            end += word.len();
            // Repeats the last byte, so that a number stays a number.
            let stretch = word[word.len() - 1..].repeat(2 * gpupool_devices::limits::TEXT_CHARS);
            crate::fuzz_invariants::run(&target, &[&seed[..end], &stretch, &seed[end..]].concat());
        }
    }
}

#[test]
fn every_reader_is_fuzzed_from_seeds_it_recognises() {
    let declared = fs::read_to_string(fuzz_folder().join("Cargo.toml")).unwrap();
    for target in crate::fuzz_invariants::targets() {
        assert!(declared.contains(&format!("name = \"{target}\"")), "{target} is no target of fuzz/Cargo.toml");
    }
    for (target, seed) in seeds() {
        crate::fuzz_invariants::run(&target, &seed);
        let Ok(format) = target.parse::<gpupool_devices::capture::CaptureFormat>() else { continue };
        assert!(format.is_tree() || format.matches(&String::from_utf8_lossy(&seed)), "a seed of {target} is none");
    }
}
