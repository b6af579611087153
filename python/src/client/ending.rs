//! Clients that nobody refers to any more: they give back what they hold in the background, and the end of the interpreter
//! waits for it.

use std::time::Duration;

use pyo3::prelude::*;

use crate::awaiting::blocking;
use crate::counting::ProcessCount;
use crate::runtime;

/// How many clients are ending.
static ENDING: ProcessCount = ProcessCount::new();

/// How often the end of the interpreter looks whether all have ended.
const LOOK_AGAIN: Duration = Duration::from_millis(2);

/// Stops a client in the background.
pub(super) fn stop_soon(client: gpupool_client::Client) {
    let Ok(handle) = runtime::handle() else { return };
    ENDING.change(1);
    handle.spawn(async move {
        client.stop().await;
        ENDING.change(-1);
    });
}

/// Waits until what is given back in the background has been.
#[pyfunction]
pub(crate) fn wait_for_ending(py: Python<'_>) -> PyResult<()> {
    if ENDING.get() == 0 {
        return Ok(());
    }
    // Stopping has a limit of its own, so this ends.
    blocking(py, async {
        while ENDING.get() > 0 {
            tokio::time::sleep(LOOK_AGAIN).await;
        }
        Ok(())
    })
}
