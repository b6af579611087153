//! Python values on their way between processes.
//!
//! A value is pickled (protocol 5); large buffers in it, such as those of arrays, are not copied into the pickle but lent in
//! [shared memory](crate::memory), and so is a pickle that is large itself. What comes out at the other end is an array on
//! that memory.

use std::ffi::{c_int, c_void};
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex};

use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use gpupool_confine::lock;
use gpupool_dispatch::protocol::SharedBytes;
use pyo3::exceptions::{PyBufferError, PyValueError};
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyByteArray, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString};

use crate::memory::{Borrower, Control, Lender, Lent, Slot, Taken};

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
    borrower: Arc<Borrower>,
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
            return Ok(Packed { payload: with_kind(PLAIN, stream), lent: Vec::new() });
        }
        let mut packing = Packing::new(buffers.len() + 1);
        packing.add(self, stream.into(), true);
        for buffer in &buffers {
            let view = View::of(&buffer)?;
            packing.add(self, view.bytes(), view.is_read_only());
        }
        Ok(packing.finish())
    }

    /// What says that a value could not be packed, and why, to whoever unpacks it.
    pub fn excuse(why: &str) -> Bytes {
        with_kind(EXCUSE, why.as_bytes())
    }

    /// The value that was packed; an excuse is an error.
    pub fn unpack<'py>(&self, py: Python<'py>, payload: &[u8]) -> PyResult<Bound<'py, PyAny>> {
        match payload.split_first() {
            Some((&PLAIN, stream)) => self.pickle.load(py, PyBytes::new(py, stream).as_any(), None),
            Some((&EXCUSE, why)) => Err(PyValueError::new_err(String::from_utf8_lossy(why).into_owned())),
            Some((&PARTS, rest)) => {
                let mut parts = self.parts(py, rest)?.into_iter();
                let stream = parts.next().ok_or_else(broken)?;
                self.pickle.load(py, &stream, Some(&PyList::new(py, parts)?))
            }
            _ => Err(broken()),
        }
    }

    /// The parts of a value, each as a Python value: the pickle, and then its buffers.
    fn parts<'py>(&self, py: Python<'py>, rest: &[u8]) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let (count, rest) = rest.split_first_chunk().ok_or_else(broken)?;
        let length = (u32::from_ne_bytes(*count) as usize).checked_mul(ENTRY_BYTES).ok_or_else(broken)?;
        let (entries, mut inline) = rest.split_at_checked(length).ok_or_else(broken)?;
        let part = |mut entry: &[u8]| {
            let (length, flags) = (entry.get_u64_ne(), entry.get_u32_ne());
            let is_read_only = flags & IS_READ_ONLY != 0;
            if flags & IS_LENT != 0 {
                let (number, offset, capacity) = (entry.get_u32_ne(), entry.get_u64_ne(), entry.get_u64_ne());
                let shared = self.shared.as_ref().ok_or_else(broken)?;
                let taken = shared.borrower.take(Slot { number, offset, capacity }, length)?;
                return buffer_over(py, taken, length, is_read_only);
            }
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            let (bytes, rest) = inline.split_at_checked(length).ok_or_else(broken)?;
            inline = rest;
            Ok(if is_read_only { PyBytes::new(py, bytes).into_any() } else { PyByteArray::new(py, bytes).into_any() })
        };
        entries.chunks_exact(ENTRY_BYTES).map(part).collect()
    }

    /// What was lent for a task that is over is not taken any more.
    pub fn is_over(&self, lent: &[Lent]) {
        if let Some(shared) = self.shared.as_ref().filter(|_| !lent.is_empty()) {
            let lender = lock(&shared.lender);
            lent.iter().for_each(|lent| lender.is_over(*lent));
        }
    }

    /// A process of the other side is gone: what it had of ours comes back.
    pub fn take_back(&self) {
        if let Some(shared) = &self.shared {
            lock(&shared.lender).bury();
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

// Pickling: quickly with Python's own pickle, and by value where an import at the other end would not find a class.

/// A module no import finds at the other end.
const MAIN: &[u8] = b"__main__";
const PROTOCOL: u8 = 5;

/// The two functions, and what is to be done about `__main__`.
#[derive(Debug)]
pub(crate) struct Pickle {
    dumps: Py<PyAny>,
    loads: Py<PyAny>,
    main: Main,
    /// What cannot be pickled, such as a lambda, travels by value.
    tries_by_value: bool,
}

/// What a pickle may say about `__main__`.
#[derive(Debug)]
pub(crate) enum Main {
    /// Whatever it says is understood.
    IsKnown,
    /// It is not known at the other end: its classes travel by value.
    ByValue,
    /// It is loaded by this function when something first refers to it.
    LoadedBy(Mutex<Option<Py<PyAny>>>),
}

impl Pickle {
    pub fn new(py: Python<'_>, main: Main) -> PyResult<Self> {
        let pickle = py.import("pickle")?;
        let (dumps, loads) = (pickle.getattr("dumps")?.unbind(), pickle.getattr("loads")?.unbind());
        Ok(Self { dumps, loads, main, tries_by_value: false })
    }

    /// What cannot be pickled, such as a lambda, is to travel by value.
    pub fn or_by_value(self) -> Self {
        Self { tries_by_value: true, ..self }
    }

    /// The pickle, and the buffers that are not in it.
    pub fn dump<'py>(&self, value: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyList>)> {
        let py = value.py();
        let buffers = PyList::empty(py);
        if is_plain(value) {
            let stream = self.dumps.bind(py).call1((value, PROTOCOL))?;
            return Ok((stream.cast_into()?, buffers));
        }
        let keywords = PyDict::new(py);
        keywords.set_item("protocol", PROTOCOL)?;
        keywords.set_item("buffer_callback", buffers.getattr("append")?)?;
        match self.dumps.bind(py).call((value,), Some(&keywords)) {
            Ok(stream) => {
                let stream: Bound<'py, PyBytes> = stream.cast_into()?;
                if !matches!(self.main, Main::ByValue) || !mentions_main(stream.as_bytes()) {
                    return Ok((stream, buffers));
                }
            }
            Err(_) if self.tries_by_value => {}
            Err(error) => return Err(error),
        }
        buffers.call_method0("clear")?;
        let by_value = py.import("cloudpickle")?.getattr("dumps")?.call((value,), Some(&keywords))?;
        Ok((by_value.cast_into()?, buffers))
    }

    /// The value of a pickle.
    pub fn load<'py>(
        &self,
        py: Python<'py>,
        stream: &Bound<'py, PyAny>,
        buffers: Option<&Bound<'py, PyList>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if let Main::LoadedBy(load) = &self.main
            // A large one is not searched.
            && stream.cast::<PyBytes>().map_or(true, |stream| mentions_main(stream.as_bytes()))
            && let Some(load) = lock(load).take()
        {
            load.call0(py)?;
        }
        let loads = self.loads.bind(py);
        let Some(buffers) = buffers else { return loads.call1((stream,)) };
        let keywords = PyDict::new(py);
        keywords.set_item("buffers", buffers)?;
        loads.call((stream,), Some(&keywords))
    }
}

