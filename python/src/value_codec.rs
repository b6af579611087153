//! Packing of Python values for other processes.
//!
//! A value is pickled (protocol 5). Its large buffers, such as those of arrays, are not copied into the pickle but lent
//! in [shared memory](crate::shared_memory), and so is a large pickle. The receiver gets an array on that memory.

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

use crate::shared_memory::{BorrowedSlot, ControlArea, LentSlot, MemorySlot, SlotBorrower, SlotLender};

/// Minimum size of a buffer that is lent instead of sent.
const LARGE_BUFFER_BYTES: usize = 64 * 1024;

/// Packs and unpacks values for one peer, or for several that share its memory.
#[derive(Debug)]
pub(crate) struct ValueCodec {
    pickle: Pickler,
    shared: Option<SharedValueMemory>,
}

#[derive(Debug)]
struct SharedValueMemory {
    lender: Mutex<SlotLender>,
    borrower: Arc<SlotBorrower>,
}

/// A packed value with its lent slots.
#[derive(Debug)]
pub(crate) struct PackedValue {
    pub payload: Bytes,
    pub lent: Vec<LentSlot>,
}

impl ValueCodec {
    /// Creates a codec, with shared memory if there is some.
    pub fn new(pickle: Pickler, memory: Option<Arc<OwnedFd>>) -> io::Result<Self> {
        let shared = match memory {
            Some(memory) => {
                let control = ControlArea::map(memory)?;
                let lender = Mutex::new(SlotLender::new(control.clone())?);
                Some(SharedValueMemory { lender, borrower: SlotBorrower::new(control) })
            }
            None => None,
        };
        Ok(Self { pickle, shared })
    }

    /// Packs a value for sending.
    pub fn pack(&self, value: &Bound<'_, PyAny>) -> PyResult<PackedValue> {
        let (stream, buffers) = self.pickle.dump(value)?;
        let stream = stream.as_bytes();
        if buffers.is_empty() && (stream.len() < LARGE_BUFFER_BYTES || self.shared.is_none()) {
            return Ok(PackedValue { payload: tagged_payload(PLAIN, stream), lent: Vec::new() });
        }
        let mut builder = PayloadBuilder::new(buffers.len() + 1);
        builder.add(self, stream.into(), true);
        for buffer in &buffers {
            let view = BufferView::get(&buffer)?;
            builder.add(self, view.bytes(), view.is_read_only());
        }
        Ok(builder.finish())
    }

    /// Packs the reason why a value could not be packed, for the receiver.
    pub fn pack_error(why: &str) -> Bytes {
        tagged_payload(PACK_ERROR, why.as_bytes())
    }

