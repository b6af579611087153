//! How large and long a chaos is, and how to see it again.

use std::time::{SystemTime, UNIX_EPOCH};

/// A run of chaos: as large and long as a test has it, or as the environment says. Where the test fails, it says how to see it
/// again.
#[derive(Debug)]
pub struct Chaos {
    story: &'static str,
    /// How many take part.
    pub clients: u64,
    /// For how long.
    pub secs: u64,
    /// What its choices come from.
    pub seed: u64,
}

impl Chaos {
    /// A run of the chaos in this test program.
    pub fn new(story: &'static str, clients: u64, secs: u64) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().subsec_nanos();
        Self {
            story,
            clients: set("GPUPOOL_CHAOS_CLIENTS", clients),
            secs: set("GPUPOOL_CHAOS_SECS", secs),
            seed: set("GPUPOOL_CHAOS_SEED", now.into()),
        }
    }
}

impl Drop for Chaos {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let Self { story, clients, secs, seed } = self;
            eprintln!(
                "to see it again: GPUPOOL_CHAOS_SEED={seed} GPUPOOL_CHAOS_CLIENTS={clients} GPUPOOL_CHAOS_SECS={secs} \
                 cargo test --workspace --test {story} chaos"
            );
        }
    }
}

fn set(variable: &str, default: u64) -> u64 {
    let Ok(text) = std::env::var(variable) else { return default };
    text.parse().unwrap_or_else(|_| panic!("{variable} is {text:?}, and must be a whole number"))
}

// Chance from a seed, so that a failure can be seen again.

/// Numbers that look random (SplitMix64).
#[derive(Debug, Clone)]
pub struct Chance(u64);

impl Chance {
    /// From a seed.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// A further source, independent of this one.
    pub fn branch(&mut self) -> Self {
        Self(self.next())
    }

    /// The next number.
    #[allow(clippy::should_implement_trait, reason = "it never ends, and is no iterator")]
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// From 0 up to, and without, `end`.
    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end
    }

    /// True in so many of a hundred cases.
    pub fn percent(&mut self, percent: u64) -> bool {
        self.below(100) < percent
    }

    /// One of these.
    pub fn pick<'a, T>(&mut self, from: &'a [T]) -> &'a T {
        &from[self.below(from.len() as u64) as usize]
    }
}