/// Values that have no buffers and refer to nothing.
fn is_plain(value: &Bound<'_, PyAny>) -> bool {
    value.is_exact_instance_of::<PyInt>()
        || value.is_exact_instance_of::<PyString>()
        || value.is_exact_instance_of::<PyFloat>()
        || value.is_none()
}

/// Whether a pickle may refer to `__main__`; a text that says so counts as well, and does no harm.
fn mentions_main(stream: &[u8]) -> bool {
    stream.windows(MAIN.len()).any(|window| window == MAIN)
}

// How a packed value looks: a byte that says which of the three it is, and then
//
// | | |
// |---|---|
// | 0 | a pickle |
// | 1 | number of parts (u32); for each part 32 bytes of where it is; the bytes of those that are here. The first is the pickle |
// | 2 | why it could not be packed, in text |
//
// Numbers are in native order: both sides are on one machine.

const PLAIN: u8 = 0;
const PARTS: u8 = 1;
const EXCUSE: u8 = 2;
/// Length, where, whether it is read only, number, where it begins, how long the slot is.
const ENTRY_BYTES: usize = 32;

const IS_LENT: u32 = 1;
const IS_READ_ONLY: u32 = 2;

fn with_kind(kind: u8, rest: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(rest.len() + 1);
    bytes.put_u8(kind);
    bytes.put_slice(rest);
    bytes.freeze()
}

/// Said of bytes that we cannot have packed.
fn broken() -> PyErr {
    PyValueError::new_err("what arrived was not packed by this version of gpupool")
}

/// Puts parts together.
struct Packing {
    entries: BytesMut,
    inline: BytesMut,
    lent: Vec<Lent>,
}

impl Packing {
    fn new(parts: usize) -> Self {
        let mut entries = BytesMut::with_capacity(5 + parts * ENTRY_BYTES);
        entries.put_u8(PARTS);
        entries.put_u32_ne(u32::try_from(parts).unwrap_or(u32::MAX));
        Self { entries, inline: BytesMut::new(), lent: Vec::new() }
    }

