//! The hand-over of the engine between the caller and its relief, on a scheduler that tries many orders of both threads and
//! fails where one of them waits for ever.

#[path = "../../src/shift.rs"]
mod shift;

pub mod limits {
    pub const AWAY: std::time::Duration = std::time::Duration::ZERO;
}

/// Locks of the scheduler. Its own condition variable never times out; here a wait with a time limit may end at any moment.
pub mod sync {
    use std::ops::{Deref, DerefMut};
    use std::sync::LockResult;
    pub use std::sync::PoisonError;
    use std::time::Duration;

    use shuttle::rand::Rng as _;

    #[derive(Debug, Default)]
    pub struct Mutex<T>(shuttle::sync::Mutex<T>);

    pub struct MutexGuard<'a, T> {
        mutex: &'a Mutex<T>,
        guard: shuttle::sync::MutexGuard<'a, T>,
    }

    #[derive(Debug, Default)]
    pub struct Condvar(shuttle::sync::Condvar);

    impl<T> Mutex<T> {
        pub fn lock(&self) -> LockResult<MutexGuard<'_, T>> {
            Ok(MutexGuard { mutex: self, guard: self.0.lock().unwrap() })
        }
    }

    impl Condvar {
        pub fn wait<'a, T>(&self, guard: MutexGuard<'a, T>) -> LockResult<MutexGuard<'a, T>> {
            Ok(MutexGuard { mutex: guard.mutex, guard: self.0.wait(guard.guard).unwrap() })
        }

        pub fn wait_timeout<'a, T>(
            &self,
            guard: MutexGuard<'a, T>,
            _: Duration,
        ) -> LockResult<(MutexGuard<'a, T>, ())> {
            let mutex = guard.mutex;
            drop(guard);
            for _ in 0..shuttle::rand::thread_rng().gen_range(0..4) {
                shuttle::thread::yield_now();
            }
            let Ok(guard) = mutex.lock() else { unreachable!("it is never poisoned") };
            Ok((guard, ()))
        }

        pub fn notify_all(&self) {
            self.0.notify_all();
        }
    }

    impl<T> Deref for MutexGuard<'_, T> {
        type Target = T;

        fn deref(&self) -> &T {
            &self.guard
        }
    }

    impl<T> DerefMut for MutexGuard<'_, T> {
        fn deref_mut(&mut self) -> &mut T {
            &mut self.guard
        }
    }
}

use std::sync::Arc;

use shift::Shift;

/// A flag that threads wait for: the bell that wakes a sleeping engine, or that the relief has driven.
#[derive(Default)]
struct Flag {
    is_up: shuttle::sync::Mutex<bool>,
    changed: shuttle::sync::Condvar,
}

impl Flag {
    fn raise(&self) {
        *self.is_up.lock().unwrap() = true;
        self.changed.notify_all();
    }

    fn lower(&self) -> bool {
        std::mem::take(&mut *self.is_up.lock().unwrap())
    }

    /// Waits until it is up, and lowers it.
    fn take(&self) {
        let mut is_up = self.is_up.lock().unwrap();
        while !*is_up {
            is_up = self.changed.wait(is_up).unwrap();
        }
        *is_up = false;
    }
}

/// A run as far as the hand-over goes: an engine that sleeps until the bell rings.
#[derive(Default)]
struct Run {
    shift: Shift,
    engine: shuttle::sync::Mutex<()>,
    bell: Flag,
    has_relief_driven: Flag,
}

impl Run {
    /// As the caller does: drives without sleeping, and leaves.
    fn visit(&self) {
        if self.shift.caller_enters() {
            self.bell.raise();
        }
        let engine = self.engine.lock().unwrap();
        self.bell.lower();
        drop(engine);
        self.shift.caller_leaves();
    }

    fn relieve(&self) {
        self.shift.relieve(|| {
            let _engine = self.engine.lock().unwrap();
            while !self.shift.is_relief_done() {
                self.has_relief_driven.raise();
                self.bell.take();
            }
            false
        });
    }
}

/// The caller comes and goes; while it is away for long, in a callback, the relief drives; when it comes back the relief
/// makes way, also where it sleeps; and the end ends it.
fn story() {
    let run = Arc::new(Run::default());
    let relief = {
        let run = Arc::clone(&run);
        shuttle::thread::spawn(move || run.relieve())
    };
    run.visit();
    run.visit();
    run.has_relief_driven.lower();
    // Nothing else ends this wait: the callback takes as long as it takes until the relief drives.
    run.visit();
    run.has_relief_driven.take();
    run.visit();
    run.shift.end();
    run.bell.raise();
    relief.join().unwrap();
}

#[test]
fn the_caller_gets_the_engine_back_and_the_relief_drives_while_it_is_away() {
    shuttle::check_random(story, 5_000);
    shuttle::check_pct(story, 5_000, 3);
}
