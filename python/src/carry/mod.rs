//! Python values on their way between processes.
//!
//! A value is pickled (protocol 5); large buffers in it, such as those of arrays, are not copied into the pickle but lent in
//! [shared memory](crate::memory), and so is a pickle that is large itself. What comes out at the other end is an array on
//! that memory.

mod buffer;
mod parcel;
mod pickle;

use std::io;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyByteArray, PyBytes, PyList};

use crate::memory::{Borrower, Control, Lender, Lent};
use buffer::View;
use parcel::{Part, Reader, Writer};
pub(crate) use pickle::{Main, Pickle};

/// From this size on a buffer is lent and not sent.
const LARGE: usize = 64 * 1024;

/// Packs and unpacks values for one other side, or for several that share their memory.
#[derive(Debug)]
pub(crate) struct Carrier {
    pickle: Pickle,
    shared: Option<Shared>,
}

#[derive(Debug)]
struct Shared {
    lender: Mutex<Lender>,
    borrower: Borrower,
}

/// A packed value, and what of it was lent.
#[derive(Debug)]
pub(crate) struct Packed {
    pub payload: Bytes,
    pub lent: Vec<Lent>,
}

impl Carrier {
    /// With shared memory, where there is some.
    pub fn new(pickle: Pickle, memory: Option<Arc<OwnedFd>>) -> io::Result<Self> {
        let shared = match memory {
            Some(memory) => {
                let control = Control::of(memory)?;
                let lender = Mutex::new(Lender::new(control.clone())?);
                Some(Shared { lender, borrower: Borrower::new(control) })
            }
            None => None,
        };
        Ok(Self { pickle, shared })
    }

    /// The value, ready to be sent.
    pub fn pack(&self, value: &Bound<'_, PyAny>) -> PyResult<Packed> {
        let (stream, buffers) = self.pickle.dump(value)?;
        let stream = stream.as_bytes();
        if buffers.is_empty() && (stream.len() < LARGE || self.shared.is_none()) {
            return Ok(Packed { payload: parcel::plain(stream), lent: Vec::new() });
        }
        let mut packed = Packing { writer: Writer::new(buffers.len() + 1), lent: Vec::new(), carrier: self };
        packed.add(stream, true);
        for buffer in &buffers {
            let view = View::of(&buffer)?;
            packed.add(view.bytes(), view.is_read_only());
        }
        Ok(Packed { payload: packed.writer.finish(), lent: packed.lent })
    }

    /// What says that a value could not be packed, and why, to whoever unpacks it.
    pub fn excuse(why: &str) -> Bytes {
        parcel::excuse(why)
    }

    /// The value that was packed; an excuse is an error.
    pub fn unpack<'py>(&self, py: Python<'py>, payload: &[u8]) -> PyResult<Bound<'py, PyAny>> {
        match Reader::of(payload)? {
            Reader::Plain(stream) => self.pickle.load(py, PyBytes::new(py, stream).as_any(), None),
            Reader::Excuse(why) => Err(PyValueError::new_err(why)),
            Reader::Parts(parts) => {
                let mut parts = parts.into_iter();
                let stream = parts.next().ok_or_else(parcel::broken)?;
                let stream = self.arrived(py, &stream)?;
                let buffers = PyList::empty(py);
                for part in parts {
                    buffers.append(self.arrived(py, &part)?)?;
                }
                self.pickle.load(py, &stream, Some(&buffers))
            }
        }
    }

    fn arrived<'py>(&self, py: Python<'py>, part: &Part<'_>) -> PyResult<Bound<'py, PyAny>> {
        match *part {
            Part::Inline { bytes, is_read_only: true } => Ok(PyBytes::new(py, bytes).into_any()),
            Part::Inline { bytes, is_read_only: false } => Ok(PyByteArray::new(py, bytes).into_any()),
            Part::Lent { slot, length, is_read_only } => {
                let shared = self.shared.as_ref().ok_or_else(parcel::broken)?;
                buffer::over(py, shared.borrower.take(slot, length)?, length, is_read_only)
            }
        }
    }

    /// What was lent for a task that is over is not taken any more.
    pub fn is_over(&self, lent: &[Lent]) {
        if let Some(shared) = self.shared.as_ref().filter(|_| !lent.is_empty()) {
            let lender = shared.lender();
            lent.iter().for_each(|lent| lender.is_over(*lent));
        }
    }

    /// A process of the other side is gone: what it had of ours comes back.
    pub fn take_back(&self) {
        if let Some(shared) = &self.shared {
            shared.lender().bury();
        }
    }

    /// The same, where all it ever sent is unpacked: what else it wrote is given up.
    pub fn bury(&self) {
        self.take_back();
        if let Some(shared) = &self.shared {
            shared.borrower.bury();
        }
    }
}

impl Shared {
    fn lender(&self) -> std::sync::MutexGuard<'_, Lender> {
        self.lender.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

struct Packing<'a> {
    writer: Writer,
    lent: Vec<Lent>,
    carrier: &'a Carrier,
}

impl Packing<'_> {
    fn add(&mut self, bytes: &[u8], is_read_only: bool) {
        let shared = self.carrier.shared.as_ref().filter(|_| bytes.len() >= LARGE);
        match shared.and_then(|shared| shared.lender().lend(bytes)) {
            Some(lent) => {
                self.lent.push(lent);
                self.writer.lent(lent.slot, bytes.len() as u64, is_read_only);
            }
            // Also where there is no room: sent, it arrives all the same.
            None => self.writer.inline(bytes, is_read_only),
        }
    }
}
