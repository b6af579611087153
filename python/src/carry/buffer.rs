//! The bytes of Python's buffers, and Python's buffers over bytes of ours.

use std::ffi::{c_int, c_void};
use std::mem::MaybeUninit;

use pyo3::exceptions::PyBufferError;
use pyo3::ffi::{self, PyObject};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;

use crate::memory::Taken;

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
pub(super) struct View<'py> {
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

    #[allow(unsafe_code, reason = "Python's buffers")]
    pub fn bytes(&self) -> &[u8] {
        if self.view.buf.is_null() {
            return &[];
        }
        let length = usize::try_from(self.view.len).unwrap_or(0);
        // SAFETY: the buffer is held until the view is released, and is one run of so many bytes. Nobody writes while the
        // interpreter is held.
        unsafe { std::slice::from_raw_parts(self.view.buf.cast(), length) }
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
pub(super) fn over<'py>(py: Python<'py>, taken: Taken, length: u64, is_read_only: bool) -> PyResult<Bound<'py, PyAny>> {
    static BYTE: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    static VIEW: PyOnceLock<Py<PyAny>> = PyOnceLock::new();
    let byte = BYTE.get_or_try_init(py, || py.import("ctypes")?.getattr("c_ubyte").map(Bound::unbind))?;
    let view = VIEW.get_or_try_init(py, || py.import("builtins")?.getattr("memoryview").map(Bound::unbind))?;
    let array = byte.bind(py).mul(length)?.call_method1("from_address", (taken.address(),))?;
    array.setattr("_keep", Keep { _taken: taken })?;
    let view = view.bind(py).call1((array,))?.call_method1("cast", ("B",))?;
    if is_read_only { view.call_method0("toreadonly") } else { Ok(view) }
}
