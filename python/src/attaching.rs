//! How a thread of ours gets hold of the interpreter, and how that ends before the interpreter does.
//!
//! An interpreter that ends also ends, from within, every foreign thread that waits for it, which takes the whole process
//! down. So the last thing before the end is that our threads are kept out and those inside are waited for.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use pyo3::prelude::*;

use crate::counting::ProcessCount;

static INSIDE: ProcessCount = ProcessCount::new();
static IS_CLOSED: AtomicBool = AtomicBool::new(false);

/// How long the end waits for a function of the program that one of our threads still runs.
const PATIENCE: Duration = Duration::from_secs(5);
const LOOK_AGAIN: Duration = Duration::from_millis(1);

/// Runs something that needs the interpreter; `None` once it is about to end.
pub(crate) fn attached<T>(run: impl FnOnce(Python<'_>) -> T) -> Option<T> {
    INSIDE.change(1);
    let _inside = Inside;
    if IS_CLOSED.load(Ordering::SeqCst) {
        return None;
    }
    Python::try_attach(run)
}

/// Has Python keep our threads out before it ends: registered first, it is called last.
pub(crate) fn watch(module: &Bound<'_, PyModule>) -> PyResult<()> {
    let keep_out = wrap_pyfunction!(keep_out, module)?;
    module.py().import("atexit")?.call_method1("register", (keep_out,)).map(drop)
}

/// Keeps our threads out of the interpreter from now on, and waits until none is inside.
#[pyfunction]
fn keep_out(py: Python<'_>) {
    IS_CLOSED.store(true, Ordering::SeqCst);
    let until = Instant::now() + PATIENCE;
    py.detach(|| {
        while INSIDE.get() > 0 && Instant::now() < until {
            std::thread::sleep(LOOK_AGAIN);
        }
    });
}

struct Inside;

impl Drop for Inside {
    fn drop(&mut self) {
        INSIDE.change(-1);
    }
}
