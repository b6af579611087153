//! How threads of ours tell an event loop something without waiting for the interpreter, which a program may hold for long.
//!
//! What is for the loop is put into its mailbox and a bell is rung, a descriptor the loop watches; the loop empties the mailbox
//! in its own thread. A loop that cannot watch descriptors is told by `call_soon_threadsafe`. A loop also polls futures that
//! are answered soon, in its own thread ([`Mailbox::carry`]).

mod carried;
mod sockets;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use pyo3::exceptions::{PyAttributeError, PyNotImplementedError};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyWeakrefMethods, PyWeakrefReference};
use tokio::runtime::Handle;
use tokio::task::block_in_place;

use crate::runtime;
use crate::runtime::attached;

pub(crate) use carried::Carried;
use sockets::Sockets;

/// How long letters may lie before it is looked whether their loop is closed, and how long a loop polls a future before the
/// runtime goes on with it.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// Done by the loop, in its thread.
pub(crate) type Letter = Box<dyn FnOnce(Python<'_>) + Send>;

/// Where an event loop finds what is for it. Clones are the same mailbox.
#[pyclass(frozen)]
#[derive(Clone)]
pub(crate) struct Mailbox {
    shared: Arc<Shared>,
}

struct Shared {
    contents: Mutex<Contents>,
    /// What the loop watches, if it can.
    sockets: Option<Arc<Sockets>>,
    to_loop: Py<PyWeakrefReference>,
    runtime: Handle,
    process: u32,
}

#[derive(Default)]
struct Contents {
    letters: Vec<Letter>,
    /// Futures that are to be polled.
    woken: Vec<Arc<Carried>>,
    /// The loop is at it, and sees what is put here.
    is_being_emptied: bool,
    /// Futures that the loop polls, by number.
    carried: HashMap<u64, Arc<Carried>>,
    last_carried: u64,
    /// Whether somebody looks after letters that nobody takes.
    has_letters_looked_after: bool,
    /// Whether somebody looks after futures that take long.
    has_carried_looked_after: bool,
}

impl Contents {
    fn is_empty(&self) -> bool {
        self.letters.is_empty() && self.woken.is_empty()
    }
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
        let with = |sockets| -> PyResult<Self> {
            let (contents, runtime, process) = (Mutex::default(), runtime::handle()?, std::process::id());
            let to_loop = PyWeakrefReference::new(running)?.unbind();
            Ok(Self { shared: Arc::new(Shared { contents, sockets, to_loop, runtime, process }) })
        };
        let sockets = Arc::new(Sockets::new()?);
        let made = with(Some(sockets.clone()))?;
        match running.call_method1("add_reader", (sockets.number(), made.clone())) {
            Ok(_) => Ok(made),
            Err(error) if cannot_watch(running.py(), &error) => with(None),
            Err(error) => Err(error),
        }
    }

    /// Has the loop do something, whatever the interpreter does.
    pub(crate) fn post(&self, letter: impl FnOnce(Python<'_>) + Send + 'static) {
        self.put(|contents| contents.letters.push(Box::new(letter)));
    }

    /// Carries a future in the thread of the loop, in which this is called; what it comes to is done there. `None` where it
    /// came to its end at once.
    pub(crate) fn carry(
        &self,
        py: Python<'_>,
        coming: impl Future<Output = Letter> + Send + 'static,
    ) -> Option<Arc<Carried>> {
        let mut contents = self.contents();
        contents.last_carried += 1;
        let carried = Carried::new(contents.last_carried, self.clone(), Box::pin(coming));
        contents.carried.insert(carried.number, carried.clone());
        let was_looked_after = std::mem::replace(&mut contents.has_carried_looked_after, true);
        drop(contents);
        if !was_looked_after {
            self.shared.runtime.spawn(self.clone().look_after_carried());
        }
        if self.go_on(py, &carried) { None } else { Some(carried) }
    }

    /// Whether futures can be polled by the loop.
    pub(crate) fn carries(&self) -> bool {
        self.shared.sockets.is_some()
    }

    /// Polls a future; says whether it came to its end.
    fn go_on(&self, py: Python<'_>, carried: &Arc<Carried>) -> bool {
        let Some(letter) = carried.poll(&self.shared) else { return false };
        self.contents().carried.remove(&carried.number);
        letter(py);
        true
    }

    /// A future is to be polled.
    fn woken(&self, carried: Arc<Carried>) {
        self.put(|contents| contents.woken.push(carried));
    }

    fn put(&self, put: impl FnOnce(&mut Contents)) {
        let mut contents = self.contents();
        let was_seen_to = contents.is_being_emptied || !contents.is_empty();
        put(&mut contents);
        let is_left_alone = !contents.letters.is_empty() && !contents.has_letters_looked_after;
        contents.has_letters_looked_after |= is_left_alone;
        drop(contents);
        if !was_seen_to {
            self.ring();
        }
        if is_left_alone {
            self.shared.runtime.spawn(self.clone().look_after_letters());
        }
    }

    fn ring(&self) {
        match &self.shared.sockets {
            Some(sockets) => sockets.ring(),
            None => drop(block_in_place(|| {
                // A loop that is gone or closed is told nothing any more.
                attached(|py| self.in_loop(py)?.call_method1("call_soon_threadsafe", (self.clone(),)).ok().map(drop))
            })),
        }
    }

    /// Drops letters that lie there for a loop that is closed, with all they hold.
    async fn look_after_letters(self) {
        loop {
            tokio::time::sleep(LOOK_AGAIN).await;
            let mut contents = self.contents();
            contents.has_letters_looked_after = !contents.letters.is_empty();
            if !contents.has_letters_looked_after {
                return;
            }
            drop(contents);
            let is_over = block_in_place(|| attached(|py| self.is_over(py))).unwrap_or(true);
            if is_over {
                let letters = std::mem::take(&mut self.contents().letters);
                drop(letters);
            }
        }
    }

    /// Has the runtime go on with futures that take long: the loop may be closed, or held up.
    async fn look_after_carried(self) {
        loop {
            tokio::time::sleep(LOOK_AGAIN).await;
            for carried in self.taking_long() {
                carried.hand_over(&self.shared.runtime);
            }
            let mut contents = self.contents();
            contents.has_carried_looked_after = !contents.carried.is_empty();
            if !contents.has_carried_looked_after {
                return;
            }
        }
    }

    fn taking_long(&self) -> Vec<Arc<Carried>> {
        let takes_long = |carried: &Arc<Carried>| carried.since.elapsed() >= LOOK_AGAIN;
        let mut contents = self.contents();
        contents.woken.retain(|carried| !takes_long(carried));
        contents.carried.extract_if(|_, carried| takes_long(carried)).map(|(_, carried)| carried).collect()
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
        self.contents().is_being_emptied = true;
        // Before the mailbox is emptied: what comes after that rings anew.
        if let Some(sockets) = &self.shared.sockets {
            sockets.heard();
        }
        let mut contents = self.contents();
        let (letters, woken) = (std::mem::take(&mut contents.letters), std::mem::take(&mut contents.woken));
        drop(contents);
        for letter in letters {
            letter(py);
        }
        for carried in woken {
            self.go_on(py, &carried);
        }
        let mut contents = self.contents();
        contents.is_being_emptied = false;
        let came = !contents.is_empty();
        drop(contents);
        if came {
            self.ring();
        }
    }
}

fn cannot_watch(py: Python<'_>, error: &PyErr) -> bool {
    error.is_instance_of::<PyNotImplementedError>(py) || error.is_instance_of::<PyAttributeError>(py)
}
