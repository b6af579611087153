//! Conversion of Rust data to Python values through JSON, and of Python dicts to requests.

use gpupool_client::RequestBody;
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyDict, PyList, PyMapping, PySequence, PyString, PyTuple};
use serde::Serialize;
use serde_json::{Map, Number, Value};

/// Converts a value to Python.
pub(crate) fn to_python<'py>(py: Python<'py>, fact: &impl Serialize) -> PyResult<Bound<'py, PyAny>> {
    let value = serde_json::to_value(fact).map_err(|error| PyValueError::new_err(error.to_string()))?;
    json_to_python(py, &value)
}

fn json_to_python<'py>(py: Python<'py>, value: &Value) -> PyResult<Bound<'py, PyAny>> {
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
                list.append(json_to_python(py, value)?)?;
            }
            list.into_any()
        }
        Value::Object(fields) => {
            let dict = PyDict::new(py);
            for (name, value) in fields {
                dict.set_item(name, json_to_python(py, value)?)?;
            }
            dict.into_any()
        }
    })
}

// Requests from Python dicts. An error names the invalid field.

/// Maximum nesting of lists and dicts in a request.
const MAX_NESTING: usize = 8;

/// Parses a request; fields that are `None` count as unset.
pub(crate) fn parse_request(request: &Bound<'_, PyDict>) -> PyResult<RequestBody> {
    let mut fields = Map::new();
    for (name, value) in request {
        let name: String = name.extract()?;
        let json = python_to_json(&value, MAX_NESTING)
            .map_err(|_| invalid_field(&name, &value, "use a number, a string, a list or a dict"))?;
        if json.is_null() {
            continue;
        }
        let alone = Value::Object(Map::from_iter([(name.clone(), json.clone())]));
        serde_json::from_value::<RequestBody>(alone)
            .map_err(|error| invalid_field(&name, &value, &error.to_string()))?;
        fields.insert(name, json);
    }
    serde_json::from_value(Value::Object(fields)).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Creates an exception of this class with this argument.
pub(crate) fn exception<'py>(py: Python<'py>, module: &str, class: &str, about: impl IntoPyObject<'py>) -> PyErr {
    let made = py.import(module).and_then(|module| module.getattr(class)).and_then(|class| class.call1((about,)));
    made.map_or_else(|error| error, PyErr::from_value)
}

fn invalid_field(name: &str, value: &Bound<'_, PyAny>, why: &str) -> PyErr {
    let shown = value.repr().map(|text| text.to_string()).unwrap_or_else(|_| "the value".into());
    PyTypeError::new_err(format!("{name} is {shown}, which is invalid: {why}"))
}

fn python_to_json(value: &Bound<'_, PyAny>, depth: usize) -> PyResult<Value> {
    if depth == 0 {
        return Err(PyValueError::new_err("nested too deeply"));
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
        let values = value.cast::<PySequence>()?.try_iter()?.map(|value| python_to_json(&value?, depth - 1));
        return Ok(Value::Array(values.collect::<PyResult<_>>()?));
    }
    let mut fields = Map::new();
    for pair in value.cast::<PyMapping>()?.items()?.try_iter()? {
        let (name, value): (String, Bound<'_, PyAny>) = pair?.extract()?;
        fields.insert(name, python_to_json(&value, depth - 1)?);
    }
    Ok(Value::Object(fields))
}
