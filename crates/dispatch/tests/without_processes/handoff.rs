//! Handoff of the engine between the caller and the backup driver, on a scheduler that tries many interleavings of both
//! threads and fails if one of them waits forever.

#[path = "../../src/driver_handoff.rs"]
mod driver_handoff;

pub mod limits {
    pub const BACKUP_DRIVER_DELAY: std::time::Duration = std::time::Duration::ZERO;
}

/// Locks of the scheduler. Its condition variable never times out; here a timed wait may end at any moment.
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

use driver_handoff::DriverHandoff;

/// A flag that threads wait for: a wakeup of the engine or of the backup driver.
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

    /// Waits until the flag is up, and lowers it.
    fn take(&self) {
        let mut is_up = self.is_up.lock().unwrap();
        while !*is_up {
            is_up = self.changed.wait(is_up).unwrap();
        }
        *is_up = false;
    }
}

/// A run reduced to the handoff: an engine that sleeps until its wakeup.
#[derive(Default)]
struct SimulatedRun {
    handoff: DriverHandoff,
    engine: shuttle::sync::Mutex<()>,
    wakeup: Flag,
    has_backup_driven: Flag,
}

impl SimulatedRun {
    /// Drives once as the caller does, without sleeping.
    fn take_turn(&self) {
        if self.handoff.begin_caller_turn() {
            self.wakeup.raise();
        }
        let engine = self.engine.lock().unwrap();
        self.wakeup.lower();
        drop(engine);
        self.handoff.end_caller_turn();
    }

    fn run_backup_driver(&self) {
        self.handoff.run_backup_driver(|| {
            let _engine = self.engine.lock().unwrap();
            while !self.handoff.must_backup_yield() {
                self.has_backup_driven.raise();
                self.wakeup.take();
            }
            false
        });
    }
}

/// The caller drives and leaves repeatedly. The backup drives while the caller is away in a long callback, yields even
/// from sleep when the caller returns, and ends at the end.
fn check_handoff() {
    let run = Arc::new(SimulatedRun::default());
    let backup_driver = {
        let run = Arc::clone(&run);
        shuttle::thread::spawn(move || run.run_backup_driver())
    };
    run.take_turn();
    run.take_turn();
    run.has_backup_driven.lower();
    // Nothing else ends this wait: the callback lasts until the backup drives.
    run.take_turn();
    run.has_backup_driven.take();
    run.take_turn();
    run.handoff.shut_down();
    run.wakeup.raise();
    backup_driver.join().unwrap();
}

#[test]
fn the_caller_gets_the_engine_back_and_the_backup_drives_while_it_is_away() {
    shuttle::check_random(check_handoff, 5_000);
    shuttle::check_pct(check_handoff, 5_000, 3);
}
