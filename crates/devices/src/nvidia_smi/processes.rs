//! The processes on a GPU, in the tree.

use super::{cell, tree};
use crate::found::{Doing, Process};
use crate::limits;
use crate::told::Told;
use crate::xml::Element;

/// What the list is called; drivers before 346 know processes that compute only.
pub(crate) const LISTS: [&str; 2] = ["processes", "compute_processes"];

/// Every process on a GPU, those in its instances included.
pub(crate) fn of(gpu: &Element) -> Told<Vec<Process>> {
    list(gpu, |_| true)
}

/// The processes in one instance; a value only where every process of the GPU says in which instance it is.
pub(crate) fn in_instance(gpu: &Element, gpu_instance: u32, compute_instance: Option<u32>) -> Told<Vec<Process>> {
    let instance = |info: &Element| tree::first(info, &[&["gpu_instance_id"]], cell::count);
    let all_tell = infos(gpu).all(|info| instance(info).is_some());
    if !all_tell {
        return Told::ABSENT;
    }
    list(gpu, |info| {
        let compute = tree::first(info, &[&["compute_instance_id"]], cell::count);
        let differs = matches!((compute, compute_instance), (Some(a), Some(b)) if a != b);
        instance(info) == Some(gpu_instance) && !differs
    })
}

fn list(gpu: &Element, wanted: impl Fn(&Element) -> bool) -> Told<Vec<Process>> {
    let Some(processes) = LISTS.iter().find_map(|list| gpu.child(list)) else { return Told::ABSENT };
    let none = processes.text.is_empty() || processes.text.eq_ignore_ascii_case("none");
    if processes.children.is_empty() && !none {
        return Told::from_cell(&processes.text, |_| None);
    }
    let only_compute = processes.name == LISTS[1];
    let mut list = Vec::new();
    for info in infos(gpu).filter(|info| wanted(info)) {
        match process(info) {
            Some(process) if list.len() < limits::PROCESSES => {
                list.push(Process { doing: if only_compute { Doing::Compute } else { process.doing }, ..process })
            }
            Some(_) => return Told::Failed(format!("more than {} processes", limits::PROCESSES).into()),
            None => return Told::Failed("a process without a number".into()),
        }
    }
    Told::Value(list)
}

fn infos(gpu: &Element) -> impl Iterator<Item = &Element> {
    let lists = LISTS.iter().flat_map(|list| gpu.children(list));
    lists.flat_map(|processes| processes.children("process_info"))
}

fn process(info: &Element) -> Option<Process> {
    Some(Process {
        pid: tree::first(info, &[&["pid"]], cell::count)?,
        name: tree::first(info, &[&["process_name"]], cell::name),
        doing: doing(info.text_of("type").unwrap_or_default()),
        memory: info.text_of("used_memory").map_or(Told::ABSENT, cell::memory),
        ..Process::default()
    })
}

/// What the letters of a process's type say: `C`, `G`, `C+G`, and `M+C` for one that computes through MPS.
fn doing(letters: &str) -> Doing {
    match (letters.contains('C'), letters.contains('G')) {
        (true, true) => Doing::Both,
        (true, false) => Doing::Compute,
        (false, true) => Doing::Graphics,
        (false, false) => Doing::Unknown,
    }
}
