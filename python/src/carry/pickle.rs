//! Pickling: quickly with Python's own pickle, and by value where an import at the other end would not find a class.

use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyFloat, PyInt, PyList, PyString};

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
    LoadedBy(std::sync::Mutex<Option<Py<PyAny>>>),
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
            && let Some(load) = load.lock().unwrap_or_else(std::sync::PoisonError::into_inner).take()
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
