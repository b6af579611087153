//! The last line: how long it waited and ran, on what, and how it ended.

use std::time::Instant;

use gpupool_api::lease::Lease;

use super::amounts::shown;

/// What there is to tell of one run.
#[derive(Debug)]
pub(super) struct Ran {
    asked: Instant,
    granted: Instant,
    begun: Option<Instant>,
    on: String,
}

impl Ran {
    /// Granted now, asked for then.
    pub fn new(asked: Instant, lease: &Lease) -> Self {
        Self { asked, granted: Instant::now(), begun: None, on: devices(lease) }
    }

    /// The command runs.
    pub fn begins(&mut self) {
        self.begun = Some(Instant::now());
    }

    /// The line.
    pub fn summary(&self, code: u8) -> String {
        let waited = shown(self.granted.duration_since(self.asked));
        match self.begun {
            Some(begun) => format!("waited {waited}, ran {} on {}, exit code {code}", shown(begun.elapsed()), self.on),
            None => format!("waited {waited} for {}, did not run, exit code {code}", self.on),
        }
    }
}

/// `GPU 0 (H100, half)`.
fn devices(lease: &Lease) -> String {
    if lease.devices.is_empty() {
        return "no GPU".into();
    }
    let each = lease.devices.iter().map(|device| {
        let part = if device.fraction < 1.0 { format!("{} of ", device.fraction) } else { String::new() };
        format!("{part}GPU {} ({})", device.gpu_id, device.name)
    });
    each.collect::<Vec<_>>().join(", ")
}
