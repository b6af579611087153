//! A guard that ends the process when the thread that holds it panics.
//!
//! Without its authority or its sampler the agent would still respond, but do nothing. The state is durable, so the
//! service manager starts a new agent, which continues where this one stopped. A guard rather than `panic = "abort"`:
//! elsewhere a panic is contained (a source of readings, one request).

/// Guard with the name of its thread, which the last message names.
pub(crate) struct AbortOnPanic(pub &'static str);

impl Drop for AbortOnPanic {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // Written directly, because another thread may write the log and would not get to it.
            let last_words = format!("gpupool: the {} thread panicked; the agent ends\n", self.0);
            let _ = std::io::Write::write_all(&mut std::io::stderr(), last_words.as_bytes());
            std::process::abort();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;

    const IN_CHILD: &str = "GPUPOOL_TEST_PANICS_UNDER_GUARD";

    #[test]
    fn a_panic_under_the_guard_ends_the_process_with_its_last_words() {
        if std::env::var_os(IN_CHILD).is_some() {
            let thread = std::thread::spawn(|| {
                let _guard = AbortOnPanic("sampler");
                panic!("on purpose");
            });
            let _ = thread.join();
            std::process::exit(0);
        }
        let name = "abort_on_panic::tests::a_panic_under_the_guard_ends_the_process_with_its_last_words";
        let mut child = Command::new(std::env::current_exe().unwrap());
        let ended = child.args(["--exact", "--nocapture", name]).env(IN_CHILD, "1").output().unwrap();
        let message = String::from_utf8_lossy(&ended.stderr);
        assert_eq!(ended.status.signal(), Some(libc::SIGABRT), "{message}");
        assert!(message.contains("gpupool: the sampler thread panicked; the agent ends"), "{message}");
    }
}
