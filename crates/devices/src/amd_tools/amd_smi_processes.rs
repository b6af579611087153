//! The processes amd-smi lists for each GPU.

use gpupool_core::units::Bytes;
use serde_json::Value;

use super::amd_smi_tree::{Tree, number};
use super::facts;
use super::quantity;
use crate::found::Process;
use crate::limits;
use crate::told::{Told, words};

/// The processes in the tree of a GPU. One that cannot be read makes the list incomplete, and so no list.
pub(crate) fn processes(tree: &Value) -> Told<Vec<Process>> {
    let Some(listed) = tree.get("process_list").or_else(|| tree.get("process_info")) else { return Told::ABSENT };
    let items = match listed {
        Value::Array(items) => items.as_slice(),
        one => std::slice::from_ref(one),
    };
    let mut found = Vec::new();
    for item in items.iter().take(limits::PROCESSES) {
        match item.get("process_info").unwrap_or(item) {
            // In place of a process: that there is none, or why none could be listed.
            Value::String(said) if said.contains("No running processes") || !facts::says_something(said) => {}
            Value::String(said) => return Told::Failed(words(said)),
            info => match process(info) {
                Some(process) => found.push(process),
                None => return Told::Failed("a process without a number".into()),
            },
        }
    }
    Told::Value(found)
}

fn process(info: &Value) -> Option<Process> {
    let tree = Tree(info);
    let name = tree.first(&["name", "process_name"]);
    let memory = tree.told(&["memory_usage.vram_mem", "vram_mem", "mem_usage", "mem"], bytes);
    Some(Process {
        pid: info.get("pid").and_then(number)?,
        name: name.map(|name| name.chars().take(limits::WORDS).collect::<String>().into()),
        memory,
        ..Process::default()
    })
}

fn bytes(text: &str) -> Option<Bytes> {
    quantity::bytes(text, "B")
}
