//! Signals are for the threads of the program: there they interrupt what waits.
//!
//! A thread of ours that took one would leave the program's sleeping: Python, for one, runs its handlers in its main thread only,
//! and Ctrl-C in a callback that waits would go unheard.

/// Does something that starts threads: they inherit that they take no signals.
pub(crate) fn untaken_by_threads_of<T>(start: impl FnOnce() -> T) -> T {
    let _blocked = Blocked::all();
    start()
}

/// All signals of this thread wait until this is dropped.
struct Blocked {
    before: libc::sigset_t,
}

impl Blocked {
    #[allow(unsafe_code, reason = "signal masks have no safe wrapper")]
    fn all() -> Self {
        // SAFETY: both sets are local, and filled before they are used.
        unsafe {
            let (mut all, mut before): (libc::sigset_t, libc::sigset_t) = (std::mem::zeroed(), std::mem::zeroed());
            libc::sigfillset(&mut all);
            libc::pthread_sigmask(libc::SIG_BLOCK, &all, &mut before);
            Self { before }
        }
    }
}

impl Drop for Blocked {
    #[allow(unsafe_code, reason = "signal masks have no safe wrapper")]
    fn drop(&mut self) {
        // SAFETY: the set was filled by the system.
        unsafe {
            libc::pthread_sigmask(libc::SIG_SETMASK, &self.before, std::ptr::null_mut());
        }
    }
}
