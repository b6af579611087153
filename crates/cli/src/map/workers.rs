//! What workers run, how many there are, and by which rules.

use std::ffi::OsString;

use gpupool_confine::bounds::Bounds;
use gpupool_dispatch::{Order, Place, Plan, Program, Rules, WorkerId, WorkerOutput};

use super::arguments::{Map, Speaks};
use super::limits::{KILL_AFTER, QUEUE_SIZE};
use super::template::{SLOT, worker_command};

/// The plan of a run. Its workers are in it where they need no GPU.
pub(super) fn plan(map: &Map, command: &[OsString]) -> Plan {
    let program = match map.speaks {
        None => Program::commands(),
        Some(speaks) => {
            let mut words = worker_command(command).into_iter();
            let program = words.next().unwrap_or_default();
            match speaks {
                Speaks::Lines => Program::lines(program).args(words),
                Speaks::Frames => Program::native(program).args(words),
            }
        }
    };
    let mut plan = Plan::new(program);
    plan.rules = Rules {
        queue_size: map.queue_size.unwrap_or(QUEUE_SIZE),
        task_timeout: map.timeout,
        grace: map.kill_after.unwrap_or(KILL_AFTER),
        retries: map.retries,
        // What a worker has ahead is begun though nothing new is to be: then it has nothing ahead.
        prefetch: map.halt.is_never(),
    };
    plan.order = if map.keep_order { Order::Input } else { Order::Completion };
    plan.bounds = Bounds {
        host_memory: map.worker_memory.map(|mib| mib << 20),
        processes: map.processes,
        cpu_time: map.cpu_time,
        ..Bounds::default()
    };
    plan.cpu_time_per_task = true;
    plan.setup_timeout = map.setup_timeout;
    plan.worker_lifetime = map.worker_lifetime;
    plan.output = if map.ungroup { WorkerOutput::Inherited } else { WorkerOutput::Told };
    plan.tell_started = map.json;
    if map.is_without_gpus() {
        let cpus = || std::thread::available_parallelism().map_or(1, |cpus| u32::try_from(cpus.get()).unwrap_or(1));
        plan.places = (0..map.jobs.unwrap_or_else(cpus)).map(|id| place(WorkerId(id))).collect();
    }
    plan
}

/// A worker's place without a GPU, in which commands find the number of their worker.
pub(super) fn place(id: WorkerId) -> Place {
    let mut place = Place::new(id);
    place.environment.push((SLOT.into(), Some((id.0 + 1).to_string())));
    place
}
