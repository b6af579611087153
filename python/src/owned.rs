//! What belongs to one process: a forked child has a copy of it, which it neither uses nor drops.
//!
//! The threads behind such a thing are the parent's. Dropping a copy of it could wait for a lock that one of them held at the
//! fork, and could give back what the parent still uses; so the child leaves it where it is.

use std::mem::ManuallyDrop;

use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::runtime;

/// A value of the process that made it.
pub(crate) struct Owned<T> {
    value: ManuallyDrop<T>,
    process: u32,
    /// What it is called when a child wants to use it.
    name: &'static str,
}

impl<T> Owned<T> {
    /// Makes a value this process' own.
    pub fn new(name: &'static str, value: T) -> Self {
        Self { value: ManuallyDrop::new(value), process: std::process::id(), name }
    }

    /// The value; an error in any other process than the one that made it.
    pub fn get(&self) -> PyResult<&T> {
        if self.is_ours() {
            return Ok(&self.value);
        }
        let (name, process) = (self.name, self.process);
        Err(PyRuntimeError::new_err(format!(
            "this {name} was started in another process (pid {process}) and stays there; make a new one after a fork"
        )))
    }

    /// Whether this process made it.
    pub fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }
}

impl<T> Drop for Owned<T> {
    #[allow(unsafe_code, reason = "dropped by hand, because a forked child must not")]
    fn drop(&mut self) {
        if !self.is_ours() {
            return;
        }
        // What is dropped may leave tasks behind that give something back.
        let handle = runtime::handle();
        let _entered = handle.as_ref().ok().map(|handle| handle.enter());
        // SAFETY: nobody uses it after this, and it is dropped only here.
        unsafe { ManuallyDrop::drop(&mut self.value) };
    }
}
