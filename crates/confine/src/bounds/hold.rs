//! Taking a job under watch, and letting go of it.

use std::sync::{Arc, Mutex, OnceLock};

use super::bound::{Bounds, Usage};
use super::enforcement::{Enforcement, Means};
use super::excess::Excess;
use super::look::Watched;
use super::table::Table;
use super::watcher::{Shared, Watcher, lock};
use crate::cgroup::{Cgroups, GroupError, Limits, Meter};
use crate::process::ProcFs;
use crate::spawn::{Job, Prepared, SpawnError};

/// A job that is held to its bounds. Dropping it stops the looking (a call of `on_excess` that has begun goes on); what
/// the kernel keeps, it keeps until the job's end.
#[derive(Debug)]
pub struct Held {
    shared: Arc<Shared>,
    /// Under which number it is looked at, if it is.
    key: Option<u64>,
    watched: Arc<Mutex<Watched>>,
    enforcement: Enforcement,
    told: Arc<OnceLock<Excess>>,
    host_memory: Option<u64>,
}

impl Watcher {
    /// Takes a job that does not run yet under watch, in a group of its own where one can be made. The name is that of
    /// the group, and must be no other's.
    ///
    /// `on_excess` is called at most once, on the watcher's thread, when the job passed a bound and still runs; the caller
    /// then kills it. It must not take long, as no job is looked at meanwhile.
    pub fn hold(
        &self,
        prepared: &mut Prepared,
        name: &str,
        bounds: &Bounds,
        on_excess: Box<dyn FnOnce(Excess) + Send>,
    ) -> Held {
        let (meter, enforcement) = place(&self.cgroups, prepared, name, bounds);
        let watched = Watched::new(prepared.id(), meter, bounds, &enforcement);
        let needs_looks = watched.needs_looks();
        let watched = Arc::new(Mutex::new(watched));
        let told = Arc::new(OnceLock::new());
        let tell = {
            let told = Arc::clone(&told);
            Box::new(move |excess: Excess| {
                let _ = told.set(excess.clone());
                on_excess(excess);
            })
        };
        let key = needs_looks.then(|| self.shared.add(Arc::clone(&watched), tell));
        Held { shared: Arc::clone(&self.shared), key, watched, enforcement, told, host_memory: bounds.host_memory }
    }
}

impl Held {
    /// How each of its bounds is kept.
    pub fn enforcement(&self) -> &Enforcement {
        &self.enforcement
    }

    /// What the job uses now. Without a group this looks through `/proc`, which takes about a millisecond, and longer the
    /// more memory the job has.
    pub fn usage(&self) -> Usage {
        lock(&self.watched).usage(&mut Table::new(ProcFs::here()))
    }

    /// Counts processor time from now on, so that the bound is for what comes. Without a group this looks through
    /// `/proc`.
    pub fn restart_cpu_time(&self) {
        lock(&self.watched).restart_time(&mut Table::new(ProcFs::here()));
    }

    /// Which bound the job has passed so far, while it runs: what the watcher told, or will tell at its next look because
    /// the kernel has killed one of its processes.
    pub fn excess_so_far(&self) -> Option<Excess> {
        self.told.get().cloned().or_else(|| lock(&self.watched).killed_in_part())
    }

    /// Which bound the job passed, to be asked after its end: what the watcher told, or that the kernel killed it.
    pub fn excess_at_end(&self, job: &Job) -> Option<Excess> {
        if let Some(excess) = self.told.get() {
            return Some(excess.clone());
        }
        let allowed = self.host_memory.filter(|_| job.oom_kills() > 0)?;
        Some(Excess::HostMemory { used: None, allowed })
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if let Some(key) = self.key {
            self.shared.remove(key);
        }
    }
}

/// Puts the job into a group where that is possible, and says what is in force.
fn place(cgroups: &Cgroups, prepared: &mut Prepared, name: &str, bounds: &Bounds) -> (Meter, Enforcement) {
    let (meter, mut enforcement, device_memory) = match into_group(cgroups, prepared, name, bounds) {
        Ok((meter, device_memory)) => (meter, Enforcement::of(cgroups), device_memory),
        Err(why) => (Meter::default(), Enforcement::of(&Cgroups::none(why)), Ok(())),
    };
    enforcement.cpu_time = Some(Means::cpu_time(meter.counts_cpu_time()));
    if let Err(error) = device_memory {
        enforcement.device_memory = Some(Means::Nothing { why: error });
    }
    (meter, enforcement.of_bounds(bounds))
}

/// The group's meter and whether it limits the memory of devices; or why there is no group.
fn into_group(
    cgroups: &Cgroups,
    prepared: &mut Prepared,
    name: &str,
    bounds: &Bounds,
) -> Result<(Meter, Result<(), String>), String> {
    if !cgroups.can_create() {
        return Err(cgroups.why_not().to_owned());
    }
    let limits = Limits {
        host_memory: bounds.host_memory.filter(|_| cgroups.limits_memory()),
        pids: bounds.processes.filter(|_| cgroups.limits_pids()),
    };
    let group = cgroups.create(name, &limits).map_err(|error| error.to_string())?;
    let device_memory = group.limit_device_memory(&bounds.device_memory).map_err(|error| match error {
        GroupError::NotEnforceable { why, .. } => why,
        other => other.to_string(),
    });
    let meter = group.meter();
    let joined: Result<(), SpawnError> = prepared.join(group);
    if let Err(error) = joined {
        if let Ok(Some(group)) = cgroups.open(name) {
            // Empty, and harmless where it stays.
            let _ = group.remove();
        }
        return Err(error.to_string());
    }
    Ok((meter, device_memory))
}
