//! A guard that ends the process when the thread that holds it panics.
//!
//! The agent without its authority or its sampler answers, and does nothing. The state is durable, so the service manager
//! starts a new agent, which continues where this one stopped. A guard rather than `panic = "abort"`: elsewhere a panic
//! is contained (a source of readings, one request).

/// The guard, with the name of the thread for the last words.
pub(crate) struct AbortOnPanic(pub &'static str);

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The log may be written by another thread: this line is not to be lost.
            let last_words = format!("gpupool: the {} thread panicked; the agent ends\n", self.0);
            let _ = std::io::Write::write_all(&mut std::io::stderr(), last_words.as_bytes());
            std::process::abort();
        }
    }
}
