//! Facts as Python values, where what serialises becomes dicts, lists, strings, numbers and None; and requests from dicts.

use gpupool_client::RequestBody;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyList, PyMapping, PySequence, PyString, PyTuple};
use serde::Serialize;
use serde_json::{Map, Number, Value};

/// The value as Python has it.
pub(crate) fn to_python<'py>(py: Python<'py>, fact: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    let value = serde_json::to_value(fact).map_err(|error| PyValueError::new_err(error.to_string()))?;
    of_json(py, &value)
}

fn of_json<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
    Ok(match value {
        Value::Null => py.None().into_bound(py),
        Value::Bool(flag) => flag.into_pyobject(py)?.to_owned().into_any(),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => number.into_pyobject(py)?.into_any(),
            (None, Some(number)) => number.into_pyobject(py)?.into_any(),
            (None, None) => number.as_f64().into_pyobject(py)?.into_any(),
        },
        Value::String(text) => text.into_pyobject(py)?.into_any(),
        Value::Array(values) => {
            let list = PyList::empty(py);
            for value in values {
                list.append(of_json(py, value)?)?;
            }
            list.into_any()
        }
        Value::Object(fields) => {
            let dict = PyDict::new(py);
            for (name, value) in fields {
                dict.set_item(name, of_json(py, value)?)?;
            }
            dict.into_any()
        }
    })
}

// From a Python dict to a request: every field by its name, and an error that names the one that cannot be used.

/// How deep lists and dicts of a request may go.
const DEPTH: usize = 8;

/// The request a dict says; what is `None` was not said.
pub(crate) fn request(wish: &Bound<'_, PyDict>) -> PyResult<RequestBody> {
    let mut fields = Map::new();
    for (name, value) in wish {
        let name: String = name.extract()?;
        let json = to_json(&value, DEPTH).map_err(|_| bad(&name, &value, "a number, a text, a list or a dict"))?;
        if json.is_null() {
            continue;
        }
        let alone = Value::Object(Map::from_iter([(name.clone(), json.clone())]));
        serde_json::from_value::<RequestBody>(alone).map_err(|error| bad(&name, &value, &error.to_string()))?;
        fields.insert(name, json);
    }
    serde_json::from_value(Value::Object(fields)).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// An exception of this class, with this about it.
pub(crate) fn exception<'py>(py: Python<'py>, module: &str, class: &str, about: impl IntoPyObject<'py>) -> PyErr {
    let made = py.import(module).and_then(|module| module.getattr(class)).and_then(|class| class.call1((about,)));
    made.map_or_else(|error| error, PyErr::from_value)
}

fn bad(name: &str, value: &Bound<'_, PyAny>, why: &str) -> PyErr {
    let shown = value.repr().map(|text| text.to_string()).unwrap_or_else(|_| "what was given".into());
    PyTypeError::new_err(format!("{name} is {shown}, which cannot be used: {why}"))
}

fn to_json(value: &Bound<'_, PyAny>, depth: usize) -> PyResult<Value> {
    if depth == 0 {
        return Err(PyValueError::new_err("nested too deep"));
    }
    if value.is_none() {
        return Ok(Value::Null);
    }
    if let Ok(flag) = value.cast::<PyBool>() {
        return Ok(Value::Bool(flag.is_true()));
    }
    if let Ok(text) = value.cast::<PyString>() {
        return Ok(Value::String(text.extract()?));
    }
    if let Ok(number) = value.extract::<i64>() {
        return Ok(Value::Number(number.into()));
    }
    if let Ok(number) = value.extract::<f64>() {
        let finite = Number::from_f64(number).ok_or_else(|| PyValueError::new_err("it must be finite"))?;
        return Ok(Value::Number(finite));
    }
    if value.is_instance_of::<PyList>() || value.is_instance_of::<PyTuple>() {
        let values = value.cast::<PySequence>()?.try_iter()?.map(|value| to_json(&value?, depth - 1));
        return Ok(Value::Array(values.collect::<PyResult<_>>()?));
    }
    let mut fields = Map::new();
    for pair in value.cast::<PyMapping>()?.items()?.try_iter()? {
        let (name, value): (String, Bound<'_, PyAny>) = pair?.extract()?;
        fields.insert(name, to_json(&value, depth - 1)?);
    }
    Ok(Value::Object(fields))
}