    /// Unpacks a value; a packed reason becomes an error.
    pub fn unpack<'py>(&self, py: Python<'py>, payload: &[u8]) -> PyResult<Bound<'py, PyAny>> {
        match payload.split_first() {
            Some((&PLAIN, stream)) => self.pickle.load(py, PyBytes::new(py, stream).as_any(), None),
            Some((&PACK_ERROR, why)) => Err(PyValueError::new_err(String::from_utf8_lossy(why).into_owned())),
            Some((&PARTS, rest)) => {
                let mut parts = self.parts(py, rest)?.into_iter();
                let stream = parts.next().ok_or_else(invalid_payload)?;
                self.pickle.load(py, &stream, Some(&PyList::new(py, parts)?))
            }
            _ => Err(invalid_payload()),
        }
    }

    /// Unpacks the parts of a value, each as a Python value: the pickle, then its buffers.
    fn parts<'py>(&self, py: Python<'py>, rest: &[u8]) -> PyResult<Vec<Bound<'py, PyAny>>> {
        let (count, rest) = rest.split_first_chunk().ok_or_else(invalid_payload)?;
        let length = (u32::from_ne_bytes(*count) as usize).checked_mul(ENTRY_BYTES).ok_or_else(invalid_payload)?;
        let (entries, mut inline) = rest.split_at_checked(length).ok_or_else(invalid_payload)?;
        let part = |mut entry: &[u8]| {
            let (length, flags) = (entry.get_u64_ne(), entry.get_u32_ne());
            let is_read_only = flags & IS_READ_ONLY != 0;
            if flags & IS_LENT != 0 {
                let (number, offset, capacity) = (entry.get_u32_ne(), entry.get_u64_ne(), entry.get_u64_ne());
                let shared = self.shared.as_ref().ok_or_else(invalid_payload)?;
                let borrowed = shared.borrower.borrow(MemorySlot { number, offset, capacity }, length)?;
                return borrowed_buffer(py, borrowed, length, is_read_only);
            }
            let length = usize::try_from(length).unwrap_or(usize::MAX);
            let (bytes, rest) = inline.split_at_checked(length).ok_or_else(invalid_payload)?;
            inline = rest;
            Ok(if is_read_only { PyBytes::new(py, bytes).into_any() } else { PyByteArray::new(py, bytes).into_any() })
        };
        entries.chunks_exact(ENTRY_BYTES).map(part).collect()
    }

    /// Cancels the loans of a finished task that were never borrowed.
    pub fn release_untaken(&self, lent: &[LentSlot]) {
        if let Some(shared) = self.shared.as_ref().filter(|_| !lent.is_empty()) {
            let lender = lock(&shared.lender);
            lent.iter().for_each(|lent| lender.cancel(*lent));
        }
    }

    /// Reclaims the slots that an exited peer had borrowed.
    pub fn reclaim(&self) {
        if let Some(shared) = &self.shared {
            lock(&shared.lender).reclaim_from_dead();
        }
    }

    /// Reclaims these slots, and frees the memory of exited peers after all their messages were unpacked.
    pub fn reclaim_dead(&self) {
        self.reclaim();
        if let Some(shared) = &self.shared {
            shared.borrower.free_dead_regions();
        }
    }
}

// Pickling: with Python's own pickle, and by value for classes that the receiver cannot import.

/// A module that the receiver cannot import.
const MAIN_MODULE: &[u8] = b"__main__";
const PICKLE_PROTOCOL: u8 = 5;

/// Pickle functions and the treatment of `__main__`.
#[derive(Debug)]
pub(crate) struct Pickler {
    dumps: Py<PyAny>,
    loads: Py<PyAny>,
    main: MainModuleMode,
    /// Whether values that cannot be pickled, such as lambdas, are pickled by value.
    falls_back_to_value: bool,
}

/// Treatment of `__main__` in pickles.
#[derive(Debug)]
pub(crate) enum MainModuleMode {
    /// The receiver can import it.
    Known,
    /// The receiver cannot import it: its classes are pickled by value.
    ByValue,
    /// This function loads it at the first reference.
    LoadedBy(Mutex<Option<Py<PyAny>>>),
}

impl Pickler {
    pub fn new(py: Python<'_>, main: MainModuleMode) -> PyResult<Self> {
        let pickle = py.import("pickle")?;
        let (dumps, loads) = (pickle.getattr("dumps")?.unbind(), pickle.getattr("loads")?.unbind());
        Ok(Self { dumps, loads, main, falls_back_to_value: false })
    }

    /// Pickles by value what cannot be pickled, such as a lambda.
    pub fn or_by_value(self) -> Self {
        Self { falls_back_to_value: true, ..self }
    }

