//! How threads of ours tell an event loop something without waiting for the interpreter, which a program may hold for long.
//!
//! What is for the loop is put into its mailbox and a bell is rung, a descriptor the loop watches; the loop empties the mailbox
//! in its own thread. A loop that cannot watch descriptors is told by `call_soon_threadsafe`.

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::exceptions::{PyAttributeError, PyNotImplementedError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};
use rustix::event::{EventfdFlags, eventfd};
use tokio::task::block_in_place;

use crate::attaching::attached;

/// How long letters may lie before it is looked whether their loop is closed.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Done by the loop, in its thread.
type Letter = Box<dyn FnOnce(Python<'_>) + Send>;

/// Where an event loop finds what is for it. Clones are the same mailbox.
#[pyclass(frozen)]
#[derive(Clone)]
pub(crate) struct Mailbox {
    shared: Arc<Shared>,
}

struct Shared {
    contents: Mutex<Contents>,
    /// What the loop watches, if it can.
    bell: Option<OwnedFd>,
    to_loop: Py<PyWeakrefReference>,
    process: u32,
}

#[derive(Default)]
struct Contents {
    letters: Vec<Letter>,
    /// Whether somebody looks after letters that nobody takes.
    is_looked_after: bool,
}

impl Mailbox {
    /// The mailbox of the loop that runs in this thread.
    pub(crate) fn of(running: &Bound<'_, PyAny>) -> PyResult<Self> {
        static MAILBOXES: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
        let py = running.py();
        let make = || py.import("weakref")?.call_method0("WeakKeyDictionary").map(Bound::unbind);
        let mailboxes = MAILBOXES.get_or_try_init(py, make)?.bind(py);
        let known = mailboxes.call_method1("get", (running,))?;
        // That of a forked child's parent is left to the parent.
        match known.cast::<Self>().ok().filter(|known| known.get().shared.process == std::process::id()) {
            Some(known) => Ok(known.get().clone()),
            None => {
                let made = Self::new(running)?;
                mailboxes.set_item(running, made.clone())?;
                Ok(made)
            }
        }
    }

    fn new(running: &Bound<'_, PyAny>) -> PyResult<Self> {
        let with = |bell| -> PyResult<Self> {
            let (contents, process) = (Mutex::default(), std::process::id());
            let to_loop = PyWeakrefReference::new(running)?.unbind();
            Ok(Self { shared: Arc::new(Shared { contents, bell, to_loop, process }) })
        };
        let bell = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(std::io::Error::from)?;
        let number = std::os::fd::AsRawFd::as_raw_fd(&bell);
        let made = with(Some(bell))?;
        match running.call_method1("add_reader", (number, made.clone())) {
            Ok(_) => Ok(made),
            Err(error) if cannot_watch(running.py(), &error) => with(None),
            Err(error) => Err(error),
        }
    }

    /// Has the loop do something. From a task of ours, whatever the interpreter does.
    pub(crate) fn post(&self, letter: impl FnOnce(Python<'_>) + Send + 'static) {
        let mut contents = self.contents();
        let was_empty = contents.letters.is_empty();
        contents.letters.push(Box::new(letter));
        let was_looked_after = std::mem::replace(&mut contents.is_looked_after, true);
        drop(contents);
        if was_empty {
            self.ring();
        }
        if !was_looked_after {
            tokio::spawn(self.clone().look_after());
        }
    }

    fn ring(&self) {
        match &self.shared.bell {
            // A counter of 64 bits is not full.
            Some(bell) => drop(rustix::io::write(bell, &1_u64.to_ne_bytes())),
            None => drop(block_in_place(|| {
                // A loop that is gone or closed is told nothing any more.
                attached(|py| self.in_loop(py)?.call_method1("call_soon_threadsafe", (self.clone(),)).ok().map(drop))
            })),
        }
    }

    /// Drops what lies there for a loop that is closed, with all it holds.
    async fn look_after(self) {
        loop {
            tokio::time::sleep(LOOK_AGAIN).await;
            if self.is_emptied() {
                return;
            }
            let is_over = block_in_place(|| attached(|py| self.is_over(py))).unwrap_or(true);
            if is_over {
                let letters = std::mem::take(&mut self.contents().letters);
                drop(letters);
            }
        }
    }

    fn is_emptied(&self) -> bool {
        let mut contents = self.contents();
        contents.is_looked_after = !contents.letters.is_empty();
        !contents.is_looked_after
    }

    fn is_over(&self, py: Python<'_>) -> bool {
        let is_closed = |running: Bound<'_, PyAny>| running.call_method0("is_closed")?.is_truthy();
        self.in_loop(py).is_none_or(|running| is_closed(running).unwrap_or(false))
    }

    fn in_loop<'py>(&self, py: Python<'py>) -> Option<Bound<'py, PyAny>> {
        self.shared.to_loop.bind(py).upgrade()
    }

    fn contents(&self) -> MutexGuard<'_, Contents> {
        self.shared.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[pymethods]
impl Mailbox {
    /// Does what is there, in the loop.
    fn __call__(&self, py: Python<'_>) {
        // In a forked child, what is there is for its parent.
        if self.shared.process != std::process::id() {
            return;
        }
        if let Some(bell) = &self.shared.bell {
            // Before the mailbox is emptied: what comes after that rings anew.
            let _ = rustix::io::read(bell, &mut [0; 8]);
        }
        let letters = std::mem::take(&mut self.contents().letters);
        for letter in letters {
            letter(py);
        }
    }
}

fn cannot_watch(py: Python<'_>, error: &PyErr) -> bool {
    error.is_instance_of::<PyNotImplementedError>(py) || error.is_instance_of::<PyAttributeError>(py)
}
