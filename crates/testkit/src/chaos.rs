//! How large and long a chaos is, and how to see it again.

use std::time::{SystemTime, UNIX_EPOCH};

/// A run of chaos: as large and long as a test has it, or as the environment says. Where the test fails, it says how to see it
/// again.
#[derive(Debug)]
pub struct ChaosRun {
    story: &'static str,
    /// How many take part.
    pub clients: u64,
    /// For how long.
    pub secs: u64,
    /// What its choices come from.
    pub seed: u64,
}

impl ChaosRun {
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

impl Drop for ChaosRun {
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