    /// Returns the pickle and its out-of-band buffers.
    pub fn dump<'py>(&self, value: &Bound<'py, PyAny>) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyList>)> {
        let py = value.py();
        let buffers = PyList::empty(py);
        if is_plain(value) {
            let stream = self.dumps.bind(py).call1((value, PICKLE_PROTOCOL))?;
            return Ok((stream.cast_into()?, buffers));
        }
        let keywords = PyDict::new(py);
        keywords.set_item("protocol", PICKLE_PROTOCOL)?;
        keywords.set_item("buffer_callback", buffers.getattr("append")?)?;
        match self.dumps.bind(py).call((value,), Some(&keywords)) {
            Ok(stream) => {
                let stream: Bound<'py, PyBytes> = stream.cast_into()?;
                if !matches!(self.main, MainModuleMode::ByValue) || !mentions_main(stream.as_bytes()) {
                    return Ok((stream, buffers));
                }
            }
            Err(_) if self.falls_back_to_value => {}
            Err(error) => return Err(error),
        }
        buffers.call_method0("clear")?;
        let by_value = py.import("cloudpickle")?.getattr("dumps")?.call((value,), Some(&keywords))?;
        Ok((by_value.cast_into()?, buffers))
    }

    /// Loads the value of a pickle.
    pub fn load<'py>(
        &self,
        py: Python<'py>,
        stream: &Bound<'py, PyAny>,
        buffers: Option<&Bound<'py, PyList>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        if let MainModuleMode::LoadedBy(load) = &self.main
            // A large pickle is not searched.
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

/// Whether the value has no buffers and no references.
fn is_plain(value: &Bound<'_, PyAny>) -> bool {
    value.is_exact_instance_of::<PyInt>()
        || value.is_exact_instance_of::<PyString>()
        || value.is_exact_instance_of::<PyFloat>()
        || value.is_none()
}

/// Whether a pickle may refer to `__main__`; a string with that text also counts, harmlessly.
fn mentions_main(stream: &[u8]) -> bool {
    stream.windows(MAIN_MODULE.len()).any(|window| window == MAIN_MODULE)
}

// Format of a packed value: a kind byte, then
//
// | | |
// |---|---|
// | 0 | a pickle |
// | 1 | number of parts (u32); a 32-byte entry for each part; the bytes of inline parts. The first part is the pickle |
// | 2 | reason why the value could not be packed, as text |
//
// Numbers are in native order: both sides are on one machine.

const PLAIN: u8 = 0;
const PARTS: u8 = 1;
const PACK_ERROR: u8 = 2;
/// Length, flags, slot number, slot offset, slot capacity.
const ENTRY_BYTES: usize = 32;

const IS_LENT: u32 = 1;
const IS_READ_ONLY: u32 = 2;

fn tagged_payload(kind: u8, rest: &[u8]) -> Bytes {
    let mut bytes = BytesMut::with_capacity(rest.len() + 1);
    bytes.put_u8(kind);
    bytes.put_slice(rest);
    bytes.freeze()
}

/// Returns the error for bytes of an invalid format.
fn invalid_payload() -> PyErr {
    PyValueError::new_err("the payload was not packed by this version of gpupool")
}

/// Builds a payload from parts.
struct PayloadBuilder {
    entries: BytesMut,
    inline: BytesMut,
    lent: Vec<LentSlot>,
}

impl PayloadBuilder {
    fn new(parts: usize) -> Self {
        let mut entries = BytesMut::with_capacity(5 + parts * ENTRY_BYTES);
        entries.put_u8(PARTS);
        entries.put_u32_ne(u32::try_from(parts).unwrap_or(u32::MAX));
        Self { entries, inline: BytesMut::new(), lent: Vec::new() }
    }

    fn add(&mut self, codec: &ValueCodec, bytes: SharedBytes<'_>, is_read_only: bool) {
        let shared = codec.shared.as_ref().filter(|_| bytes.len() >= LARGE_BUFFER_BYTES);
        let lent = shared.and_then(|shared| lock(&shared.lender).lend(bytes));
        if lent.is_none() {
            // Without room in shared memory the part is sent inline.
            bytes.append_to(&mut self.inline);
        }
        let flags = if lent.is_some() { IS_LENT } else { 0 } | if is_read_only { IS_READ_ONLY } else { 0 };
        let slot = lent.map_or(MemorySlot { number: 0, offset: 0, capacity: 0 }, |lent| lent.slot);
        self.entries.put_u64_ne(bytes.len() as u64);
        self.entries.put_u32_ne(flags);
        self.entries.put_u32_ne(slot.number);
        self.entries.put_u64_ne(slot.offset);
        self.entries.put_u64_ne(slot.capacity);
        self.lent.extend(lent);
    }

