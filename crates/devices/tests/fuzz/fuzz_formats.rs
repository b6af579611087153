//! Whatever the bytes, each reader ends with something sound or with an error.

use std::fmt;
use std::fs;
use std::path::PathBuf;

use proptest::prelude::*;
use proptest::sample::Index;

/// The folder of the long fuzz runs, which holds the seeds.
fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../fuzz")
}

/// Every target with each of its seeds.
fn seeds() -> Vec<(String, Vec<u8>)> {
    let of = |target: String| {
        let files =
            fs::read_dir(folder().join("seeds").join(&target)).unwrap_or_else(|error| panic!("{target}: {error}"));
        let mut paths: Vec<PathBuf> = files.map(|file| file.unwrap().path()).collect();
        paths.sort();
        paths.into_iter().map(move |path| (target.clone(), fs::read(path).unwrap()))
    };
    crate::fuzzed::targets().into_iter().flat_map(of).collect()
}

/// Bytes for a target, which a failure shows as one string.
struct Input {
    target: String,
    bytes: Vec<u8>,
}

impl fmt::Debug for Input {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "run({:?}, b\"{}\")", self.target, self.bytes.escape_ascii())
    }
}

/// A target and bytes that are no more than bytes, words of its format in any order, or a seed that was spoiled.
fn input() -> impl Strategy<Value = Input> {
    prop::sample::select(seeds()).prop_flat_map(|(target, seed)| {
        let bytes = prop_oneof![
            1 => prop::collection::vec(any::<u8>(), 0..300),
            2 => prop::collection::vec(prop::sample::select(words(&seed)), 0..120).prop_map(|words| words.concat()),
            3 => prop::collection::vec(spoil(), 0..8).prop_map(move |spoils| spoiled(seed.clone(), &spoils)),
        ];
        bytes.prop_map(move |bytes| Input { target: target.clone(), bytes })
    })
}

/// The words of a seed, and what is between them.
fn words(seed: &[u8]) -> Vec<Vec<u8>> {
    let words = seed.chunk_by(|a, b| a.is_ascii_alphanumeric() && b.is_ascii_alphanumeric()).map(<[u8]>::to_vec);
    words.chain([b"18446744073709551616".to_vec(), b"\n".to_vec()]).collect()
}

/// Bytes of the longest input.
const LONGEST: usize = 20_000;

#[derive(Debug, Clone)]
enum Spoil {
    Put(Index, u8),
    Cut(Index),
    Repeat(Index, usize, usize),
    Remove(Index, Index),
}

fn spoil() -> impl Strategy<Value = Spoil> {
    prop_oneof![
        4 => (any::<Index>(), any::<u8>()).prop_map(|(at, byte)| Spoil::Put(at, byte)),
        1 => any::<Index>().prop_map(Spoil::Cut),
        // A letter makes a long word, a line many devices.
        4 => (any::<Index>(), prop_oneof![Just(1_usize), 2..200_usize], 1..5000_usize)
            .prop_map(|(from, length, times)| Spoil::Repeat(from, length, times)),
        2 => any::<(Index, Index)>().prop_map(|(from, to)| Spoil::Remove(from, to)),
    ]
}

fn spoiled(mut bytes: Vec<u8>, spoils: &[Spoil]) -> Vec<u8> {
    for spoil in spoils {
        let place = |index: &Index| index.index(bytes.len() + 1);
        let range = |a: &Index, b: &Index| place(a).min(place(b))..place(a).max(place(b));
        match spoil {
            Spoil::Put(at, byte) => {
                let at = place(at);
                bytes.splice(at..bytes.len().min(at + 1), [*byte]);
            }
            Spoil::Cut(at) => bytes.truncate(place(at)),
            Spoil::Repeat(from, length, times) => {
                let from = place(from);
                let range = from..bytes.len().min(from + length);
                let most = LONGEST.saturating_sub(bytes.len()) / range.len().max(1);
                let more = bytes[range.clone()].repeat(most.min(*times));
                bytes.splice(range.end..range.end, more);
            }
            Spoil::Remove(from, to) => drop(bytes.drain(range(from, to))),
        }
    }
    bytes
}

/// At least so many cases that each target has its share; what fails is printed in full, which is all it takes to make
/// a test of it.
fn config() -> ProptestConfig {
    let usual = ProptestConfig::default();
    ProptestConfig { failure_persistence: None, cases: usual.cases.max(1000), ..usual }
}

proptest! {
    #![proptest_config(config())]

    #[test]
    fn whatever_is_read_gives_something_sound_or_an_error(input in input()) {
        crate::fuzzed::run(&input.target, &input.bytes);
    }
}

#[test]
fn no_word_of_a_seed_is_kept_at_any_length() {
    for (target, seed) in seeds() {
        let mut end = 0;
        for word in seed.chunk_by(|a, b| a.is_ascii_alphanumeric() == b.is_ascii_alphanumeric()) {
            end += word.len();
            // More of the same, so that a number stays a number.
            let stretch = word[word.len() - 1..].repeat(2 * gpupool_devices::limits::TEXT_CHARS);
            crate::fuzzed::run(&target, &[&seed[..end], &stretch, &seed[end..]].concat());
        }
    }
}

#[test]
fn every_reader_is_fuzzed_from_seeds_that_it_knows() {
    let declared = fs::read_to_string(folder().join("Cargo.toml")).unwrap();
    for target in crate::fuzzed::targets() {
        assert!(declared.contains(&format!("name = \"{target}\"")), "{target} is no target of fuzz/Cargo.toml");
    }
    for (target, seed) in seeds() {
        crate::fuzzed::run(&target, &seed);
        let Ok(format) = target.parse::<gpupool_devices::capture::CaptureFormat>() else { continue };
        assert!(format.is_tree() || format.matches(&String::from_utf8_lossy(&seed)), "a seed of {target} is none");
    }
}
