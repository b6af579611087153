//! Size and duration of a chaos test, and the command that repeats it.

use std::time::{SystemTime, UNIX_EPOCH};

/// Size and duration of a chaos test, by default or from the environment. If the test fails, the command that repeats
/// it is printed.
#[derive(Debug)]
pub struct ChaosRun {
    story: &'static str,
    /// Number of participants.
    pub clients: u64,
    /// Duration in seconds.
    pub secs: u64,
    /// Seed of all choices.
    pub seed: u64,
}

impl ChaosRun {
    /// Creates a run for the chaos test in this test program.
    pub fn new(story: &'static str, clients: u64, secs: u64) -> Self {
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().subsec_nanos();
        Self {
            story,
            clients: read_variable("GPUPOOL_CHAOS_CLIENTS", clients),
            secs: read_variable("GPUPOOL_CHAOS_SECS", secs),
            seed: read_variable("GPUPOOL_CHAOS_SEED", now.into()),
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

fn read_variable(variable: &str, default: u64) -> u64 {
    let Ok(text) = std::env::var(variable) else { return default };
    text.parse().unwrap_or_else(|_| panic!("{variable} is {text:?}; it must be a whole number"))
}