    fn finish(mut self) -> PackedValue {
        self.entries.unsplit(self.inline);
        PackedValue { payload: self.entries.freeze(), lent: self.lent }
    }
}

// Bytes of Python buffers, and Python buffers over our bytes.

/// `Py_buffer`, with the same layout in all supported versions, and part of the stable ABI since 3.11.
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

/// Requests any contiguous buffer, in row or column order.
const CONTIGUOUS_BUFFER_FLAGS: c_int = 0x0080 | 0x0010 | 0x0008;

/// Bytes of a buffer during its lifetime.
struct BufferView<'py> {
    view: Box<PyBuffer>,
    _py: Python<'py>,
}

impl<'py> BufferView<'py> {
    #[allow(unsafe_code, reason = "Python's buffers")]
    pub fn get(object: &Bound<'py, PyAny>) -> PyResult<Self> {
        let mut view = Box::new(MaybeUninit::<PyBuffer>::uninit());
        // SAFETY: the object lives, the interpreter is held, and the view is not moved.
        if unsafe { PyObject_GetBuffer(object.as_ptr(), view.as_mut_ptr(), CONTIGUOUS_BUFFER_FLAGS) } != 0 {
            return Err(
                PyErr::take(object.py()).unwrap_or_else(|| PyBufferError::new_err("a buffer is not contiguous"))
            );
        }
        // SAFETY: the function has filled the view.
        Ok(Self { view: unsafe { view.assume_init() }, _py: object.py() })
    }

    /// Returns its bytes. Although the interpreter is held, a thread that released it or a process that shares the
    /// memory may write to them.
    #[allow(unsafe_code, reason = "Python's buffers")]
    pub fn bytes(&self) -> SharedBytes<'_> {
        if self.view.buf.is_null() {
            return SharedBytes::from(&[][..]);
        }
        let length = usize::try_from(self.view.len).unwrap_or(0);
        // SAFETY: the buffer is held until the view is released, and is contiguous with this length.
        unsafe { SharedBytes::new(self.view.buf.cast(), length) }
    }

    pub fn is_read_only(&self) -> bool {
        self.view.readonly != 0
    }
}

impl Drop for BufferView<'_> {
    #[allow(unsafe_code, reason = "Python's buffers")]
    fn drop(&mut self) {
        // SAFETY: it was filled and is released once; the interpreter is held.
        unsafe { PyBuffer_Release(&mut *self.view) };
    }
}

/// Keeps a slot while Python uses its memory.
#[pyclass(frozen)]
struct SlotGuard {
    _taken: BorrowedSlot,
}

/// Creates a buffer over a slot, which is returned when the last object over it is gone. Before Python 3.11 a module
/// built for several versions cannot implement buffers, so `ctypes` does.
fn borrowed_buffer<'py>(
    py: Python<'py>,
    borrowed: BorrowedSlot,
    length: u64,
    is_read_only: bool,
) -> PyResult<Bound<'py, PyAny>> {
    static BYTE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    static VIEW: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let byte = BYTE.get_or_try_init(py, || py.import("ctypes")?.getattr("c_ubyte").map(Bound::unbind))?;
    let view = VIEW.get_or_try_init(py, || py.import("builtins")?.getattr("memoryview").map(Bound::unbind))?;
    let array = byte.bind(py).mul(length)?.call_method1("from_address", (borrowed.address(),))?;
    array.setattr("_keep", SlotGuard { _taken: borrowed })?;
    let view = view.bind(py).call1((array,))?.call_method1("cast", ("B",))?;
    if is_read_only { view.call_method0("toreadonly") } else { Ok(view) }
}
