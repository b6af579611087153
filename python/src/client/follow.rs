//! What happens to a client, told to a Python function by a task that ends with the client.

use gpupool_client::Update;
use pyo3::prelude::*;
use tokio::task::block_in_place;

use crate::attaching::attached;
use crate::runtime;
use crate::values::to_python;

/// Calls `sink` with each update as a dict, in a thread of ours; with those that come often only while somebody wants them.
pub(super) fn follow(client: &gpupool_client::Client, sink: Py<PyAny>) -> PyResult<()> {
    let mut updates = client.rare_updates();
    runtime::handle()?.spawn(async move {
        while let Some(update) = updates.next().await {
            // Who holds the interpreter may hold it for long; what else runs on this thread must not wait for it.
            if block_in_place(|| attached(|py| tell(py, &sink, &update))).is_none() {
                return;
            }
        }
    });
    Ok(())
}

fn tell(py: Python<'_>, sink: &Py<PyAny>, update: &Update) {
    let told = to_python(py, update).and_then(|update| sink.call1(py, (update,)));
    if let Err(error) = told {
        error.write_unraisable(py, Some(sink.bind(py)));
    }
}