    fn add(&mut self, carrier: &Carrier, bytes: SharedBytes<'_>, is_read_only: bool) {
        let shared = carrier.shared.as_ref().filter(|_| bytes.len() >= LARGE);
        let lent = shared.and_then(|shared| lock(&shared.lender).lend(bytes));
        if lent.is_none() {
            // Also where there is no room: sent, it arrives all the same.
            bytes.append_to(&mut self.inline);
        }
        let flags = if lent.is_some() { IS_LENT } else { 0 } | if is_read_only { IS_READ_ONLY } else { 0 };
        let slot = lent.map_or(Slot { number: 0, offset: 0, capacity: 0 }, |lent| lent.slot);
        self.entries.put_u64_ne(bytes.len() as u64);
        self.entries.put_u32_ne(flags);
        self.entries.put_u32_ne(slot.number);
        self.entries.put_u64_ne(slot.offset);
        self.entries.put_u64_ne(slot.capacity);
        self.lent.extend(lent);
    }

    fn finish(mut self) -> Packed {
        self.entries.unsplit(self.inline);
        Packed { payload: self.entries.freeze(), lent: self.lent }
    }
}

// The bytes of Python's buffers, and Python's buffers over bytes of ours.

/// `Py_buffer`. Its form is the same in all versions this module loads into, and part of the stable interface since 3.11.
#[repr(C)]
struct PyBuffer {
    buf: *mut c_void,
    obj: *mut PyObject,
    len: ffi::Py_ssize_t,
    itemsize: ffi::Py_ssize_t,
    readonly: c_int,
    ndim: c_int,
    format: *mut std::ffi::c_char,
    shape: *mut ffi::Py_ssize_t,
    strides: *mut ffi::Py_ssize_t,
    suboffsets: *mut ffi::Py_ssize_t,
    internal: *mut c_void,
}

#[allow(
    unsafe_code,
    reason = "every version since 3.0 has these functions, though the binding only has them from 3.11 on"
)]
unsafe extern "C" {
    fn PyObject_GetBuffer(object: *mut PyObject, view: *mut PyBuffer, flags: c_int) -> c_int;
    fn PyBuffer_Release(view: *mut PyBuffer);
}

/// Any buffer that is one run of bytes, in whatever order its items are.
const ANY_CONTIGUOUS: c_int = 0x0080 | 0x0010 | 0x0008;

/// The bytes of a buffer, as long as this lives.
struct View<'py> {
    view: Box<PyBuffer>,
    _py: Python<'py>,
}

impl<'py> View<'py> {
    #[allow(unsafe_code, reason = "Python's buffers")]
    pub fn of(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let mut view = Box::new(MaybeUninit::<PyBuffer>::uninit());
        // SAFETY: the object lives, the interpreter is held, and the view is where it stays.
        if unsafe { PyObject_GetBuffer(object.as_ptr(), view.as_mut_ptr(), ANY_CONTIGUOUS) } != 0 {
            return Err(PyErr::take(object.py()).unwrap_or_else(|| PyBufferError::new_err("a buffer has no bytes")));
        }
        // SAFETY: filled, as the function said.
        Ok(Self { view: unsafe { view.assume_init() }, _py: object.py() })
    }

    /// Its bytes. The interpreter is held, but a thread that has released it, or a process that shares the memory, may write.
    #[allow(unsafe_code, reason = "Python's buffers")]
    pub fn bytes(&self) -> SharedBytes<'_> {
        if self.view.buf.is_null() {
            return SharedBytes::from(&[][..]);
        }
        let length = usize::try_from(self.view.len).unwrap_or(0);
        // SAFETY: the buffer is held until the view is released, and is one run of so many bytes.
        unsafe { SharedBytes::new(self.view.buf.cast(), length) }
    }

    pub fn is_read_only(&self) -> bool {
        self.view.readonly != 0
    }
}

impl Drop for View<'_> {
    #[allow(unsafe_code, reason = "Python's buffers")]
    fn drop(&mut self) {
        // SAFETY: it was filled, and is released once; the interpreter is held.
        unsafe { PyBuffer_Release(&mut *self.view) };
    }
}

/// Keeps a slot for as long as Python has something in it.
#[pyclass(frozen)]
struct Keep {
    _taken: Taken,
}

/// A buffer over a slot, which is returned when the last that is made of it is gone. A module built for several versions can
/// have no buffers of its own before 3.11: `ctypes` has.
fn buffer_over<'py>(py: Python<'py>, taken: Taken, length: u64, is_read_only: bool) -> PyResult<Bound<'py, PyAny>> {
    static BYTE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    static VIEW: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let byte = BYTE.get_or_try_init(py, || py.import("ctypes")?.getattr("c_ubyte").map(Bound::unbind))?;
    let view = VIEW.get_or_try_init(py, || py.import("builtins")?.getattr("memoryview").map(Bound::unbind))?;
    let array = byte.bind(py).mul(length)?.call_method1("from_address", (taken.address(),))?;
    array.setattr("_keep", Keep { _taken: taken })?;
    let view = view.bind(py).call1((array,))?.call_method1("cast", ("B",))?;
    if is_read_only { view.call_method0("toreadonly") } else { Ok(view) }
}
